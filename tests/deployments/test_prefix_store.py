"""The real server with a real store that fails in every way while clients are served."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from bench.server import Server, running_server
from bench.valkey import Valkey
from specdec.config import DEFAULT_MODEL

pytestmark = pytest.mark.slow

READ_DEADLINE_S = 0.3
#: How long the store stands still.
STILL_S = 10.0


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    # room for some of the blocks only, and no eviction: it is full from the start of the test on
    options = ("--maxmemory", "60mb", "--maxmemory-policy", "noeviction")
    server = Valkey(tmp_path_factory.mktemp("valkey"), *options)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def stored(valkey: Valkey) -> Iterator[Server]:
    changes: dict[str, dict[str, Any]] = {
        "engine": {
            "kv": {"pages": 48},  # too few for all prompts: they come from the store
            "batch": {"max_sequences": 4},
            "prefix_cache": {
                "store": {
                    "url": valkey.url,
                    "read_deadline_ms": READ_DEADLINE_S * 1000,
                    "breaker_failures": 2,
                }
            },
        },
        "gateway": {"debug": True},
    }
    with running_server(changes, DEFAULT_MODEL) as found:
        yield found


def ask(sdk: openai.OpenAI, server: Server, number: int) -> str:
    rules = " ".join(f"Rule {i} of {number}." for i in range(12))
    answer = sdk.chat.completions.create(
        model=server.model,
        messages=[
            {"role": "system", "content": f"You are a guide. {rules}"},
            {"role": "user", "content": f"Name {number % 3 + 2} animals."},
        ],
        temperature=0,
        max_tokens=12,
    )
    assert answer.choices[0].finish_reason in ("stop", "length")
    return answer.choices[0].message.content or ""


def counters(server: Server) -> dict[str, Any]:
    report: dict[str, Any] = httpx.get(f"{server.url}/debug/integrity", timeout=60).json()
    assert report["problem"] is None
    found: dict[str, Any] = report["stored"]
    return found


def wait_for_breaker(server: Server, state: str, count: int, timeout_s: float = 90.0) -> int:
    """Wait until the breaker has entered ``state`` so often, on a machine however slow."""
    end = time.monotonic() + timeout_s
    while (reached := counters(server)["transitions"].get(state, 0)) < count:
        assert time.monotonic() < end, f"{state}: {reached} times, not {count}"
        time.sleep(0.3)
    return int(reached)


def test_no_fault_of_the_store_reaches_a_client(stored: Server, valkey: Valkey) -> None:
    """Full, standing still, killed and started again, under load: the same answers throughout."""
    with openai.OpenAI(base_url=f"{stored.url}/v1", api_key="x", max_retries=0) as sdk:
        expected = {number: ask(sdk, stored, number) for number in range(12)}
        stop = threading.Event()

        def client(first: int) -> int:
            count = 0
            while not stop.is_set():
                number = (first + count) % 12
                assert ask(sdk, stored, number) == expected[number]
                count += 1
            return count

        with ThreadPoolExecutor(3) as threads:
            clients = [threads.submit(client, 4 * i) for i in range(3)]
            try:
                time.sleep(3)
                valkey.signal(signal.SIGSTOP)
                time.sleep(STILL_S)
                wait_for_breaker(stored, "open", 1)
                valkey.signal(signal.SIGCONT)
                closed = wait_for_breaker(stored, "closed", 1)
                opened = counters(stored)["transitions"]["open"]
                valkey.stop()
                wait_for_breaker(stored, "open", opened + 1)
                valkey.start()
                wait_for_breaker(stored, "closed", closed + 1)
            finally:
                stop.set()
            served = [task.result() for task in clients]
        assert min(served) >= 3
        ended = counters(stored)
    assert ended["errors"]["timeout"] >= 2
    assert ended["dropped"] > 0  # it was full
    assert ended["hits"] > 0
