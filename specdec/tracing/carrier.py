"""A trace's context as strings, to cross a process boundary: W3C Trace Context and Baggage."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import baggage, trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from specdec.tracing import names

#: ``traceparent``, ``tracestate`` and ``baggage``.
Carrier = Mapping[str, str]


def pack(context: Context) -> dict[str, str]:
    """The current span and the baggage of ``context``; empty where there is neither."""
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, context)
    W3CBaggagePropagator().inject(carrier, context)
    return carrier


def unpack(carrier: Carrier) -> Context:
    """The context packed, or sent by a client; what is malformed is passed over."""
    context = TraceContextTextMapPropagator().extract(carrier, Context())
    return W3CBaggagePropagator().extract(carrier, context)


def context_for(carrier: Carrier) -> Context | None:
    """The same, or None where it names no trace."""
    if not carrier:
        return None
    context = unpack(carrier)
    return context if trace.get_current_span(context).get_span_context().is_valid else None


def baggage_attributes(context: Context, wanted: tuple[str, ...]) -> dict[str, str]:
    """The entries of the baggage that are to be written on spans."""
    entries = baggage.get_all(context) if wanted else {}
    return {
        f"{names.BAGGAGE_PREFIX}{name}": str(entries[name]) for name in wanted if name in entries
    }


def kept(context: Context) -> Context:
    """The same with its span counted as sampled: for the children of one that is kept anyway."""
    found = trace.get_current_span(context).get_span_context()
    flags = TraceFlags(found.trace_flags | TraceFlags.SAMPLED)
    span = SpanContext(found.trace_id, found.span_id, True, flags, found.trace_state)
    return trace.set_span_in_context(NonRecordingSpan(span), context)
