"""What a metric is. Holds no Ray."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
#: Which process tells it.
Source = Literal["gateway", "worker"]

#: Takes the place of a label's value that is not in its set.
OTHER = "other"
#: Put before every name by Ray.
RAY_PREFIX = "ray_"
#: Labels that every series has, beside those of its metric and those of Ray.
BASE_LABELS = ("deployment", "replica", "application", "model")

_GATEWAY = ("specdec.gateway.", "gen_ai.")
_UNIT_SUFFIX = {"s": "_seconds", "By": "_bytes"}


@dataclass(frozen=True)
class Label:
    """A label and the closed set of its values.

    Attributes:
        name: as in OpenTelemetry.
        values: all that may occur; anything else becomes ``other``.
    """

    name: str
    values: tuple[str, ...]

    @property
    def prometheus(self) -> str:
        """The name in Prometheus."""
        return self.name.replace(".", "_")


@dataclass(frozen=True, eq=False)
class Metric:
    """A row of the table. Compared by identity: it is a key wherever something is counted.

    Attributes:
        name: as in OpenTelemetry; an instrument over OTLP has it.
        kind: of the instrument.
        unit: in UCUM: ``s``, ``By``, or what is counted, in braces.
        help: one line.
        labels: of its own, beside BASE_LABELS.
        buckets: upper bounds, of a histogram.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if (self.kind == "histogram") != bool(self.buckets):
            raise ValueError(f"{self.name}: buckets belong to histograms, and to all of them")
        if list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError(f"{self.name}: buckets do not rise")

    @property
    def source(self) -> Source:
        """Which process tells it."""
        return "gateway" if self.name.startswith(_GATEWAY) else "worker"

    @property
    def ray(self) -> str:
        """The name given to Ray."""
        return self.name.replace(".", "_") + _UNIT_SUFFIX.get(self.unit, "")

    @property
    def prometheus(self) -> str:
        """The name in Prometheus; a histogram's without ``_bucket``, ``_sum`` or ``_count``."""
        return RAY_PREFIX + self.ray + ("_total" if self.kind == "counter" else "")

    @property
    def series(self) -> int:
        """Most series that one replica can make of it, by Prometheus' count."""
        combinations = math.prod(len(label.values) + 1 for label in self.labels)
        return combinations * (len(self.buckets) + 3 if self.kind == "histogram" else 1)

    def bounded(self, values: Sequence[str]) -> tuple[str, ...]:
        """Values of its labels, in their order, those outside the sets replaced.

        Raises:
            ValueError: there are too few or too many.
        """
        return tuple(
            value if value in label.values else OTHER
            for label, value in zip(self.labels, values, strict=True)
        )

    def combinations(self) -> list[tuple[str, ...]]:
        """All values of its labels together, ``other`` left out."""
        return list(product(*(label.values for label in self.labels)))


def counter(name: str, unit: str, text: str, *labels: Label) -> Metric:
    """A sum that only grows."""
    return Metric(name, "counter", unit, text, labels)


def gauge(name: str, unit: str, text: str, *labels: Label) -> Metric:
    """A value of now."""
    return Metric(name, "gauge", unit, text, labels)


def histogram(
    name: str, unit: str, text: str, *labels: Label, buckets: tuple[float, ...]
) -> Metric:
    """A distribution over buckets."""
    return Metric(name, "histogram", unit, text, labels, buckets)
