"""What is remembered of a request until its end: plain tuples, and no more than a bound of them.

Times are seconds of the scheduler's clock (``time.monotonic``).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from opentelemetry.context import Context

from specdec.policy.sequence import Sequence
from specdec.tracing.rules import Kept

#: Preemptions of one request that are told with their times.
_MOST_PREEMPTIONS = 64


class StepTimes(NamedTuple):
    """A step, the same for all its sequences."""

    began: float
    forward_ended: float
    committed: float
    draft_began: float
    draft_ended: float
    rows: int
    sequences: int


class Part(NamedTuple):
    """One sequence's part in a step: a round, or a prefill chunk where ``round`` is 0.

    ``nodes`` and ``start`` are the chunk's tokens and first position where it is one. ``drafted``
    is the number of candidates that were drafted afterwards, -1 if it was not drafted for.
    """

    step: StepTimes
    round: int
    start: int
    nodes: int
    depth: int
    estimated: float
    committed: int
    pages: int
    drafted: int

    @property
    def ended(self) -> float:
        """When it was over for this sequence: the draft that follows belongs to it."""
        return self.step.committed if self.drafted < 0 else self.step.draft_ended


class StepLog:
    """The first and the last parts of a request; those in between are only counted.

    Args:
        most: parts that are kept, 2 or more.
    """

    def __init__(self, most: int) -> None:
        self._room = most - most // 2
        self._first: list[Part] = []
        self._last: deque[Part] = deque(maxlen=most // 2)
        self._count = 0

    def add(self, part: Part) -> None:
        """Enter the next one."""
        self._count += 1
        if len(self._first) < self._room:
            self._first.append(part)
        else:
            self._last.append(part)

    def __len__(self) -> int:
        return len(self._first) + len(self._last)

    def __iter__(self) -> Iterator[Part]:
        yield from self._first
        yield from self._last

    @property
    def dropped(self) -> int:
        """How many were dropped."""
        return self._count - len(self)


@dataclass(slots=True, eq=False)
class RequestRecord:
    """A request that is traced, or may be once its end is known.

    Attributes:
        sequence: the request.
        context: holds its caller's span, and the baggage.
        sampled: whether the caller's span is.
        log: its steps.
        arrival: when it came.
        prior: tokens that an earlier attempt had emitted.
        offset_ns: from the scheduler's clock to the time of day. One for the whole request, so that
            spans lie within each other even where the time of day is set meanwhile.
        lookup: begin and end of the search for its prefix.
        load: begin and end of the writing of loaded blocks to pages.
        preempted: when its pages were taken away.
        ended: when it ended.
        kept: why its trace is kept.
        error: why it failed.
    """

    sequence: Sequence
    context: Context
    sampled: bool
    log: StepLog
    arrival: float
    prior: int
    offset_ns: int = field(default_factory=lambda: time.time_ns() - time.monotonic_ns())
    lookup: tuple[float, float] | None = None
    load: tuple[float, float] | None = None
    preempted: list[float] = field(default_factory=list)
    ended: float = 0.0
    kept: Kept | None = None
    error: str | None = None

    def wall(self, seconds: float) -> int:
        """A time of the scheduler's clock as nanoseconds since 1970."""
        return self.offset_ns + int(seconds * 1e9)

    def note_preemption(self, when: float) -> None:
        """Its pages were taken away."""
        if len(self.preempted) < _MOST_PREEMPTIONS:
            self.preempted.append(when)
