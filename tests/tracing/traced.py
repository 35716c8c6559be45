"""An engine whose spans are read back from the SDK's exporter, and what is asked of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from deployments.tracing.sink import SdkSink
from specdec.engine import Engine
from specdec.heads.drafter import NullDrafter
from specdec.outputs import RequestOutput, RequestStats
from specdec.params import SamplingParams
from specdec.tracing import names
from specdec.tracing.recorder import TraceRecorder
from specdec.tracing.rules import TraceRules
from specdec.tracing.writer import SpanWriter
from tests.engines import ScriptedDrafter, tiny_engine
from tests.tiny_models import VOCABULARY, tiny_model

TRACE, CALLER = 0x1234, 0x56
NEVER = 1e9  # seconds: no request is slow
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def sink(exporter: SpanExporter) -> SdkSink:
    return SdkSink(SimpleSpanProcessor(exporter), Resource.create({}), "test")


class Traced:
    """An engine, and the spans of its requests once it is closed."""

    def __init__(self, engine: Engine, rules: TraceRules | None = None) -> None:
        self.engine = engine
        self.exporter = InMemorySpanExporter()
        self.rules = rules or TraceRules(slow_s=NEVER)
        writer = SpanWriter(sink(self.exporter), self.rules)
        self.recorder = TraceRecorder(self.rules, writer)
        engine.observer = self.recorder
        self.stats: dict[str, RequestStats] = {}

    def add(
        self,
        name: str = "r",
        prompt: Sequence[int] = PROMPT,
        params: SamplingParams | None = None,
        sampled: bool = True,
    ) -> None:
        context = caller(sampled)
        self.engine.add_request(
            name, prompt, params or SamplingParams(max_tokens=20), context=context
        )

    def step(self) -> list[RequestOutput]:
        outputs = self.engine.step()
        self.stats |= {o.request_id: o.stats for o in outputs if o.stats is not None}
        return outputs

    def run(self) -> None:
        while self.engine.has_work:
            self.step()
        assert len(self.recorder) == 0

    def spans(self) -> list[ReadableSpan]:
        self.engine.close()
        return list(self.exporter.get_finished_spans())


def caller(sampled: bool) -> Context:
    flags = TraceFlags(TraceFlags.SAMPLED if sampled else 0)
    return trace.set_span_in_context(
        NonRecordingSpan(SpanContext(TRACE, CALLER, True, flags)), Context()
    )


@cache
def answers() -> dict[tuple[int, ...], list[int]]:
    """What plain decoding says to each prompt."""
    plain = tiny_engine(tiny_model("llama"), NullDrafter())
    found: dict[tuple[int, ...], list[int]] = {}
    for prompt in (PROMPT, PROMPT[::-1], [7, 7, 7]):
        plain.add_request("plain", prompt, SamplingParams(max_tokens=60))
        found[tuple(prompt)] = list(prompt)
        while plain.has_work:
            found[tuple(prompt)] += [t for output in plain.step() for t in output.new_tokens]
    return found


def drafting_engine(kind: str = "random", **settings: Any) -> Engine:
    """Some candidates are right, or all."""
    drafter = ScriptedDrafter(answers(), kind, VOCABULARY)
    return tiny_engine(tiny_model("llama"), drafter, **settings)


def named(spans: Sequence[ReadableSpan], name: str) -> list[ReadableSpan]:
    return [span for span in spans if span.name == name]


def attribute(span: ReadableSpan, name: str) -> Any:
    assert span.attributes is not None
    return span.attributes[name]


def total(spans: Sequence[ReadableSpan], name: str) -> int:
    return sum(attribute(span, name) for span in spans)


def assert_tree(spans: Sequence[ReadableSpan]) -> None:
    """One trace, every parent there or the caller, children within their parents in time."""
    by_id = {span.get_span_context().span_id: span for span in spans}  # type: ignore[union-attr]
    assert len(by_id) == len(spans)
    for span in spans:
        context, parent = span.get_span_context(), span.parent
        assert context is not None
        assert context.trace_id == TRACE
        assert parent is not None
        if span.name == names.SPAN_REQUEST:
            assert parent.span_id == CALLER
            continue
        above = by_id[parent.span_id]
        assert times(above)[0] <= times(span)[0] <= times(span)[1] <= times(above)[1], span.name


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time
