"""From the record of a request to its spans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

from specdec.tracing import names
from specdec.tracing.carrier import baggage_attributes, kept
from specdec.tracing.record import Part, RequestRecord
from specdec.tracing.rules import TraceRules

Attributes = Mapping[str, AttributeValue]


def write_request(tracer: Tracer, record: RequestRecord, rules: TraceRules) -> Iterator[Span]:
    """Make and end the spans of a request, parents before their children.

    The caller's span counts as sampled: whether the trace is kept is decided already.
    """
    maker = _Maker(tracer, record)
    stats = record.sequence.stats
    parts = list(record.log)
    ended = max([record.ended, *(part.ended for part in parts)])
    root = maker.start(names.SPAN_REQUEST, kept(record.context), record.arrival)
    root.set_attributes(_request_attributes(record))
    root.set_attributes(baggage_attributes(record.context, rules.baggage))
    if stats.first_token is not None:
        root.add_event(names.EVENT_FIRST_TOKEN, timestamp=record.wall(stats.first_token))
    for when in record.preempted:
        root.add_event(names.EVENT_PREEMPTED, timestamp=record.wall(when))
    if rules.detail == "events":
        for part in parts:
            if part.round:
                seconds = {names.ROUND_S: part.ended - part.step.began}
                root.add_event(
                    names.EVENT_ROUND,
                    _round_attributes(record, part) | seconds,
                    record.wall(part.ended),
                )
    if record.error is not None:
        when = record.wall(record.ended)
        root.add_event(names.EVENT_FAILED, {names.ERROR_MESSAGE: record.error}, when)
        root.set_status(Status(StatusCode.ERROR, record.error))
    root.end(record.wall(ended))
    yield root

    inside = trace.set_span_in_context(root, record.context)
    first = stats.first_scheduled
    yield maker.make(
        names.SPAN_QUEUE, inside, record.arrival, record.ended if first is None else first
    )
    if record.lookup is not None:
        yield maker.make(names.SPAN_LOOKUP, inside, *record.lookup, _prefix_attributes(record))
    if record.load is not None:
        loaded = {names.PREFIX_STORE_TOKENS: stats.loaded}
        yield maker.make(names.SPAN_LOAD, inside, *record.load, loaded)
    for part in parts:
        if not part.round:
            yield from _chunk(maker, inside, part)
        elif rules.detail == "spans":
            yield from _round(maker, inside, part)


@dataclass(frozen=True)
class _Maker:
    tracer: Tracer
    record: RequestRecord

    def start(self, name: str, context: Context, began: float) -> Span:
        return self.tracer.start_span(
            name, context, SpanKind.INTERNAL, start_time=self.record.wall(began)
        )

    def make(
        self,
        name: str,
        context: Context,
        began: float,
        ended: float,
        attributes: Attributes | None = None,
    ) -> Span:
        """A span that has ended."""
        span = self.tracer.start_span(
            name, context, SpanKind.INTERNAL, attributes, start_time=self.record.wall(began)
        )
        span.end(self.record.wall(ended))
        return span


def _chunk(maker: _Maker, inside: Context, part: Part) -> Iterator[Span]:
    attributes = {
        names.CHUNK_START: part.start,
        names.CHUNK_TOKENS: part.nodes,
        names.COMMITTED: part.committed,
        names.KV_PAGES: part.pages,
        names.STEP_SEQUENCES: part.step.sequences,
        names.STEP_ROWS: part.step.rows,
    }
    span = maker.make(names.SPAN_PREFILL, inside, part.step.began, part.ended, attributes)
    yield span
    yield from _draft(maker, span, inside, part)


def _round(maker: _Maker, inside: Context, part: Part) -> Iterator[Span]:
    attributes = _round_attributes(maker.record, part)
    span = maker.make(names.SPAN_ROUND, inside, part.step.began, part.ended, attributes)
    yield span
    within = trace.set_span_in_context(span, inside)
    forward = {names.FORWARD_S: part.step.forward_ended - part.step.began}
    yield maker.make(names.SPAN_VERIFY, within, part.step.began, part.step.committed, forward)
    yield from _draft(maker, span, inside, part)


def _draft(maker: _Maker, span: Span, inside: Context, part: Part) -> Iterator[Span]:
    """The draft of all sequences of the step, as seen by one of them."""
    if part.drafted >= 0:
        within = trace.set_span_in_context(span, inside)
        step, drafted = part.step, {names.NODES: part.drafted}
        yield maker.make(names.SPAN_DRAFT, within, step.draft_began, step.draft_ended, drafted)


def _round_attributes(record: RequestRecord, part: Part) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        names.ROUND_INDEX: part.round,
        names.NODES: part.nodes,
        names.DEPTH: part.depth,
        names.ESTIMATED: part.estimated,
        names.ACCEPTED: part.committed - 1,
        names.COMMITTED: part.committed,
        names.KV_PAGES: part.pages,
        names.STEP_SEQUENCES: part.step.sequences,
        names.STEP_ROWS: part.step.rows,
    }
    sequence = record.sequence
    if sequence.finish_reason in ("stop", "length") and part.round == sequence.stats.rounds:
        attributes[names.FINISH_REASON] = sequence.finish_reason
    return attributes


def _prefix_attributes(record: RequestRecord) -> Attributes:
    stats = record.sequence.stats
    pool = stats.cached - stats.loaded
    tiers = [name for name, tokens in (("pool", pool), ("store", stats.loaded)) if tokens]
    return {
        names.PREFIX_TIER: "+".join(tiers) or "none",
        names.PREFIX_TOKENS: stats.cached,
        names.PREFIX_POOL_TOKENS: pool,
        names.PREFIX_STORE_TOKENS: stats.loaded,
    }


def _request_attributes(record: RequestRecord) -> Attributes:
    sequence, stats = record.sequence, record.sequence.stats
    per_round = (stats.accepted + stats.rounds) / stats.rounds if stats.rounds else 0.0
    return {
        names.REQUEST_ID: sequence.request_id,
        names.KEPT: record.kept or "",
        names.FINISH_REASON: "error" if record.error else sequence.finish_reason or "",
        names.SPECULATION: sequence.params.speculation,
        names.ACCEPTANCE_RULE: sequence.params.acceptance,
        names.PROMPT_TOKENS: sequence.prompt_length,
        names.COMPLETION_TOKENS: len(sequence.tokens) - sequence.prompt_length,
        names.PRIOR_TOKENS: record.prior,
        names.ROUNDS: stats.rounds,
        names.DRAFTED: stats.drafted,
        names.ACCEPTED_TOTAL: stats.accepted,
        names.ACCEPTED_BY_DEPTH: tuple(stats.accepted_by_depth),
        names.OFFERED_BY_DEPTH: tuple(stats.walked_by_depth),
        names.TOKENS_PER_ROUND: per_round,
        names.PREEMPTIONS: stats.preemptions,
        names.STEPS_DROPPED: record.log.dropped,
    }
