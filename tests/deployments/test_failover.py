"""Workers of a real server die, stand still and kill each other: no client notices more than a
pause.

What these catch: tokens that come twice or never, a seed that begins anew, a draw that is counted
from the resumed prompt, usage that counts a prompt or prior tokens twice, a frozen worker that
streams wait for, one that wakes up and is listened to, an innocent request failed for a
poisonous one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from bench.kills import Streamed, Streams, busiest, kill, serving, wait_for_workers
from bench.redeploy import redeploy
from bench.server import Server, running_server
from bench.small_model import make_small_model
from tests.deployments.faulty_app import POISON

pytestmark = pytest.mark.slow

TOKENS = 250
SETTINGS: dict[str, dict[str, Any]] = {
    "gateway": {
        "debug": True,
        "failover": {"wedge_timeout_s": 4, "handover_margin_s": 5},
    },
    "worker": {
        "replicas": 2,
        "num_cpus": 0.1,
        "graceful_shutdown_timeout_s": 5,  # less than the margin: handed over at once
        "health_check_period_s": 1,
        "health_check_timeout_s": 5,
        "failover": {"heartbeat_s": 1},
    },
}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1, "seed": 7},
    {"temperature": 0.8, "top_p": 0.95, "seed": 8, "frequency_penalty": 0.3},
    {"temperature": 1, "seed": 9, "repetition_penalty": 1.1},
]
BODIES = [
    {"prompt": [20 + i, 31, 45, 200 + i], "max_tokens": TOKENS, **kind}
    for i, kind in enumerate(KINDS)
]
POISONOUS = {"prompt": [*POISON, 5], "max_tokens": 50, "temperature": 0}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two workers that die of prompts that begin with ``POISON``."""
    folder = make_small_model(tmp_path_factory.mktemp("model") / "small")
    engine = {"model": str(folder), "dtype": "float32", "kv": {"memory_gib": 0.1}, "threads": 1}
    app = "tests.deployments.faulty_app:build_app"
    with running_server({"engine": engine, **SETTINGS}, "small", app) as server:
        wait_for_workers(server, 2)
        yield server


@pytest.fixture(scope="module")
def undisturbed(fleet: Server) -> list[Streamed]:
    with ThreadPoolExecutor(len(BODIES)) as threads:
        found = Streams(threads, fleet, BODIES).results()
    assert all(one.usage["completion_tokens"] == TOKENS for one in found)
    assert len({one.text for one in found}) == len(found)
    return found


@pytest.fixture
def threads(fleet: Server) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as pool:
        yield pool


def same_answers(found: list[Streamed], expected: list[Streamed]) -> None:
    for got, wanted in zip(found, expected, strict=True):
        assert got.error == {}
        assert got.text == wanted.text
        for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert got.usage[key] == wanted.usage[key]
        details = got.usage["completion_tokens_details"]
        assert 0 <= details["accepted_prediction_tokens"] < got.usage["completion_tokens"]


def post(fleet: Server, body: dict[str, Any]) -> httpx.Response:
    asked = {**body, "model": fleet.model, "ignore_eos": True}
    return httpx.post(f"{fleet.url}/v1/completions", json=asked, timeout=300)


def test_answers_outlive_their_workers(
    fleet: Server, undisturbed: list[Streamed], threads: ThreadPoolExecutor
) -> None:
    """One dies, then the other before the first is back: for a time there is none."""
    before = serving(fleet)
    whole = threads.submit(post, fleet, BODIES[1])
    streams = Streams(threads, fleet, BODIES)
    streams.wait_for(10)
    kill(busiest(fleet))
    streams.wait_for(10)
    kill(busiest(fleet), signal.SIGTERM)
    same_answers(streams.results(), undisturbed)
    assert whole.result().status_code == 200
    assert whole.result().json()["choices"][0]["text"] == undisturbed[1].text
    assert whole.result().json()["usage"]["completion_tokens"] == TOKENS
    wait_for_workers(fleet, 2, before)


def test_a_worker_that_stands_still_is_left_and_not_listened_to_again(
    fleet: Server, undisturbed: list[Streamed], threads: ThreadPoolExecutor
) -> None:
    streams = Streams(threads, fleet, BODIES)
    streams.wait_for(5)
    zombie = busiest(fleet)
    os.kill(zombie, signal.SIGSTOP)
    try:
        # all are elsewhere, however many events had been sent before
        streams.wait_for(15, or_end=True)
    finally:
        os.kill(zombie, signal.SIGCONT)
    same_answers(streams.results(), undisturbed)
    wait_for_workers(fleet, 2)


def test_a_poisonous_request_fails_alone(
    fleet: Server, undisturbed: list[Streamed], threads: ThreadPoolExecutor
) -> None:
    before = serving(fleet)
    streams = Streams(threads, fleet, BODIES)
    streams.wait_for(5, or_end=True)  # one may yet wait for the worker of the test before
    bad = post(fleet, POISONOUS)
    assert bad.status_code == 500
    assert bad.json()["error"]["code"] == "request_kills_workers"
    assert bad.headers["x-should-retry"] == "false"  # else clients would kill the next ones
    same_answers(streams.results(), undisturbed)
    deaths = fleet.log.read_text().count("given up: two workers in a row died")
    assert deaths == 1
    wait_for_workers(fleet, 2, before)


def test_no_stream_is_cut_by_a_rollout(
    fleet: Server, undisturbed: list[Streamed], threads: ThreadPoolExecutor
) -> None:
    """One worker less, then another setting of all: twenty streams go on."""
    for changes in ({"worker": {**SETTINGS["worker"], "replicas": 1}}, SETTINGS):
        streams = Streams(threads, fleet, BODIES * 5)
        streams.wait_for(2, or_end=True)
        assert streams.running() > 5
        redeploy(fleet, changes)
        same_answers(streams.results(), undisturbed * 5)
