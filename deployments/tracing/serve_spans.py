"""Sends the spans of Ray Serve's proxies, whose processes know nothing of this application.

For ``RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH=deployments.tracing.serve_spans:span_processors``
in the environment of Ray. The endpoint is OpenTelemetry's own ``OTEL_EXPORTER_OTLP_ENDPOINT``.
"""

from __future__ import annotations

import ray
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor

_PROXY = "SERVE_PROXY_ACTOR"


def span_processors() -> list[SpanProcessor]:
    """Called by Ray Serve in each of its processes. Replicas add their own: :class:`Tracing`."""
    name = ray.get_runtime_context().get_actor_name() or ""
    if _PROXY not in name:
        return []
    return [BatchSpanProcessor(OTLPSpanExporter())]
