"""Many streams at once, clients that leave: nothing is left in the engine."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from bench.server import Server

pytestmark = pytest.mark.slow

SETTLE_S = 60.0
WORDS = [
    "the",
    "river",
    "runs",
    "past",
    "old",
    "stones",
    "and",
    "a",
    "quiet",
    "mill",
    "near",
    "town",
]


@dataclass(frozen=True)
class Plan:
    """One client.

    Attributes:
        body: of its request.
        leaves_after: events it reads before it goes away; None stays.
        leaves_s: seconds after which it goes away; None stays.
    """

    body: dict[str, Any]
    leaves_after: int | None
    leaves_s: float | None


def plan(rng: random.Random, model: str) -> Plan:
    prompt = " ".join(rng.choices(WORDS, k=rng.randint(1, 150)))
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": rng.randint(1, 40),
        "temperature": rng.choice([0, 1]),
        "ignore_eos": True,
        "n": rng.choice([1, 1, 1, 2]),
        "stream": rng.random() < 0.85,
    }
    leaves = rng.random()
    return Plan(
        body,
        rng.randint(0, 12) if leaves < 0.3 and body["stream"] else None,
        rng.uniform(0, 3) if 0.3 <= leaves < 0.5 else None,
    )


async def run_client(client: httpx.AsyncClient, plan: Plan) -> bool:
    """Run a plan; returns whether the client stayed to the end."""
    try:
        async with asyncio.timeout(plan.leaves_s):
            if not plan.body["stream"]:
                answer = await client.post("/v1/chat/completions", json=plan.body)
                check_whole(plan, answer)
                return True
            async with client.stream("POST", "/v1/chat/completions", json=plan.body) as answer:
                assert answer.status_code == 200
                events: list[str] = []
                async for line in answer.aiter_lines():
                    if len(events) == plan.leaves_after:
                        return False
                    if line:
                        events.append(line.removeprefix("data: "))
            check_events(plan, events)
            return True
    except TimeoutError:
        assert plan.leaves_s is not None
        return False


def check_whole(plan: Plan, answer: httpx.Response) -> None:
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["usage"]["completion_tokens"] == plan.body["max_tokens"] * plan.body["n"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length"] * plan.body["n"]


def check_events(plan: Plan, events: list[str]) -> None:
    assert events[-1] == "[DONE]"
    reasons = [
        choice["finish_reason"]
        for event in events[:-1]
        for choice in json.loads(event)["choices"]
        if choice["finish_reason"] is not None
    ]
    assert reasons == ["length"] * plan.body["n"]


def integrity(server: Server) -> dict[str, Any]:
    report: dict[str, Any] = httpx.get(f"{server.url}/debug/integrity", timeout=30).json()
    return report


def wait_for_rest(server: Server) -> dict[str, Any]:
    deadline = time.monotonic() + SETTLE_S
    while True:
        report = integrity(server)
        if not (report["has_work"] or report["open_requests"]) or time.monotonic() > deadline:
            return report
        time.sleep(0.1)


def test_streams_and_disconnects_leave_nothing(server: Server) -> None:
    rng = random.Random(11)
    plans = [plan(rng, server.model) for _ in range(32)]

    async def run() -> list[bool]:
        async with httpx.AsyncClient(
            base_url=server.url, timeout=300, limits=httpx.Limits(max_connections=None)
        ) as client:
            return await asyncio.gather(*(run_client(client, plan) for plan in plans))

    before = integrity(server)["stats"]["finished"]
    stayed = asyncio.run(run())
    for p, ended in zip(plans, stayed, strict=True):
        assert ended or p.leaves_after is not None or p.leaves_s is not None
    report = wait_for_rest(server)
    assert report["problem"] is None
    assert report["pages_in_use"] == 0
    assert report["open_requests"] == 0
    assert not report["has_work"]
    finished = report["stats"]["finished"]
    complete = sum(p.body["n"] for p, ended in zip(plans, stayed, strict=True) if ended)
    assert finished["length"] - before.get("length", 0) >= complete
    assert finished.get("abort", 0) > before.get("abort", 0), "no client left in time"
    assert "error" not in finished


@pytest.mark.parametrize("stream", [True, False])
def test_work_stops_when_the_client_leaves(server: Server, stream: bool) -> None:
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": "Tell a long story."}],
        "max_tokens": 2000,
        "ignore_eos": True,
        "stream": stream,
    }
    aborted = integrity(server)["stats"]["finished"].get("abort", 0)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        if stream:
            with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/chat/completions", json=body, timeout=2)
    left = time.monotonic()
    report = wait_for_rest(server)
    assert time.monotonic() - left < 10
    assert report["pages_in_use"] == 0
    assert report["stats"]["finished"]["abort"] == aborted + 1
