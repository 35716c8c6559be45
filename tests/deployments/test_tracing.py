"""The gateway's span around an ASGI application, and the SDK that sends it.

Against the SDK's own exporter and propagators; the real server is in test_traces.py.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bench.otlp import OtlpReceiver
from bench.server import free_port
from deployments.tracing.middleware import TraceRequests
from deployments.tracing.request import current_trace
from deployments.tracing.settings import TraceSettings
from deployments.tracing.setup import Tracing
from specdec.config import validate_settings
from specdec.errors import ConfigError
from specdec.outputs import RequestStats
from specdec.params import SamplingParams
from specdec.tracing import names
from specdec.tracing.carrier import context_for

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-01", f"00-{TRACE_ID}-{SPAN_ID}-00"
CHAT = "/v1/chat/completions"
Inside = Callable[[], Awaitable[ASGIApp]]


async def fine() -> ASGIApp:
    return JSONResponse({"fine": True})


def ask(
    inside: Inside = fine,
    headers: Sequence[tuple[str, str]] = (),
    path: str = CHAT,
    leave: bool = False,
    **settings: Any,
) -> list[ReadableSpan]:
    """The spans that are sent of one request; ``leave`` is the client's going while it runs."""
    exporter = InMemorySpanExporter()
    values = {"enabled": True, "sample_ratio": 1.0, **settings}
    tracing = Tracing(validate_settings(TraceSettings, values), "gateway", exporter)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (await inside())(scope, receive, send)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": "POST",
        "path": path,
        "headers": [(k.encode(), v.encode("latin-1")) for k, v in headers],
    }

    async def receive() -> Message:
        if not leave:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        pass

    asyncio.run(asyncio.wait_for(TraceRequests(app, tracing, "m")(scope, receive, send), 30))
    assert current_trace().carrier() == {}  # nothing is left behind
    tracing.close(30)
    return list(exporter.get_finished_spans())


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def stats(total_s: float) -> RequestStats:
    return RequestStats(1, 1, 0, 0, 0, (), (), 0, 0, 0, 0.0, None, total_s)


def test_the_clients_trace_goes_on_and_into_the_worker() -> None:
    carriers: list[dict[str, str]] = []

    async def inside() -> ASGIApp:
        carriers.append(dict(current_trace().carrier()))
        return await fine()

    headers = [("traceparent", SAMPLED), ("tracestate", "a=b"), ("baggage", "x=1")]
    (span,) = ask(inside, [*headers, ("baggage", "y=2,z=%41")], baggage=["y", "missing"])
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE_ID, SPAN_ID)
    assert span.name == "chat m"
    assert attributes(span)["baggage.y"] == "2"
    assert "baggage.x" not in attributes(span)
    (carrier,) = carriers
    own = span.get_span_context()
    assert own is not None
    assert carrier["traceparent"] == f"00-{TRACE_ID}-{own.span_id:016x}-01"
    assert carrier["tracestate"] == "a=b"
    assert sorted(carrier["baggage"].split(",")) == ["x=1", "y=2", "z=A"]
    context = context_for(carrier)
    assert context is not None
    assert trace.get_current_span(context).get_span_context().span_id == own.span_id


@pytest.mark.parametrize(
    "headers",
    [
        [("traceparent", "nonsense")],
        [("traceparent", SAMPLED), ("traceparent", SAMPLED)],
        [("traceparent", f"00-{'0' * 32}-{SPAN_ID}-01")],
        [("traceparent", "\xff\xfe"), ("baggage", "=;,\xff" * 5000)],
        [],
    ],
)
def test_without_a_sound_traceparent_a_trace_begins_here(headers: list[tuple[str, str]]) -> None:
    (span,) = ask(headers=headers)
    assert span.parent is None
    assert ask(headers=headers, sample_ratio=0.0) == []


def test_the_clients_flag_outweighs_the_ratio() -> None:
    assert len(ask(headers=[("traceparent", SAMPLED)], sample_ratio=0.0)) == 1
    assert ask(headers=[("traceparent", UNSAMPLED)], sample_ratio=1.0) == []


def test_an_unsampled_failure_is_kept_and_the_worker_is_told_that_it_is_not_sampled() -> None:
    carriers: list[str] = []

    async def inside() -> ASGIApp:
        carriers.append(current_trace().carrier()["traceparent"])
        current_trace().routed(time.time_ns())
        return JSONResponse({}, 503)

    gateway, route = ask(inside, [("traceparent", UNSAMPLED)])
    if gateway.name == names.SPAN_ROUTE:
        gateway, route = route, gateway
    assert carriers[0].endswith("-00")
    assert attributes(gateway)[names.KEPT] == "failed"
    assert gateway.status.status_code is StatusCode.ERROR
    assert route.parent is not None
    own = gateway.get_span_context()
    assert own is not None
    assert route.parent.span_id == own.span_id
    assert own.trace_flags.sampled  # what is sent is marked so


def test_the_clients_own_mistakes_are_no_errors_and_not_kept() -> None:
    async def refused() -> ASGIApp:
        return JSONResponse({}, 400)

    assert ask(refused, [("traceparent", UNSAMPLED)]) == []
    (span,) = ask(refused)
    assert span.status.status_code is StatusCode.UNSET
    assert attributes(span)[names.ERROR_TYPE] == "400"


def test_it_is_kept_wherever_a_worker_keeps_its_part() -> None:
    def told(seconds: float | None) -> Inside:
        async def inside() -> ASGIApp:
            current_trace().requested("id", "m", SamplingParams(), 1, False)
            if seconds is not None:
                current_trace().finished(stats(seconds))
            return await fine()

        return inside

    headers = [("traceparent", UNSAMPLED)]
    assert ask(told(4.9), headers, slow_s=5) == []
    (span,) = ask(told(5.0), headers, slow_s=5)
    assert attributes(span)[names.KEPT] == "slow"
    assert ask(told(None), headers, slow_s=5) == []


def test_a_stream_ends_its_span_when_the_client_leaves() -> None:
    async def endless() -> ASGIApp:
        async def events() -> Any:
            while True:
                current_trace().piece(0, "x", None)  # the context is there, in another task
                yield b"x"
                await asyncio.sleep(0.01)

        return StreamingResponse(events())

    (span,) = ask(endless, leave=True)
    assert attributes(span)[names.OUTCOME] == "disconnected"
    assert attributes(span)[names.HTTP_STATUS] == 200


def test_text_is_captured_only_where_switched_on() -> None:
    async def inside() -> ASGIApp:
        current_trace().asked([{"role": "user", "content": "wombat?"}])
        current_trace().piece(0, "a wom", None)
        current_trace().piece(0, "bat", "stop")
        return await fine()

    (span,) = ask(inside)
    assert "wombat" not in json.dumps(attributes(span))
    (span,) = ask(inside, capture_text=True)
    assert json.loads(attributes(span)[names.INPUT_MESSAGES]) == [
        {"role": "user", "parts": [{"type": "text", "content": "wombat?"}]}
    ]
    (said,) = json.loads(attributes(span)[names.OUTPUT_MESSAGES])
    assert said["parts"][0]["content"] == "a wombat"
    assert said["finish_reason"] == "stop"


def test_other_paths_are_not_traced() -> None:
    assert ask(path="/health") == []


@pytest.fixture
def around(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[TracerProvider, InMemorySpanExporter]]:
    """A provider as Ray Serve sets one, for the time of the test."""
    provider = TracerProvider()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield provider, InMemorySpanExporter()
    provider.shutdown()


@pytest.mark.parametrize("serve_has_the_clients_trace", [True, False])
def test_a_span_of_ray_serve_comes_between_or_is_linked(
    around: tuple[TracerProvider, InMemorySpanExporter], serve_has_the_clients_trace: bool
) -> None:
    provider, _ = around
    headers = [("traceparent", SAMPLED)]
    context = context_for(dict(headers)) if serve_has_the_clients_trace else None
    with provider.get_tracer("serve").start_as_current_span("replica", context) as serve:
        spans = ask(headers=headers)
    (ours,) = [span for span in spans if span.name == "chat m"]
    assert ours.parent is not None
    if serve_has_the_clients_trace:
        assert ours.parent.span_id == serve.get_span_context().span_id
    else:
        assert f"{ours.parent.span_id:016x}" == SPAN_ID
        assert [link.context.span_id for link in ours.links] == [serve.get_span_context().span_id]


def test_without_a_client_the_trace_of_ray_serve_goes_on_and_is_sent_too(
    around: tuple[TracerProvider, InMemorySpanExporter],
) -> None:
    provider, exporter = around
    settings = TraceSettings(enabled=True)
    tracing = Tracing(settings, "gateway", exporter)
    with provider.get_tracer("serve").start_as_current_span("replica") as serve:
        (ours,) = ask(headers=[])
    tracing.close(30)
    assert ours.parent is not None
    assert ours.parent.span_id == serve.get_span_context().span_id
    assert "replica" in [span.name for span in exporter.get_finished_spans()]


class Collector(BaseHTTPRequestHandler):
    """Takes what is posted to it; ``received`` is the server's."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.received.append((self.path, dict(self.headers), body))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def test_both_protocols_arrive() -> None:
    receiver = OtlpReceiver()
    http = HTTPServer(("127.0.0.1", 0), Collector)
    http.received = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        url = f"http://127.0.0.1:{http.server_port}/"
        for endpoint, protocol in ((receiver.url, "grpc"), (url, "http/protobuf")):
            values = {
                "enabled": True,
                "endpoint": endpoint,
                "protocol": protocol,
                "headers": {"authorization": "Bearer token"},
                "service_name": "mine",
            }
            tracing = Tracing(validate_settings(TraceSettings, values), "worker")
            tracing.tracer.start_span("hello", attributes={names.KEPT: "slow"}).end()
            tracing.close(30)
        (span,) = receiver.spans
        assert (span.name, span.resource["service.name"]) == ("hello", "mine")
        ((path, headers, body),) = http.received  # type: ignore[attr-defined]
        assert path == "/v1/traces"
        assert headers["authorization"] == "Bearer token"
        request = ExportTraceServiceRequest.FromString(body)
        assert request.resource_spans[0].scope_spans[0].spans[0].name == "hello"
    finally:
        http.shutdown()
        http.server_close()
        receiver.stop()


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_dead_endpoint_holds_up_neither_spans_nor_the_end(protocol: str) -> None:
    values = {
        "enabled": True,
        "endpoint": f"http://127.0.0.1:{free_port()}",
        "protocol": protocol,
        "timeout_s": 60,
    }
    tracing = Tracing(validate_settings(TraceSettings, values), "worker")

    def make(_: int) -> float:
        began = time.monotonic()
        for _ in range(5000):
            tracing.tracer.start_span("x", attributes={names.KEPT: "slow"}).end()
        return time.monotonic() - began

    with ThreadPoolExecutor(2) as threads:
        took = list(threads.map(make, range(2)))
    assert max(took) < 30  # they are dropped, not waited for
    began = time.monotonic()
    tracing.close(0.5)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("endpoint", "localhost:4317"),
        ("sample_ratio", 1.5),
        ("detail", "all"),
        ("protocol", "http/json"),
        ("endpont", "http://x"),
    ],
)
def test_bad_settings_are_named(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        validate_settings(TraceSettings, {key: value})


def test_off_means_no_thread_and_no_span() -> None:
    before = threading.active_count()
    tracing = Tracing(TraceSettings(), "worker")
    assert not tracing.tracer.start_span("x").is_recording()
    assert type(tracing.observer()).__name__ == "NullObserver"
    assert threading.active_count() == before
    tracing.close()
