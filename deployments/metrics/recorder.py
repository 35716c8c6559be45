"""Where figures are counted: plain sums in this process, taken away now and then by a publisher.

A call costs about a microsecond and never waits for whoever exports.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from deployments.metrics.definition import Metric

#: Of one series between two publications; more are dropped, so that no fault of a publisher
#: makes a server's memory grow.
_MOST_OBSERVATIONS = 10_000

Key = tuple[Metric, tuple[str, ...]]


@dataclass
class Batch:
    """What was counted since the last batch, by metric and values of its labels.

    Attributes:
        sums: what was added to counters.
        levels: last values of gauges.
        observations: values of histograms, in their order.
    """

    sums: dict[Key, float] = field(default_factory=dict)
    levels: dict[Key, float] = field(default_factory=dict)
    observations: dict[Key, list[float]] = field(default_factory=dict)


class Recorder:
    """Counts. Thread-safe.

    Values of labels follow the metric in the order of its labels; those outside their closed
    sets are counted as ``other``, whoever made them up.

    Args:
        enabled: False counts nothing.
    """

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled
        self._lock = threading.Lock()
        self._batch = Batch()

    def add(self, metric: Metric, amount: float = 1.0, *labels: str) -> None:
        """Add to a counter.

        Raises:
            ValueError: the amount is below 0, or labels are missing or too many.
        """
        if amount < 0:
            raise ValueError(f"{metric.name} only grows, not by {amount}")
        if not self._enabled or not amount:
            return
        key = _key(metric, labels)
        with self._lock:
            self._batch.sums[key] = self._batch.sums.get(key, 0.0) + amount

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """Set a gauge. One that is not set again is told no more."""
        if not self._enabled:
            return
        key = _key(metric, labels)
        with self._lock:
            self._batch.levels[key] = value

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        """Enter a value into a histogram."""
        if not self._enabled:
            return
        key = _key(metric, labels)
        with self._lock:
            values = self._batch.observations.setdefault(key, [])
            if len(values) < _MOST_OBSERVATIONS:
                values.append(value)

    def drain(self) -> Batch:
        """All since the last call."""
        with self._lock:
            batch, self._batch = self._batch, Batch()
        return batch


def _key(metric: Metric, labels: Sequence[str]) -> Key:
    return metric, metric.bounded(labels) if metric.labels or labels else ()
