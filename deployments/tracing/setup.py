"""The SDK of one process: which spans are recorded, and how they are sent."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import (
    Decision,
    ParentBasedTraceIdRatio,
    Sampler,
    SamplingResult,
)
from opentelemetry.trace import (
    Link,
    NoOpTracer,
    SpanContext,
    SpanKind,
    TraceFlags,
    Tracer,
    TraceState,
)
from opentelemetry.util.types import Attributes

from deployments.tracing.encoding import encode
from deployments.tracing.settings import TraceSettings
from deployments.tracing.sink import SdkSink
from prefix_cache.priority import give_way
from specdec.tracing import names
from specdec.tracing.observer import Guarded, NullObserver, Observer
from specdec.tracing.recorder import TraceRecorder
from specdec.tracing.writer import SpanWriter

_LIBRARY = "specdec"
#: Spans that wait to be sent; beyond, the oldest are dropped.
_QUEUE = 8192
#: Spans sent at once. Few, as they are encoded in one go, which keeps the interpreter busy.
_BATCH = 128
_EVERY_MS = 1000.0


class Tracing:
    """What a process needs for its spans.

    Args:
        settings: the section ``traces``.
        role: ``gateway`` or ``worker``.
        exporter: where spans go; None follows the settings.

    Attributes:
        settings: as given.
        tracer: makes spans; none at all where traces are off.
    """

    def __init__(
        self, settings: TraceSettings, role: str, exporter: SpanExporter | None = None
    ) -> None:
        self.settings = settings
        self.tracer: Tracer = NoOpTracer()
        self._provider: TracerProvider | None = None
        if not settings.enabled:
            return
        self._exporter = exporter or make_exporter(settings)
        with ThreadPoolExecutor(1, initializer=give_way) as below:  # its thread inherits that
            made = below.submit(BatchSpanProcessor, self._exporter, _QUEUE, _EVERY_MS, _BATCH)
        self._batch = made.result()
        self._provider = TracerProvider(
            sampler=RecordAll(settings.sample_ratio),
            resource=Resource.create(
                {
                    "service.name": settings.service_name,
                    "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
                    names.ROLE: role,
                }
            ),
            # Rounds can be events, and none is to be lost.
            span_limits=SpanLimits(max_events=settings.most_steps + 256),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(KeptSpans(self._batch))
        self.tracer = self._provider.get_tracer(_LIBRARY)
        # Where Ray Serve traces too, the process has a provider already, made by Serve with
        # Serve's sampler. Its spans come along, as ours may hang below them.
        serve = trace.get_tracer_provider()
        if isinstance(serve, TracerProvider):
            serve.add_span_processor(self._batch)

    def observer(self) -> Observer:
        """For an engine in this process."""
        if self._provider is None:
            return NullObserver()
        rules = self.settings.rules
        sink = SdkSink(self._batch, self._provider.resource, _LIBRARY)
        return Guarded(TraceRecorder(rules, SpanWriter(sink, rules)))

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what waits, as far as the time allows: a dead endpoint must not hold up the end."""
        if self._provider is None:
            return
        flush = threading.Thread(target=self._batch.force_flush, name="trace-flush", daemon=True)
        flush.start()
        flush.join(timeout_s)
        self._exporter.shutdown()  # ends the retries of an export under way
        self._provider.shutdown()


class RecordAll(Sampler):
    """Samples as the parent did, or by ratio, but records the others too: how a request ends
    decides whether it is kept.
    """

    def __init__(self, ratio: float) -> None:
        self._inner = ParentBasedTraceIdRatio(ratio)

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """See the SDK's ``Sampler``."""
        result = self._inner.should_sample(
            parent_context, trace_id, name, kind, attributes, links, trace_state
        )
        if result.decision is Decision.DROP:
            return SamplingResult(Decision.RECORD_ONLY, attributes, result.trace_state)
        return result

    def get_description(self) -> str:
        """For logs."""
        return "RecordAll"


class KeptSpans(SpanProcessor):
    """Passes on sampled spans, and those that say why they are kept, as if they were sampled."""

    def __init__(self, inner: SpanProcessor) -> None:
        self._inner = inner

    def on_end(self, span: ReadableSpan) -> None:
        """Called by the SDK."""
        context = span.get_span_context()
        if context is None:
            return
        if context.trace_flags.sampled:
            self._inner.on_end(span)
        elif span.attributes and names.KEPT in span.attributes:
            self._inner.on_end(_as_sampled(span, context))

    def shutdown(self) -> None:
        """Called by the SDK."""
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Called by the SDK."""
        return self._inner.force_flush(timeout_millis)


def make_exporter(settings: TraceSettings) -> SpanExporter:
    """As the settings say. Nothing is sent yet, and nobody need listen."""
    headers = {name: value.get_secret_value() for name, value in settings.headers.items()}
    if settings.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
            OTLPSpanExporter as GrpcExporter,
        )

        class QuickGrpcExporter(GrpcExporter):
            def _translate_data(self, data: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
                return encode(data)

        return QuickGrpcExporter(
            settings.endpoint,
            insecure=settings.endpoint.startswith("http://"),
            headers=headers,
            timeout=settings.timeout_s,
        )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
        OTLPSpanExporter as HttpExporter,
    )

    endpoint = f"{settings.endpoint.rstrip('/')}/v1/traces"
    return HttpExporter(endpoint, headers=headers, timeout=settings.timeout_s)


def _as_sampled(span: ReadableSpan, context: SpanContext) -> ReadableSpan:
    flags = TraceFlags(context.trace_flags | TraceFlags.SAMPLED)
    return ReadableSpan(
        span.name,
        SpanContext(context.trace_id, context.span_id, False, flags, context.trace_state),
        span.parent,
        span.resource,
        span.attributes,
        span.events,
        span.links,
        span.kind,
        status=span.status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )
