"""Figures and log of requests: every way in which one can end, through the gateway's layers."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from opentelemetry import trace
from ray.exceptions import TaskCancelledError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from deployments.admission import Admission, Need
from deployments.api import CompletionApi
from deployments.body import parse_object, read_body
from deployments.boundary import ErrorBoundary, http_error
from deployments.config import LimitSettings
from deployments.errors import ApiError, unavailable
from deployments.messages import WorkerInfo
from deployments.metrics import table
from deployments.metrics.recorder import Batch, Recorder
from deployments.metrics.request import note_error, note_generation
from deployments.metrics.request_log import RequestLog, open_request_log
from deployments.metrics.request_watch import OpenRequests, RequestWatch, trace_id
from deployments.metrics.settings import LogSettings
from deployments.responses import CompletionTokensDetails, PromptTokensDetails, Usage
from deployments.schema import ChatRequest, parse_request
from deployments.security.guard import Caller
from deployments.tokenizer import load_tokenizer
from specdec.config import DEFAULT_MODEL, EngineSettings
from specdec.model.resolve import resolve_model
from specdec.outputs import RequestStats

TRACE = "0af7651916cd43dd8448eb211c80319c"
CHATS = "/v1/chat/completions"
STATS = RequestStats(10, 6, 2, 8, 3, (2, 1), (2, 2), 1, 4, 0, 0.25, 0.5, 1.5)


class Told:
    """A generation that has come as far as it says."""

    def __init__(self, ended: int, choices: int = 1) -> None:
        self.first_token_at: float | None = None
        self.ended = [STATS] * ended
        self.choices = choices
        self.texts: list[list[str]] | None = None
        self.usage = Usage(
            prompt_tokens=10,
            completion_tokens=6,
            total_tokens=16,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=4),
            completion_tokens_details=CompletionTokensDetails(
                accepted_prediction_tokens=3, rejected_prediction_tokens=5
            ),
        )


class Gateway:
    """The gateway's layers around routes of the test's own."""

    def __init__(self, folder: Path, **logs: Any) -> None:
        self.recorder = Recorder()
        log = open_request_log(LogSettings(folder=folder, **logs), "r1")
        assert log is not None
        self.log: RequestLog = log
        self.open = OpenRequests()
        self.app = FastAPI(exception_handlers={404: http_error, 405: http_error})
        self.app.add_middleware(ErrorBoundary)
        self.app.add_middleware(RequestWatch, self.recorder, self.log, self.open)

    def post(self, path: str, route: Callable[[Request], Awaitable[Response]]) -> None:
        self.app.post(path, response_model=None)(route)

    def ask(self, path: str = CHATS, **request: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.post(path, **request)

        return asyncio.run(send())

    def lines(self) -> list[dict[str, Any]]:
        raw = self.log.path.read_bytes()
        assert raw.isascii()
        return [json.loads(line) for line in raw.splitlines()]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    found = Gateway(tmp_path)
    yield found
    found.log.close()


async def read_object(request: Request) -> dict[str, Any]:
    return parse_object(await read_body(request, 10_000, 10))


def counted(batch: Batch) -> dict[tuple[str, ...], float]:
    return {(metric.name, *labels): amount for (metric, labels), amount in batch.sums.items()}


async def whole(request: Request) -> Response:
    data = await read_object(request)
    generation = Told(ended=1)
    note_generation("chatcmpl-1", parse_request(ChatRequest, data), generation)
    generation.first_token_at = asyncio.get_running_loop().time()
    if generation.texts is not None:
        generation.texts[0] += ["The ", "answer\n"]
    return JSONResponse({"ok": True})


BODY = {"model": "m\n", "messages": [{"role": "user", "content": "my secret question"}]}


def test_an_answer(gateway: Gateway) -> None:
    gateway.post(CHATS, whole)
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "Authorization": "Bearer hunter2"}
    assert gateway.ask(json=BODY, headers=headers).status_code == 200
    (line,) = gateway.lines()
    assert line["trace_id"] == TRACE
    assert line["request_id"] == "chatcmpl-1"
    assert (line["status"], line["outcome"], line["error"]) == (200, "ok", None)
    assert (line["prompt_tokens"], line["cached_tokens"], line["completion_tokens"]) == (10, 4, 6)
    assert (line["rounds"], line["accepted_tokens"], line["acceptance"]) == (2, 3, 0.375)
    assert (line["tokens_per_round"], line["preemptions"], line["queue_s"]) == (2.5, 1, 0.25)
    assert 0 <= line["first_token_s"] <= line["total_s"] < 60
    text = gateway.log.path.read_text()
    for secret in ("secret question", "hunter2", "answer"):
        assert secret not in text
    batch = gateway.recorder.drain()
    assert counted(batch) == {("specdec.gateway.requests", CHATS, "ok"): 1}
    seen = {metric.name: values for (metric, _), values in batch.observations.items()}
    assert set(seen) == {
        "gen_ai.server.request.duration",
        "gen_ai.server.time_to_first_token",
        "gen_ai.server.time_per_output_token",
    }
    ((duration,), (first,), (each,)) = (
        seen["gen_ai.server.request.duration"],
        seen["gen_ai.server.time_to_first_token"],
        seen["gen_ai.server.time_per_output_token"],
    )
    assert each == pytest.approx((duration - first) / 5)
    assert gateway.open.count == 0


def test_text_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, text=True, text_characters=40)
    with closing(gateway.log):
        _check_text(gateway)


def _check_text(gateway: Gateway) -> None:
    gateway.post(CHATS, whole)
    gateway.ask(json={**BODY, "messages": [{"role": "user", "content": "é\u2028\n" * 200}]})
    (line,) = gateway.lines()
    assert line["output"] == ["The answer\n"]
    assert len(line["prompt"]) == 40
    assert "é" in line["prompt"]


def test_nothing_that_a_client_sends_can_forge_a_line(gateway: Gateway) -> None:
    forged = '"}\r\n{"outcome":"ok","trace_id":"x'
    gateway.post(CHATS, whole)
    gateway.ask("/v1/x%0A%7B%22outcome%22:1%7D%0D%0A")
    gateway.ask(json={**BODY, "model": forged + "\u2028\x85\x00"})
    gateway.ask("/" + "a" * 5000, headers={"traceparent": f"00-{TRACE}-{forged.strip()[:4]}-01"})
    lines = gateway.lines()
    assert [line["outcome"] for line in lines] == ["client_error", "ok", "client_error"]
    assert lines[1]["model"].startswith(forged)
    assert [line["trace_id"] for line in lines] == [None] * 3
    assert len(lines[2]["endpoint"]) == 200


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (ApiError(429, "full", code="server_overloaded"), "rejected", "queue_full"),
        (unavailable("none", 1), "server_error", "no_worker"),
        (ApiError(401, "who", code="invalid_api_key"), "client_error", "unauthorized"),
        (ApiError(400, "bad", code=None), "client_error", None),
        (RuntimeError("a bug"), "server_error", None),
    ],
)
def test_errors(gateway: Gateway, error: Exception, outcome: str, reason: str | None) -> None:

    async def fail(request: Request) -> Response:
        raise error

    gateway.post(CHATS, fail)
    answer = gateway.ask(json=BODY)
    (line,) = gateway.lines()
    assert line["status"] == answer.status_code
    assert (line["outcome"], line["error"]) == (outcome, answer.json()["error"]["code"])
    sums = counted(gateway.recorder.drain())
    assert sums[("specdec.gateway.requests", CHATS, outcome)] == 1
    assert sums[("specdec.gateway.errors", line["error"] or "other")] == 1
    rejected = {key[1]: n for key, n in sums.items() if key[0] == "specdec.gateway.rejects"}
    assert rejected == ({} if reason is None else {reason: 1})


def stream(ended: int, fail: ApiError | None, leave: bool) -> Callable[..., Awaitable[Response]]:
    async def route(request: Request) -> Response:
        data = await read_object(request)
        generation = Told(ended)
        note_generation("chatcmpl-2", parse_request(ChatRequest, data), generation)

        async def events() -> AsyncIterator[bytes]:
            yield b"data: {}\n\n"
            if fail is not None:
                note_error(fail)
            if leave:
                await asyncio.Event().wait()

        return StreamingResponse(events())

    return route


async def leave(app: FastAPI, path: str, cancelled: bool) -> None:
    """Send a request and go when the first part of the answer is there.

    Args:
        app: to ask.
        path: of the request.
        cancelled: Serve's proxy tells it by ending its own call, and not by a message.
    """
    parts: list[dict[str, Any]] = [{"type": "http.request", "body": json.dumps(BODY).encode()}]
    answered = asyncio.Event()

    async def receive() -> Any:
        if parts:
            return parts.pop()
        await answered.wait()
        if cancelled:
            raise TaskCancelledError
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            answered.set()

    scope: dict[str, Any] = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}}
    scope |= {"method": "POST", "path": path, "query_string": b"", "headers": []}
    await asyncio.wait_for(app(scope, receive, send), 30)


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_stream_that_breaks_and_one_whose_client_leaves(
    gateway: Gateway, cancelled: bool
) -> None:
    gateway.post(CHATS, stream(0, unavailable("gone", 1), leave=False))
    gateway.post("/v1/completions", stream(0, None, leave=True))
    gateway.ask(json=BODY)
    asyncio.run(leave(gateway.app, "/v1/completions", cancelled))
    broken, left = gateway.lines()
    assert (broken["status"], broken["outcome"]) == (200, "server_error")
    assert broken["error"] == "service_unavailable"
    assert (left["status"], left["outcome"], left["error"]) == (200, "aborted", None)
    sums = counted(gateway.recorder.drain())
    assert sums[("specdec.gateway.requests", "/v1/completions", "aborted")] == 1
    assert gateway.open.count == 0


def test_the_current_span_comes_before_the_header() -> None:
    context = trace.SpanContext(0xABC, 0xDEF, is_remote=False)
    headers = [(b"traceparent", f"00-{TRACE}-b7ad6b7169203331-01".encode())]
    assert trace_id(headers) == TRACE
    with trace.use_span(trace.NonRecordingSpan(context)):
        assert trace_id(headers) == f"{0xABC:032x}"
    for bad in (b"", b"00-" + b"0" * 32 + b"-b7ad6b7169203331-01", b"x" * 55):
        assert trace_id([(b"traceparent", bad)]) is None


def test_a_folder_that_cannot_be_written_stops_no_gateway(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert open_request_log(LogSettings(folder=tmp_path / "file"), "r") is None
    assert open_request_log(LogSettings(requests=False, folder=tmp_path), "r") is None


def test_the_log_is_bounded(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, max_bytes=10_000, backups=2)
    gateway.post(CHATS, whole)
    for _ in range(60):
        gateway.ask(json=BODY)
    gateway.log.close()
    files = list(tmp_path.iterdir())
    assert len(files) == 3
    assert all(file.stat().st_size <= 10_000 for file in files)


@pytest.mark.slow
def test_five_thousand_random_requests_make_no_series(gateway: Gateway) -> None:
    """Ids, names, paths and errors as random as clients can make them, through the real checks."""
    info = WorkerInfo(max_model_length=100, eos_token_ids=frozenset(), vocab_size=50, kv_tokens=100)
    admission = Admission(lambda: Need(1, 100), 1, 1)
    nobody: Any = None  # no request gets as far as a worker
    tokenizer = load_tokenizer(resolve_model(DEFAULT_MODEL, EngineSettings().cache_dir))
    api = CompletionApi(
        *(nobody, tokenizer, info, LimitSettings(), "m", "fp", admission, 1, nobody, nobody, None)
    )
    caller = Caller(None, b"")
    rng = random.Random(3)

    async def chat(request: Request) -> Response:
        return await api.chat(await read_object(request), caller)

    async def complete(request: Request) -> Response:
        return await api.complete(await read_object(request), caller)

    async def raise_anything(request: Request) -> Response:
        raise ApiError(rng.choice((400, 418, 429, 500, 503)), "x", code=f"code_{rng.random()}")

    gateway.post(CHATS, chat)
    gateway.post("/v1/completions", complete)
    gateway.post("/v1/models/{name}", raise_anything)

    def body() -> dict[str, Any]:
        name = f"n{rng.random()}"
        return rng.choice(
            (
                {"model": name, "messages": [{"role": "user", "content": "x"}]},
                {"model": "m", name: 1},
                {"model": "m", "messages": name, "prompt": [1, 2]},
                {"model": name, "prompt": name},
                {"model": "m", "prompt": [rng.randrange(100, 10**9)]},
                {"model": "m", "messages": [], "user": name},
            )
        )

    async def run() -> None:
        transport = httpx.ASGITransport(gateway.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for number in range(5000):
                path = rng.choice((CHATS, "/v1/completions", f"/x{number}", f"/v1/models/{number}"))
                headers = {"traceparent": f"00-{rng.getrandbits(128):032x}-{number:016x}-01"}
                answer = await client.post(path, json=body(), headers=headers)
                assert answer.status_code >= 400
                if number == 999:
                    grown.append(keys())

    def keys() -> set[tuple[str, ...]]:
        batch = gateway.recorder.drain()
        return {(m.name, *labels) for m, labels in [*batch.sums, *batch.observations]}

    grown: list[set[tuple[str, ...]]] = []
    asyncio.run(run())
    early, late = grown[0], keys()
    assert late <= early, late - early
    most = sum(metric.series for metric in table.METRICS if metric.source == "gateway")
    assert len(early) < 40 < most
