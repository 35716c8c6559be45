"""A real OTLP receiver (gRPC), for tests and benchmarks: keeps what it is sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue


@dataclass(frozen=True)
class ReceivedSpan:
    """One span, its ids in hex; times in nanoseconds since 1970."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start: int
    end: int
    attributes: Mapping[str, Any]
    resource: Mapping[str, Any]
    events: tuple[str, ...]
    failed: bool


class OtlpReceiver(TraceServiceServicer):
    """Listens on a port of its own until :meth:`stop`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[ReceivedSpan] = []
        self._server = grpc.server(ThreadPoolExecutor(4))
        add_TraceServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.url = f"http://127.0.0.1:{port}"
        self._server.start()

    def Export(  # noqa: N802  # the protocol's name
        self, request: ExportTraceServiceRequest, context: object
    ) -> ExportTraceServiceResponse:
        """Called by gRPC."""
        found = [
            ReceivedSpan(
                span.trace_id.hex(),
                span.span_id.hex(),
                span.parent_span_id.hex(),
                span.name,
                span.start_time_unix_nano,
                span.end_time_unix_nano,
                _plain(span.attributes),
                _plain(part.resource.attributes),
                tuple(event.name for event in span.events),
                span.status.code == span.status.STATUS_CODE_ERROR,
            )
            for part in request.resource_spans
            for scope in part.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._spans += found
        return ExportTraceServiceResponse()

    @property
    def spans(self) -> list[ReceivedSpan]:
        """All that came."""
        with self._lock:
            return list(self._spans)

    def wait_for(
        self, done: Callable[[list[ReceivedSpan]], bool], timeout_s: float = 90.0
    ) -> list[ReceivedSpan]:
        """All that came, once that is enough.

        Raises:
            TimeoutError: it never is.
        """
        end = time.monotonic() + timeout_s
        while not done(self.spans):
            if time.monotonic() > end:
                names = sorted(f"{span.trace_id} {span.name}" for span in self.spans)
                raise TimeoutError("these spans have come, and no more:\n" + "\n".join(names))
            time.sleep(0.1)
        return self.spans

    def stop(self) -> None:
        """Listen no more."""
        self._server.stop(0).wait()


def _plain(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    return {entry.key: _value(entry.value) for entry in attributes}


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None
