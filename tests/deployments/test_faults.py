"""What clients see when the server is full, and when a worker dies under them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from typing import Any

import httpx
import pytest

from bench.server import Server, processes_of
from tests.deployments.test_load import wait_for_rest

pytestmark = pytest.mark.slow

RECOVERY_S = 240.0


def chat(server: Server, **changes: Any) -> dict[str, Any]:
    return {
        "model": server.model,
        "messages": [{"role": "user", "content": "Tell a long story."}],
        "temperature": 0,
        "ignore_eos": True,
        **changes,
    }


def test_a_full_server_turns_requests_away(server: Server) -> None:
    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(
            base_url=server.url, timeout=300, limits=httpx.Limits(max_connections=None)
        ) as client:
            return await asyncio.gather(
                *(
                    client.post("/v1/chat/completions", json=chat(server, max_tokens=12, n=2))
                    for _ in range(100)
                )
            )

    answers = asyncio.run(run())
    assert {answer.status_code for answer in answers} == {200, 429}
    for answer in answers:
        if answer.status_code == 429:
            assert answer.headers["retry-after"] == "1"
            error = answer.json()["error"]
            assert error["type"] == "rate_limit_error"
            assert error["code"] == "server_overloaded"
    report = wait_for_rest(server)
    assert (report["problem"], report["pages_in_use"], report["open_requests"]) == (None, 0, 0)


def test_a_worker_that_dies_ends_its_streams_with_an_error_event(server: Server) -> None:
    """And is replaced, after which the same server serves again."""
    (worker,) = [
        pid
        for pid, command in processes_of(server.log.parent).items()
        if command.startswith("ray::ServeReplica:specdec:Worker")
    ]
    with httpx.Client(base_url=server.url, timeout=60) as client:
        body = chat(server, max_tokens=2000, stream=True)
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            events = []
            for line in answer.iter_lines():
                if line:
                    events.append(json.loads(line.removeprefix("data: ")))
                if len(events) == 4:
                    os.kill(worker, signal.SIGKILL)
        assert "error" not in events[-2]
        assert events[-1]["error"]["code"] == "service_unavailable"
        assert events[-1]["error"]["type"] == "server_error"

        deadline = time.monotonic() + RECOVERY_S
        while client.get("/health").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        answer = client.post("/v1/chat/completions", json=chat(server, max_tokens=4))
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 4
