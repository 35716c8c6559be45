"""Hands an engine's finished spans to the SDK, as if its tracer had made them.

A span made by the SDK's tracer costs ten times as much (sampling, locks, copies of attributes), and
each round of each request has three.
"""

from __future__ import annotations

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanKind, Status, StatusCode

from deployments.tracing.encoding import PlainSpan
from specdec.tracing import names
from specdec.tracing.spans import FinishedSpan

_UNSET = Status(StatusCode.UNSET)


class SdkSink:
    """See :class:`specdec.tracing.spans.SpanSink`.

    Args:
        processor: of the SDK; is told the end of each span, and not its start.
        resource: of this process.
        library: the name of the instrumentation.
    """

    def __init__(self, processor: SpanProcessor, resource: Resource, library: str) -> None:
        self._processor = processor
        self._resource = resource
        self._scope = InstrumentationScope(library)

    def put(self, span: FinishedSpan) -> None:
        """Send it."""
        context = span.context
        whole = span.events or span.error is not None or context.trace_state
        plain = not whole and span.name != names.SPAN_REQUEST  # that one has lists
        kind = PlainSpan if plain else ReadableSpan
        self._processor.on_end(
            kind(
                span.name,
                context,
                span.parent,
                self._resource,
                span.attributes,
                [Event(event.name, event.attributes, event.at) for event in span.events],
                kind=SpanKind.INTERNAL,
                status=_UNSET if span.error is None else Status(StatusCode.ERROR, span.error),
                start_time=span.began,
                end_time=span.ended,
                instrumentation_scope=self._scope,
            )
        )
