"""Spans in OTLP are what the SDK's own encoder makes of them, whichever of the two encoded them.

What these catch: a field forgotten, a flag or a type of number confused, spans of two processes
mixed up.
"""

from __future__ import annotations

from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
)

from deployments.tracing.encoding import PlainSpan, encode

SCOPE = InstrumentationScope("specdec")
HERE, THERE = Resource.create({"service.name": "a"}), Resource.create({"service.name": "b"})
CALLER = SpanContext(2**127 + 5, 9, True, TraceFlags(1))


def span(number: int, kind: type[ReadableSpan] = ReadableSpan, **changes: Any) -> ReadableSpan:
    context = SpanContext(2**127 + 5, number, False, TraceFlags(1))
    fields: dict[str, Any] = {
        "name": f"span {number}",
        "context": context,
        "parent": CALLER if number % 2 else SpanContext(2**127 + 5, 7, False, TraceFlags(1)),
        "resource": HERE,
        "attributes": {"whole": number, "part": number / 7, "negative": -3, "large": 2**62},
        "kind": SpanKind.INTERNAL,
        "status": Status(StatusCode.UNSET),
        "start_time": 10**18 + number,
        "end_time": 10**18 + 2 * number,
        "instrumentation_scope": SCOPE,
    }
    return kind(**fields | changes)


def by_resource(request: Any) -> dict[tuple[str, int], Span]:
    """Each span, by its resource and id."""
    return {
        (str(around.resource), int.from_bytes(found.span_id, "big")): found
        for around in request.resource_spans
        for scope in around.scope_spans
        for found in scope.spans
    }


def test_as_the_sdk_encodes_them() -> None:
    link = Link(SpanContext(1, 2, True, TraceFlags(1)))
    spans = [span(number, PlainSpan) for number in range(1, 9)]
    spans += [
        span(9),
        span(10, PlainSpan, attributes={"text": "é", "flag": True}),
        span(11, PlainSpan, resource=THERE),
        span(12, PlainSpan, attributes=None),
        span(13, attributes={"text": "é", "flag": True, "list": (1, 2)}),
        span(14, events=[Event("first", {"n": 1}, 10**18)]),
        span(15, links=[link]),
        span(16, status=Status(StatusCode.ERROR, "why")),
        span(17, parent=None),
        span(
            19,
            context=SpanContext(1, 19, False, TraceFlags(1), TraceState([("vendor", "x")])),
        ),
    ]
    assert by_resource(encode(spans)) == by_resource(encode_spans(spans))
    assert len(by_resource(encode(spans))) == len(spans)
    assert not encode([]).resource_spans
