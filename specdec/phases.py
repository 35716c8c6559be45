"""How long the phases of a step take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseClock:
    """Adds up seconds by phase.

    Args:
        total: per phase the seconds since start; added to.

    Attributes:
        last: per phase the seconds of the present step.
        marks: per phase of the present step when it first began and last ended, on the
            scheduler's clock.
    """

    def __init__(self, total: dict[str, float]) -> None:
        self._total = total
        self.last: dict[str, float] = {}
        self.marks: dict[str, tuple[float, float]] = {}

    def start_step(self) -> None:
        """A new step begins."""
        self.last = {}
        self.marks = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what runs inside."""
        started = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic()
            seconds = ended - started
            self.marks[name] = (self.marks.get(name, (started,))[0], ended)
            self.last[name] = self.last.get(name, 0.0) + seconds
            self._total[name] = self._total.get(name, 0.0) + seconds
