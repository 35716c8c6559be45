"""A server that asks for keys, and what tries to break it; the long forms are make targets."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import openai
import pytest

from bench.disconnects import run as run_disconnects
from bench.disconnects import steps_after_leaving
from bench.fuzz import mutate, schemathesis
from bench.mutations import PATHS, good_body
from bench.overload import storm
from bench.strict import StrictServer

pytestmark = pytest.mark.slow


def completion(strict: StrictServer, key: str | None, **changes: Any) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"model": strict.server.model, "prompt": "hi", "max_tokens": 2, **changes}
    return httpx.post(
        f"{strict.server.url}/v1/completions", json=body, headers=headers, timeout=120
    )


def test_who_gets_in(strict: StrictServer) -> None:
    assert completion(strict, strict.key).status_code == 200
    for key, code in (
        (None, "invalid_api_key"),
        ("wrong", "invalid_api_key"),
        (strict.key[:-1], "invalid_api_key"),
        (strict.expired_key, "expired_api_key"),
    ):
        answer = completion(strict, key)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, code)
        assert answer.headers["www-authenticate"] == "Bearer"
    other = completion(strict, strict.other_key)
    assert (other.status_code, other.json()["error"]["code"]) == (403, "model_not_allowed")
    for path in ("/health", "/ready", "/version", "/openapi.json"):
        assert httpx.get(f"{strict.server.url}{path}", timeout=30).status_code == 200
    for path in ("/v1/models", "/debug/integrity", "/nothing"):
        assert httpx.get(f"{strict.server.url}{path}", timeout=30).status_code == 401


def test_the_sdk_knows_these_errors(strict: StrictServer) -> None:
    def client(key: str) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{strict.server.url}/v1", api_key=key, timeout=60, max_retries=0
        )

    with client("wrong") as sdk, pytest.raises(openai.AuthenticationError):
        sdk.models.list()
    with client(strict.other_key) as sdk, pytest.raises(openai.PermissionDeniedError):
        sdk.completions.create(model=strict.server.model, prompt="hi", max_tokens=1)
    with client(strict.key) as sdk:
        assert [model.id for model in sdk.models.list()] == [strict.server.model]


def test_limits_of_a_key_hold_however_many_ask_at_once(strict: StrictServer) -> None:
    """5 requests and 400 tokens per minute, 2 requests at once."""

    async def ask(count: int, **changes: Any) -> list[httpx.Response]:
        headers = {"Authorization": f"Bearer {strict.limited_key}"}
        body = {"model": strict.server.model, "prompt": "hi", **changes}
        async with httpx.AsyncClient(
            base_url=strict.server.url, headers=headers, timeout=120
        ) as client:
            return await asyncio.gather(
                *(client.post("/v1/completions", json=body) for _ in range(count))
            )

    (big,) = asyncio.run(ask(1, max_tokens=500))
    assert (big.status_code, big.headers["x-should-retry"]) == (429, "false")
    at_once = asyncio.run(ask(12, max_tokens=40, ignore_eos=True))
    served = [answer for answer in at_once if answer.status_code == 200]
    assert 1 <= len(served) <= 4
    one_by_one = [asyncio.run(ask(1, max_tokens=1))[0] for _ in range(5)]
    served += [answer for answer in one_by_one if answer.status_code == 200]
    assert len(served) == 4, "five requests with the big one"
    last = one_by_one[-1]
    assert last.status_code == 429
    assert last.json()["error"]["code"] == "rate_limit_exceeded"
    assert last.headers["x-ratelimit-remaining-requests"] == "0"
    assert 1 <= int(last.headers["retry-after"]) <= 60
    total = sum(answer.json()["usage"]["total_tokens"] for answer in served)
    assert int(last.headers["x-ratelimit-remaining-tokens"]) == 400 - total


@pytest.mark.parametrize("stream", [True, False])
def test_work_stops_within_a_round_of_a_disconnect(strict: StrictServer, stream: bool) -> None:
    """Of 1,500 tokens. The news of it takes its way through two processes, and the engine is
    asked in between, so that a few steps are allowed."""
    assert steps_after_leaving(strict, stream) < 40
    strict.check_rest()


def test_clients_that_leave_at_random_moments(strict: StrictServer) -> None:
    outcomes = asyncio.run(run_disconnects(strict, 40, 7, 14))
    assert not [name for name in outcomes if name.startswith("lost")], outcomes
    assert outcomes["left before the first event"] >= 3
    assert outcomes["left in the stream"] >= 3
    assert outcomes["stayed, answered"] == 8
    strict.check_rest()


def test_who_leaves_the_queue_leaves_nothing_in_it(strict: StrictServer) -> None:
    """More than run at once; those that wait are the first to leave."""

    async def run() -> None:
        async with httpx.AsyncClient(
            base_url=strict.server.url, headers=strict.headers, timeout=120
        ) as client:
            body = {
                "model": strict.server.model,
                "prompt": "hi",
                "max_tokens": 700,
                "ignore_eos": True,
            }
            tasks = [
                asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(16)
            ]
            await asyncio.sleep(1)
            for task in reversed(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    strict.check_rest()
    assert completion(strict, strict.key).status_code == 200


def test_requests_that_are_nearly_right(strict: StrictServer) -> None:
    found = asyncio.run(mutate(strict, 300, 3, 4))
    assert found.count == 0, "\n".join(found.faults)
    assert found.statuses[200] > 15, "nothing but refusals"
    assert sum(count for status, count in found.statuses.items() if 400 <= status < 500) > 100
    strict.check_rest()


def test_what_is_mutated_is_good(strict: StrictServer) -> None:
    """Else all of the above is refused at the door."""
    rng = random.Random(5)
    for number in range(24):
        path = PATHS[number % len(PATHS)]
        answer = httpx.post(
            f"{strict.server.url}{path}",
            json=good_body(rng, path, strict.server.model),
            headers=strict.headers,
            timeout=120,
        )
        assert answer.status_code == 200, answer.text


def test_requests_by_the_document(strict: StrictServer) -> None:
    status, text = schemathesis(strict, 4, 1)
    assert status == 0, text[-4000:]
    strict.check_rest()


def test_a_short_storm(strict: StrictServer) -> None:
    """What is accepted is answered in full; the rest hears when to come again."""
    found = asyncio.run(storm(strict, 4, 6, 2))
    assert found.statuses.keys() <= {200, 429, 503}, found
    assert found.statuses[200] > 0
    assert found.statuses.get(429, 0) > 0, "that was no storm"
    assert found.incomplete == 0
    assert found.without_retry_after == 0
    strict.check_rest()
    assert completion(strict, strict.key).status_code == 200


def test_a_body_that_does_not_arrive(strict: StrictServer) -> None:
    """A client that sends a byte and waits must not hold a place for ever."""

    async def run() -> bytes:
        host, _, port = strict.server.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: 1000\r\n"
            f"Authorization: Bearer {strict.key}\r\nConnection: close\r\n\r\n{{"
        )
        writer.write(head.encode())
        await writer.drain()
        try:
            async with asyncio.timeout(60):
                return await reader.read()
        finally:
            writer.close()

    answer = asyncio.run(run())
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"request_timeout" in answer


def test_nothing_of_a_request_can_write_into_the_log(strict: StrictServer) -> None:
    """Line breaks and escapes of names come out as text."""
    evil = "x\n2027-01-01 INFO forged\x1b[31m"
    httpx.post(
        f"{strict.server.url}/v1/completions",
        json={"model": evil, "prompt": "hi"},
        headers={**strict.headers, "X-Request-Id": "forged", "User-Agent": "forged\tagent"},
        timeout=30,
    )
    httpx.get(f"{strict.server.url}/v1/models/a%0Aforged", headers=strict.headers, timeout=30)
    text = strict.server.log.read_text(errors="replace")
    assert not [line for line in text.splitlines() if line.startswith("2027-01-01 INFO forged")]
    assert strict.key not in text
