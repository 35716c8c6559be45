"""Records requests on the engine's thread, and hands those over whose trace is kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context

from specdec.policy.plan import CommitResult, Segment, StepPlan
from specdec.policy.sequence import Sequence, Status
from specdec.tracing.observer import Marks
from specdec.tracing.record import Part, RequestRecord, StepLog, StepTimes
from specdec.tracing.rules import TraceRules
from specdec.tracing.writer import SpanWriter


class _Planned(NamedTuple):
    """A segment of the step under way; its sequence may give up its pages in the step."""

    record: RequestRecord
    segment: Segment
    pages: int


class TraceRecorder:
    """An :class:`specdec.tracing.observer.Observer` that appends tuples, and makes no span.

    Args:
        rules: which traces are kept.
        writer: makes spans of these; closed with this.
        clock: the scheduler's.
    """

    def __init__(
        self,
        rules: TraceRules,
        writer: SpanWriter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rules = rules
        self._writer = writer
        self._clock = clock
        self._open: dict[Sequence, RequestRecord] = {}
        self._unstarted: dict[Sequence, RequestRecord] = {}
        self._planned: list[_Planned] = []
        self._started: list[RequestRecord] = []  # in the step under way
        self._step = (0, 0)  # its rows and sequences

    def __len__(self) -> int:
        """Requests that are recorded now."""
        return len(self._open)

    def added(self, sequence: Sequence, context: Context | None) -> None:
        """Record it from now on, if it has a caller's span."""
        if context is None:
            return
        span = trace.get_current_span(context).get_span_context()
        if not span.is_valid:
            return
        log = StepLog(self._rules.most_steps)
        # one that had ended with its prior tokens was never in the queue
        arrival = sequence.stats.arrival or self._clock()
        prior = len(sequence.tokens) - sequence.prompt_length
        record = RequestRecord(sequence, context, span.trace_flags.sampled, log, arrival, prior)
        self._open[sequence] = self._unstarted[sequence] = record

    def scheduled(self, plan: StepPlan) -> None:
        """Note what the step takes away from its sequences, and what it may change."""
        self._planned.clear()
        self._started.clear()
        if not self._open:
            return
        self._step = plan.rows, len(plan.segments)
        for sequence in plan.preempted:
            if sequence in self._open:
                self._open[sequence].note_preemption(self._clock())
        if plan.loads or plan.reused:  # some may start that get no rows yet
            for early in [r for s, r in self._unstarted.items() if s.status is Status.RUNNING]:
                self._start(early)
        for segment in plan.segments:
            record = self._open.get(segment.sequence)
            if record is None:
                continue
            if segment.sequence in self._unstarted:
                self._start(record)
            lease = segment.sequence.lease
            pages = 0 if lease is None else len(lease.pages)
            self._planned.append(_Planned(record, segment, pages))

    def stepped(self, result: CommitResult, marks: Marks) -> None:
        """Enter each sequence's part in the step."""
        for record in self._started:
            if record.lookup is None:
                record.lookup = marks["schedule"]
            if record.sequence.stats.loaded:
                record.load = marks.get("load")
        if not self._planned:
            return
        draft = marks["draft"]
        times = StepTimes(
            marks["forward"][0], marks["forward"][1], marks["commit"][1], *draft, *self._step
        )
        committed = {entry.sequence: len(entry.tokens) for entry in result.committed}
        failed = set(result.failed)
        for record, segment, pages in self._planned:
            sequence, tree = segment.sequence, segment.tree
            count = committed.get(sequence, 0)
            if sequence in failed or (segment.wants_logits and not count):
                continue  # no round: it failed, or had ended before
            if tree is not None and self._rules.detail == "off":
                continue
            drafted = -1 if sequence.draft is None else len(sequence.draft) - 1
            record.log.add(
                Part(
                    times,
                    0 if tree is None else sequence.stats.rounds,
                    segment.start,
                    len(segment.tokens) - (tree is not None),
                    0 if tree is None else max(tree.depths),
                    segment.expected,
                    count,
                    pages,
                    drafted if count else -1,
                )
            )

    def ended(self, sequence: Sequence) -> None:
        """Keep its trace or forget it."""
        record = self._open.pop(sequence, None)
        if record is None:
            return
        self._unstarted.pop(sequence, None)
        ended = sequence.stats.finished
        record.ended = self._clock() if ended is None else ended
        if sequence.finish_reason == "error":
            record.error = sequence.error or "unknown"
        self._keep(record)

    def close(self, timeout_s: float) -> None:
        """Requests that have not ended failed; write what waits, as far as the time allows."""
        for record in self._open.values():
            record.ended = self._clock()
            record.error = "the engine stopped"
            self._keep(record)
        self._open.clear()
        self._unstarted.clear()
        self._writer.close(timeout_s)

    def _start(self, record: RequestRecord) -> None:
        del self._unstarted[record.sequence]
        stats = record.sequence.stats
        if stats.enqueued > stats.arrival:  # it was waited for
            record.lookup = stats.arrival, stats.enqueued
        self._started.append(record)

    def _keep(self, record: RequestRecord) -> None:
        seconds = record.ended - record.arrival
        record.kept = self._rules.why_kept(record.sampled, record.error is not None, seconds)
        if record.kept is not None:
            self._writer.put(record)
