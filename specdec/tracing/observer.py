"""Who is told of what the engine does: the interface, and nobody. Holds no torch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from opentelemetry.context import Context

from specdec.policy.plan import CommitResult, StepPlan
from specdec.policy.sequence import Sequence

log = logging.getLogger(__name__)

#: Per phase of a step when it began and ended, on the scheduler's clock.
Marks = Mapping[str, tuple[float, float]]


class Observer(Protocol):
    """Called by the engine's thread, in this order, while the engine waits: it must be quick. It
    keeps no plan and no result, and changes nothing.
    """

    def added(self, sequence: Sequence, context: Context | None) -> None:
        """A request is in the queue; ``context`` holds its caller's span, or it is not traced."""

    def scheduled(self, plan: StepPlan) -> None:
        """A step is about to run; its sequences still hold their pages."""

    def stepped(self, result: CommitResult, marks: Marks) -> None:
        """The step that was scheduled last has run, and the next trees are drafted."""

    def ended(self, sequence: Sequence) -> None:
        """A request has ended, in whatever way."""

    def close(self, timeout_s: float) -> None:
        """Nothing follows; requests that have not ended do not end any more."""


class NullObserver:
    """Looks away."""

    def added(self, sequence: Sequence, context: Context | None) -> None:
        """Nothing."""

    def scheduled(self, plan: StepPlan) -> None:
        """Nothing."""

    def stepped(self, result: CommitResult, marks: Marks) -> None:
        """Nothing."""

    def ended(self, sequence: Sequence) -> None:
        """Nothing."""

    def close(self, timeout_s: float) -> None:
        """Nothing."""


class Guarded:
    """Another observer, until it fails: then nobody looks any more, and the engine goes on.

    Args:
        inner: it.
    """

    def __init__(self, inner: Observer) -> None:
        self._inner: Observer = inner
        self._own = inner

    def added(self, sequence: Sequence, context: Context | None) -> None:
        """As of the inner one, as are all."""
        with self._guard():
            self._inner.added(sequence, context)

    def scheduled(self, plan: StepPlan) -> None:
        """See above."""
        with self._guard():
            self._inner.scheduled(plan)

    def stepped(self, result: CommitResult, marks: Marks) -> None:
        """See above."""
        with self._guard():
            self._inner.stepped(result, marks)

    def ended(self, sequence: Sequence) -> None:
        """See above."""
        with self._guard():
            self._inner.ended(sequence)

    def close(self, timeout_s: float) -> None:
        """Closes the inner one, failed or not."""
        with self._guard():
            self._own.close(timeout_s)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            log.exception("an observer failed: nothing is traced from here on")
            self._inner = NullObserver()
