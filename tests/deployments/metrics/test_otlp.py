"""Export by OTLP to a receiver that reads the protocol's own messages, and to none at all."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric as Told

from bench.server import free_port
from deployments.metrics import table
from deployments.metrics.otlp import OtlpSink
from deployments.metrics.publisher import Publisher
from deployments.metrics.recorder import Recorder
from deployments.metrics.table import METRICS


class Receiver:
    """A collector's endpoint; ``delay_s`` makes it slow."""

    def __init__(self, delay_s: float = 0.0) -> None:
        requests = self.requests = list[ExportMetricsServiceRequest]()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                time.sleep(delay_s)
                requests.append(ExportMetricsServiceRequest.FromString(body))
                answer = ExportMetricsServiceResponse().SerializeToString()
                with suppress(BrokenPipeError):  # who was kept waiting has left
                    self.send_response(200)
                    self.send_header("content-type", "application/x-protobuf")
                    self.send_header("content-length", str(len(answer)))
                    self.end_headers()
                    self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def last(self) -> dict[str, Told]:
        """Metrics by name, as told last."""
        return {
            metric.name: metric
            for request in list(self.requests)
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.stop()


def sink(url: str) -> OtlpSink:
    resource = {"service.name": "specdec", "service.instance.id": "r7"}
    return OtlpSink(METRICS, url, 0.2, 1.0, resource, "the-model")


def test_sums_levels_and_distributions_arrive(receiver: Receiver) -> None:
    recorder = Recorder()
    publisher = Publisher(recorder, [sink(receiver.url)], 0.05)
    for _ in range(3):
        recorder.add(table.ENDED, 2, "stop")
    recorder.set(table.PAGES, 5, "used")
    for seconds in (0.3, 3.0, 300.0):
        recorder.observe(table.DURATION, seconds, "chat", "none")
    end = time.monotonic() + 30
    while table.DURATION.name not in receiver.last():
        assert time.monotonic() < end
        time.sleep(0.05)
    recorder.add(table.ENDED, 1, "stop")
    publisher.close()
    told = receiver.last()
    (point,) = told["specdec.request.ended"].sum.data_points
    assert point.as_double == 7
    assert told["specdec.request.ended"].sum.is_monotonic
    attributes = {item.key: item.value.string_value for item in point.attributes}
    assert attributes == {"model": "the-model", "finish_reason": "stop"}
    assert told["specdec.kv.pages"].gauge.data_points[0].as_double == 5
    duration = told["gen_ai.server.request.duration"]
    assert duration.unit == "s"
    (spread,) = duration.histogram.data_points
    assert spread.sum == pytest.approx(303.3)  # exact, unlike Ray's
    assert tuple(spread.explicit_bounds) == table.DURATION.buckets
    assert spread.bucket_counts[-1] == 1
    keys = {item.key for item in spread.attributes}
    assert keys == {"model", "gen_ai.operation.name", "error.type"}
    resource = receiver.requests[0].resource_metrics[0].resource
    values = {item.key: item.value.string_value for item in resource.attributes}
    assert values["service.name"] == "specdec"
    assert values["service.instance.id"] == "r7"


@pytest.mark.parametrize("delay_s", [None, 3.0])
def test_an_endpoint_that_is_dead_or_slow_delays_nobody(delay_s: float | None) -> None:
    slow = None if delay_s is None else Receiver(delay_s)
    url = f"http://127.0.0.1:{free_port()}/v1/metrics" if slow is None else slow.url
    recorder = Recorder()
    published = []
    publisher = Publisher(recorder, [sink(url)], 0.01, lambda: published.append(0))
    slowest = 0.0
    end = time.monotonic() + 1.5  # several exports of 0.2 s
    while time.monotonic() < end:
        began = time.monotonic()
        recorder.add(table.ROUNDS)
        recorder.observe(table.STEP_TIME, 0.01)
        slowest = max(slowest, time.monotonic() - began)
        time.sleep(0.002)
    assert len(published) > 10  # the publisher never waits for the network
    assert slowest < 1.0
    began = time.monotonic()
    publisher.close()
    assert time.monotonic() - began < 20
    if slow is not None:
        slow.stop()
