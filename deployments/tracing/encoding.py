"""Spans as OTLP: what the SDK's encoder gives, sooner.

Most spans are those of rounds, with nothing but a few numbers. These are encoded here, at a third
of the encoder's time; whatever has more to it, and everything around them, is left to the encoder.
"""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span, SpanFlags
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext

_FLAGS = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_REMOTE = SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK


class PlainSpan(ReadableSpan):
    """One of kind INTERNAL with a parent, whose attributes are numbers and strings; it has no
    events, no links, no trace state, and its status is unset.
    """


def encode(spans: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
    """A request of the collector's service with these spans."""
    others: list[ReadableSpan] = []
    plain: dict[tuple[Resource, InstrumentationScope], list[ReadableSpan]] = {}
    for span in spans:
        if isinstance(span, PlainSpan) and span.instrumentation_scope is not None:
            plain.setdefault((span.resource, span.instrumentation_scope), []).append(span)
        else:
            others.append(span)
    request = encode_spans(others)
    for members in plain.values():
        around = encode_spans(members[:1]).resource_spans[0]
        scope = around.scope_spans[0]
        del scope.spans[:]
        for span in members:
            _add(scope, span)
        request.resource_spans.append(around)
    return request


def _add(scope: ScopeSpans, span: ReadableSpan) -> None:
    context, parent = span.get_span_context(), span.parent
    assert isinstance(context, SpanContext)
    assert parent is not None
    added = scope.spans.add(
        name=span.name,
        kind=Span.SPAN_KIND_INTERNAL,
        trace_id=context.trace_id.to_bytes(16, "big"),
        span_id=context.span_id.to_bytes(8, "big"),
        parent_span_id=parent.span_id.to_bytes(8, "big"),
        start_time_unix_nano=span.start_time,
        end_time_unix_nano=span.end_time,
        flags=_FLAGS | _REMOTE if parent.is_remote else _FLAGS,
    )
    added.status.SetInParent()
    add = added.attributes.add
    for key, value in (span.attributes or {}).items():
        entry = add()
        entry.key = key
        if isinstance(value, bool):
            entry.value.bool_value = value
        elif isinstance(value, int):
            entry.value.int_value = value
        elif isinstance(value, float):
            entry.value.double_value = value
        else:
            entry.value.string_value = str(value)
