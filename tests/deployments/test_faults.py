"""What clients see when the server is full."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from bench.server import Server
from tests.deployments.test_load import wait_for_rest

pytestmark = pytest.mark.slow


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
            assert int(answer.headers["retry-after"]) >= 1
            error = answer.json()["error"]
            assert error["type"] == "rate_limit_error"
            assert error["code"] == "server_overloaded"
    report = wait_for_rest(server)
    assert (report["problem"], report["pages_in_use"], report["open_requests"]) == (None, 0, 0)
