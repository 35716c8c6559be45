"""Traces of the real server with two workers, received by a real OTLP receiver."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from bench.otlp import OtlpReceiver, ReceivedSpan
from bench.server import Server, free_port, running_server
from specdec.config import DEFAULT_MODEL
from specdec.tracing import names

pytestmark = pytest.mark.slow

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
#: A request of so many tokens is slow on any machine: one of few is not on most.
SLOW_S = 1.0


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    found = OtlpReceiver()
    yield found
    found.stop()


@pytest.fixture(scope="module")
def traced(receiver: OtlpReceiver) -> Iterator[Server]:
    changes: dict[str, dict[str, Any]] = {
        "engine": {"threads": 1, "kv": {"memory_gib": 0.25}},
        "worker": {"replicas": 2},
        "traces": {
            "enabled": True,
            "endpoint": receiver.url,
            "protocol": "grpc",
            "sample_ratio": 0,
            "slow_s": SLOW_S,
            "baggage": ["tier"],
        },
    }
    with running_server(changes, DEFAULT_MODEL) as found:
        yield found


class Client:
    """One request, with the ids that a traced client would send."""

    def __init__(self, server: Server, sampled: bool = True) -> None:
        self._server = server
        self.trace_id, self.span_id = secrets.token_hex(16), secrets.token_hex(8)
        self.headers = {
            "traceparent": f"00-{self.trace_id}-{self.span_id}-0{int(sampled)}",
            "baggage": "tier=gold,secret=none-of-yours",
        }

    def body(self, question: str, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": question}]
        return {
            "model": self._server.model,
            "messages": messages,
            "max_tokens": 24,
            "temperature": 0,
            **fields,
        }

    def ask(self, question: str = "Count to ten, twice.", **fields: Any) -> dict[str, Any]:
        answer = httpx.post(
            f"{self._server.url}{CHAT}",
            json=self.body(question, **fields),
            headers=self.headers,
            timeout=120,
        )
        found: dict[str, Any] = answer.json()
        return found


def of_trace(spans: Sequence[ReceivedSpan], trace_id: str) -> list[ReceivedSpan]:
    return [span for span in spans if span.trace_id == trace_id]


def named(spans: Sequence[ReceivedSpan], name: str) -> list[ReceivedSpan]:
    return [span for span in spans if span.name == name]


def is_whole(spans: Sequence[ReceivedSpan], requests: int = 1) -> bool:
    """Whether gateway and workers have sent all that they have of a trace."""
    workers = named(spans, names.SPAN_REQUEST)
    rounds = sum(worker.attributes[names.ROUNDS] for worker in workers)
    gateways = [span for span in spans if names.OPERATION in span.attributes]
    return (
        len(workers) == requests
        and len(gateways) == 1
        and len(named(spans, names.SPAN_ROUND)) >= rounds
        and len(named(spans, names.SPAN_VERIFY)) >= rounds
    )


def whole(receiver: OtlpReceiver, client: Client, requests: int = 1) -> list[ReceivedSpan]:
    found = receiver.wait_for(lambda spans: is_whole(of_trace(spans, client.trace_id), requests))
    return of_trace(found, client.trace_id)


def assert_connected(spans: Sequence[ReceivedSpan], client: Client) -> None:
    """One tree below the client's span; children within their parents in time."""
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    roots = [span for span in spans if span.parent_id not in by_id]
    assert [root.parent_id for root in roots] == [client.span_id]
    for span in spans:
        assert span.start <= span.end
        above = by_id.get(span.parent_id)
        if above is not None:
            assert above.start <= span.start, f"{span.name} begins before {above.name}"
            assert span.end <= above.end, f"{span.name} ends after {above.name}"


def total(spans: Sequence[ReceivedSpan], name: str) -> int:
    return sum(span.attributes[name] for span in spans)


def test_a_request_is_one_connected_trace(traced: Server, receiver: OtlpReceiver) -> None:
    client = Client(traced)
    usage = client.ask()["usage"]
    spans = whole(receiver, client)
    assert_connected(spans, client)

    (gateway,) = [span for span in spans if span.parent_id == client.span_id]
    (worker,) = named(spans, names.SPAN_REQUEST)
    assert gateway.name == f"chat {traced.model}"
    assert worker.parent_id == gateway.span_id
    assert gateway.resource[names.ROLE] == "gateway"
    assert worker.resource[names.ROLE] == "worker"
    assert gateway.resource["service.name"] == worker.resource["service.name"] == "specdec"
    assert gateway.attributes[names.OUTPUT_TOKENS] == usage["completion_tokens"]
    assert gateway.attributes[names.INPUT_TOKENS] == usage["prompt_tokens"]
    assert gateway.attributes[names.HTTP_STATUS] == 200
    assert len(gateway.attributes[names.RESPONSE_FINISH_REASONS]) == 1

    rounds, chunks = named(spans, names.SPAN_ROUND), named(spans, names.SPAN_PREFILL)
    assert {span.parent_id for span in rounds + chunks} == {worker.span_id}
    assert len(rounds) == worker.attributes[names.ROUNDS] > 0
    # the chunk that ends the prefill commits the first token
    assert (
        total(rounds, names.COMMITTED) + total(chunks, names.COMMITTED)
        == (usage["completion_tokens"])
    )
    details = usage["completion_tokens_details"]
    assert total(rounds, names.ACCEPTED) == details["accepted_prediction_tokens"]
    assert total(rounds, names.NODES) == sum(details.values())
    assert {span.name for span in spans} - {gateway.name} == {
        names.SPAN_ROUTE,
        names.SPAN_REQUEST,
        names.SPAN_QUEUE,
        names.SPAN_LOOKUP,
        names.SPAN_PREFILL,
        names.SPAN_ROUND,
        names.SPAN_VERIFY,
        names.SPAN_DRAFT,
    }


def test_baggage_reaches_the_worker_and_text_stays_inside(
    traced: Server, receiver: OtlpReceiver
) -> None:
    client = Client(traced)
    client.ask("Where does the wombat live?")
    spans = whole(receiver, client)
    told = [span for span in spans if f"{names.BAGGAGE_PREFIX}tier" in span.attributes]
    assert sorted(span.resource[names.ROLE] for span in told) == ["gateway", "worker"]
    everything = json.dumps([dict(span.attributes) for span in spans])
    assert "wombat" not in everything
    assert "none-of-yours" not in everything


def test_both_workers_are_part_of_a_requests_trace(traced: Server, receiver: OtlpReceiver) -> None:
    """Several choices of one request, on whichever worker: all below one gateway's span."""
    seen: set[str] = set()
    for attempt in range(10):
        client = Client(traced)
        client.ask(f"Name {attempt + 2} rivers.", n=4, temperature=0.8)
        spans = whole(receiver, client, requests=4)
        assert_connected(spans, client)
        workers = named(spans, names.SPAN_REQUEST)
        (gateway,) = [span for span in spans if names.OPERATION in span.attributes]
        emitted = total(workers, names.COMPLETION_TOKENS)
        assert emitted == gateway.attributes[names.OUTPUT_TOKENS]
        seen |= {worker.resource["service.instance.id"] for worker in workers}
        if len(seen) == 2:
            return
    pytest.fail(f"only {seen} had anything to do")


def test_a_stream_that_the_client_leaves_ends_its_spans(
    traced: Server, receiver: OtlpReceiver
) -> None:
    client = Client(traced)
    body = client.body("Tell a very long story.", stream=True, max_tokens=1000)
    with httpx.stream(
        "POST", f"{traced.url}{CHAT}", json=body, headers=client.headers, timeout=120
    ) as answer:
        lines = answer.iter_lines()
        for _ in range(6):
            next(lines)
    spans = whole(receiver, client)
    (gateway,) = [span for span in spans if names.OPERATION in span.attributes]
    (worker,) = named(spans, names.SPAN_REQUEST)
    assert gateway.attributes[names.OUTCOME] == "disconnected"
    assert gateway.attributes[names.REQUEST_STREAM] is True
    assert gateway.attributes[names.RESPONSE_FIRST_CHUNK_S] > 0
    assert worker.attributes[names.FINISH_REASON] == "abort"
    # it hears of it a little later, so it alone may end after the gateway
    assert worker.parent_id == gateway.span_id


def test_a_stream_read_to_its_end_is_traced_to_its_end(
    traced: Server, receiver: OtlpReceiver
) -> None:
    client = Client(traced)
    body = client.body("Count to five.", stream=True)
    answer = httpx.post(f"{traced.url}{CHAT}", json=body, headers=client.headers, timeout=120)
    assert answer.text.endswith("data: [DONE]\n\n")
    spans = whole(receiver, client)
    assert_connected(spans, client)
    (gateway,) = [span for span in spans if names.OPERATION in span.attributes]
    assert gateway.attributes[names.OUTCOME] == "completed"


def test_unsampled_requests_are_kept_if_slow_or_failed(
    traced: Server, receiver: OtlpReceiver
) -> None:
    quick, slow = Client(traced, sampled=False), Client(traced, sampled=False)
    wrong = Client(traced)
    began = time.monotonic()
    quick.ask("Hi", max_tokens=1)
    quick_s = time.monotonic() - began
    fields = {"max_tokens": 400, "ignore_eos": True, "temperature": 0.9, "seed": 3}
    body = slow.body("Tell a very long story.", **fields)
    began = time.monotonic()
    answer = httpx.post(f"{traced.url}{CHAT}", json=body, headers=slow.headers, timeout=300)
    assert answer.status_code == 200, answer.text
    assert time.monotonic() - began > SLOW_S
    assert wrong.ask(model="nobody's")["error"]["code"] == "model_not_found"

    spans = receiver.wait_for(
        lambda all_spans: (
            any(names.OPERATION in span.attributes for span in of_trace(all_spans, slow.trace_id))
            and len(named(of_trace(all_spans, slow.trace_id), names.SPAN_REQUEST)) == 1
            and bool(of_trace(all_spans, wrong.trace_id))
        )
    )
    assert_no_orphans(of_trace(spans, slow.trace_id), slow)
    assert {
        span.attributes[names.KEPT]
        for span in of_trace(spans, slow.trace_id)
        if names.KEPT in span.attributes
    } == {"slow"}
    (refused,) = of_trace(spans, wrong.trace_id)
    assert refused.attributes[names.HTTP_STATUS] == 404
    assert not refused.failed  # the client's fault
    if quick_s < SLOW_S:
        assert not of_trace(spans, quick.trace_id)


def assert_no_orphans(spans: Sequence[ReceivedSpan], client: Client) -> None:
    known = {span.span_id for span in spans} | {client.span_id}
    assert {span.parent_id for span in spans} <= known


def test_a_dead_endpoint_loses_no_request() -> None:
    """Nobody listens, everything is sampled, replicas stop: all are answered, in good time."""
    changes: dict[str, dict[str, Any]] = {
        "engine": {"kv": {"memory_gib": 0.25}, "batch": {"max_sequences": 4}},
        "traces": {
            "enabled": True,
            "endpoint": f"http://127.0.0.1:{free_port()}",
            "sample_ratio": 1,
        },
    }
    with running_server(changes, DEFAULT_MODEL) as server, ThreadPoolExecutor(4) as threads:
        answers = list(
            threads.map(lambda i: Client(server).ask(f"Say {i}.", max_tokens=16), range(24))
        )
        assert all(answer["choices"][0]["finish_reason"] for answer in answers)
        stopping = time.monotonic()
    assert time.monotonic() - stopping < 60
