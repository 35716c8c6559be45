"""From the record of a request to its spans."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from opentelemetry import trace
from opentelemetry.trace import SpanContext, TraceFlags, TraceState
from opentelemetry.util.types import AttributeValue

from specdec.tracing import names
from specdec.tracing.carrier import baggage_attributes, kept
from specdec.tracing.record import Part, RequestRecord
from specdec.tracing.rules import TraceRules

Attributes = Mapping[str, AttributeValue]
#: Of a random id; 0 is none.
_ID_BITS = 64


@dataclass(frozen=True, slots=True)
class Event:
    """Of a span; ``at`` is nanoseconds since 1970."""

    name: str
    at: int
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class FinishedSpan:
    """A span that has ended. Three come with each round, so they are nothing but their fields.

    Attributes:
        name: see :mod:`specdec.tracing.names`.
        context: its own ids.
        parent: those of the span around it.
        began: nanoseconds since 1970.
        ended: likewise.
        attributes: as OpenTelemetry has them.
        events: in the order of their times.
        error: why it failed.
    """

    name: str
    context: SpanContext
    parent: SpanContext
    began: int
    ended: int
    attributes: Attributes
    events: tuple[Event, ...] = ()
    error: str | None = None


class SpanSink(Protocol):
    """Who takes spans: whoever set up the SDK."""

    def put(self, span: FinishedSpan) -> None:
        """Send it, sampled as it is. Must be quick."""


def request_spans(record: RequestRecord, rules: TraceRules) -> Iterator[FinishedSpan]:
    """The spans of a request, parents before their children.

    The caller's span counts as sampled: whether the trace is kept is decided already.
    """
    maker = _Maker(record)
    stats = record.sequence.stats
    parts = list(record.log)
    ended = max([record.ended, *(part.ended for part in parts)])
    caller = trace.get_current_span(kept(record.context)).get_span_context()
    root = maker.make(
        names.SPAN_REQUEST,
        caller,
        record.arrival,
        ended,
        {**_request_attributes(record), **baggage_attributes(record.context, rules.baggage)},
        _events(record, rules, parts),
        record.error,
    )
    yield root

    inside = root.context
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


@dataclass(frozen=True, slots=True)
class _Maker:
    record: RequestRecord

    def make(
        self,
        name: str,
        parent: SpanContext,
        began: float,
        ended: float,
        attributes: Attributes = MappingProxyType({}),
        events: tuple[Event, ...] = (),
        error: str | None = None,
    ) -> FinishedSpan:
        wall = self.record.wall
        return FinishedSpan(
            name,
            SpanContext(
                parent.trace_id,
                random.getrandbits(_ID_BITS) or 1,
                False,
                TraceFlags(TraceFlags.SAMPLED),
                parent.trace_state or TraceState(),
            ),
            parent,
            wall(began),
            wall(ended),
            attributes,
            events,
            error,
        )


def _events(record: RequestRecord, rules: TraceRules, parts: list[Part]) -> tuple[Event, ...]:
    first_token = record.sequence.stats.first_token
    events = (
        []
        if first_token is None
        else [Event(names.EVENT_FIRST_TOKEN, record.wall(first_token), {})]
    )
    events += [Event(names.EVENT_PREEMPTED, record.wall(when), {}) for when in record.preempted]
    if rules.detail == "events":
        for part in parts:
            if part.round:
                seconds = {names.ROUND_S: part.ended - part.step.began}
                attributes = _round_attributes(record, part) | seconds
                events.append(Event(names.EVENT_ROUND, record.wall(part.ended), attributes))
    if record.error is not None:
        failed = {names.ERROR_MESSAGE: record.error}
        events.append(Event(names.EVENT_FAILED, record.wall(record.ended), failed))
    return tuple(events)


def _chunk(maker: _Maker, inside: SpanContext, part: Part) -> Iterator[FinishedSpan]:
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
    yield from _draft(maker, span.context, part)


def _round(maker: _Maker, inside: SpanContext, part: Part) -> Iterator[FinishedSpan]:
    attributes = _round_attributes(maker.record, part)
    span = maker.make(names.SPAN_ROUND, inside, part.step.began, part.ended, attributes)
    yield span
    forward = {names.FORWARD_S: part.step.forward_ended - part.step.began}
    step = part.step
    yield maker.make(names.SPAN_VERIFY, span.context, step.began, step.committed, forward)
    yield from _draft(maker, span.context, part)


def _draft(maker: _Maker, within: SpanContext, part: Part) -> Iterator[FinishedSpan]:
    """The draft of all sequences of the step, as seen by one of them."""
    if part.drafted >= 0:
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
