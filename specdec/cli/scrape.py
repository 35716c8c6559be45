"""Figures of a running server, read from its Prometheus endpoint, and how they change."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections import defaultdict, deque
from collections.abc import Callable, Mapping

from specdec.errors import SpecdecError

Labels = frozenset[tuple[str, str]]
#: Series by name of the sample.
Series = Mapping[str, Mapping[Labels, float]]

_TIMEOUT_S = 10.0
_PREFIXES = ("ray_specdec_", "ray_gen_ai_")


class ScrapeError(SpecdecError):
    """The endpoint does not answer, or with something else."""


def fetch(url: str) -> Series:
    """Read the endpoint once.

    Args:
        url: with or without ``/metrics``.

    Raises:
        ScrapeError: see there.
    """
    target = url if url.rstrip("/").endswith("/metrics") else f"{url.rstrip('/')}/metrics"
    try:
        with urllib.request.urlopen(target, timeout=_TIMEOUT_S) as answer:
            text = answer.read().decode("utf-8", "replace")
    except (OSError, ValueError, urllib.error.URLError) as error:
        raise ScrapeError(f"{target}: {error}") from error
    found = parse(text)
    if not found:
        raise ScrapeError(
            f"{target}: no metrics of specdec there; give the address of metrics.port"
        )
    return found


def parse(text: str) -> Series:
    """The server's own series of an exposition.

    Raises:
        ScrapeError: it is none.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise ScrapeError('needs prometheus_client: pip install "specdec[serve]"') from error
    own = "\n".join(line for line in text.splitlines() if line.startswith(_PREFIXES)) + "\n"
    series: dict[str, dict[Labels, float]] = defaultdict(dict)
    try:
        for family in text_string_to_metric_families(own):
            for sample in family.samples:
                series[sample.name][frozenset(sample.labels.items())] = sample.value
    except ValueError as error:
        raise ScrapeError(f"this is no exposition of Prometheus: {error}") from error
    return series


class Window:
    """The last few readings: what happened between the first and the last of them.

    Args:
        seconds: that it spans.
    """

    def __init__(self, seconds: float) -> None:
        self._span = seconds
        self._readings: deque[tuple[float, Series]] = deque()

    def add(self, at: float, series: Series) -> None:
        """Enter a reading, made at that time on the monotonic clock."""
        self._readings.append((at, series))
        while len(self._readings) > 2 and at - self._readings[1][0] >= self._span:
            self._readings.popleft()

    @property
    def seconds(self) -> float:
        """Between first and last reading."""
        return self._readings[-1][0] - self._readings[0][0] if self._readings else 0.0

    def now(self, name: str, **labels: str) -> float:
        """Sum of a metric's series with these labels, in the last reading."""
        found = self._readings[-1][1].get(name, {}) if self._readings else {}
        return sum(value for key, value in found.items() if labels.items() <= dict(key).items())

    def grown(self, name: str, **labels: str) -> float:
        """By how much it grew, in the window."""
        return sum(self.grown_by(name, lambda key: "", **labels).values())

    def rate(self, name: str, **labels: str) -> float:
        """Growth per second."""
        return self.grown(name, **labels) / self.seconds if self.seconds else 0.0

    def grown_by(
        self, name: str, part: str | Callable[[Mapping[str, str]], str], **labels: str
    ) -> dict[str, float]:
        """Growth by the value of a label. A series that fell began anew, at 0."""
        if not self._readings:
            return {}
        first = self._readings[0][1].get(name, {})
        grown: dict[str, float] = defaultdict(float)
        for key, value in self._readings[-1][1].get(name, {}).items():
            known = dict(key)
            if not labels.items() <= known.items():
                continue
            before = first.get(key, 0.0)
            change = value - before if value >= before else value
            grown[known.get(part, "") if isinstance(part, str) else part(known)] += change
        return dict(grown)

    def quantile(self, share: float, name: str) -> float | None:
        """Of a histogram, by the observations in the window; None without any."""
        by_bound = self.grown_by(f"{name}_bucket", "le")
        bounds = sorted((float(bound), count) for bound, count in by_bound.items())
        if not bounds or not bounds[-1][1]:
            return None
        wanted = share * bounds[-1][1]
        low, below = 0.0, 0.0
        for bound, count in bounds:
            if count >= wanted:
                inside = count - below
                if bound == float("inf") or not inside:
                    return low
                return low + (bound - low) * (wanted - below) / inside
            low, below = bound, count
        return low
