"""Everything breaks while clients are served, and every request is accounted for.

A real server with two gateways and two workers, valkey for checkpoints and blocks. Clients ask for
streams whose text is known, leave some of them half-way, and come back with ``Last-Event-ID``
whenever a stream breaks. Meanwhile workers and gateways are killed and stopped, and valkey is
stopped, paused and restarted. At the end no stream may have had a wrong text, and no page, request,
lease, unfinished checkpoint or process may be left.

    python -m bench.chaos --seconds 600
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.server import Server, processes_of, running_server
from bench.valkey import Valkey
from prefix_cache.checkpoints.cells import open_cells
from prefix_cache.checkpoints.codec import CheckpointCodec
from prefix_cache.checkpoints.record import State
from prefix_cache.checkpoints.store import SwappingStore
from prefix_cache.store import StoreOptions
from specdec.config import DEFAULT_MODEL

CHAT = "/v1/chat/completions"
#: A client that gets nothing for so long, however often it comes back, has lost its answer.
PATIENCE_S = 240.0
#: Kept checkpoints live for so long.
TTL_S = 60.0
_SEEDS = 6


@dataclass
class Outcome:
    """What came of all streams, by kind; and what went wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def request(seed: int) -> dict[str, Any]:
    """A body whose answer depends on the seed alone."""
    return {
        "model": DEFAULT_MODEL,
        "messages": [{"role": "user", "content": f"Tell story number {seed}, with an emoji."}],
        "temperature": 0.8,
        "seed": seed,
        "max_tokens": 60 + 20 * seed,
        "ignore_eos": True,
        "stream": True,
    }


class Stream:
    """One answer over as many connections as it takes."""

    def __init__(self, client: httpx.AsyncClient, seed: int) -> None:
        self._client = client
        self._body = request(seed)
        self.text = ""
        self.last_id: str | None = None
        self.done = False

    async def connect(self, most: int | None = None) -> int | None:
        """Read to the end, to a break, or for ``most`` events; a refusal's status, or None."""
        resumed = {} if self.last_id is None else {"Last-Event-ID": self.last_id}
        body = {"json": self._body} if self.last_id is None else {}
        name, count = "", 0
        async with self._client.stream("POST", CHAT, headers=resumed, **body) as answer:  # type: ignore[arg-type]
            if answer.status_code != 200:
                await answer.aread()
                return answer.status_code
            async for line in answer.aiter_lines():
                if line.startswith("id: "):
                    name = line.removeprefix("id: ")
                elif line == "data: [DONE]":
                    self.done = True
                elif line:
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        return 503
                    self.last_id = name
                    for choice in chunk["choices"]:
                        self.text += choice["delta"].get("content") or ""
                    count += 1
                if count == most:
                    return None
        return None


async def follow(client: httpx.AsyncClient, seed: int, rng: random.Random) -> Stream:
    """One stream, left now and then, until its end or for as long as there is patience."""
    stream, since, length = Stream(client, seed), time.monotonic(), 0
    while not stream.done and time.monotonic() - since < PATIENCE_S:
        try:
            most = rng.randint(1, 40) if rng.random() < 0.3 else None
            status = await stream.connect(most)
            if status == 404:
                return stream  # its checkpoint was lost with the store, as may be
        except (httpx.HTTPError, json.JSONDecodeError):
            status = 0
        if len(stream.text) > length:
            since, length = time.monotonic(), len(stream.text)
        if not stream.done and status is not None:
            await asyncio.sleep(rng.uniform(0.1, 1.0))
    return stream


async def load(
    server: Server, expected: Mapping[int, str], until: float, clients: int, outcome: Outcome
) -> None:
    """Streams, ``clients`` at a time, begun until that time."""

    async def one(number: int) -> None:
        rng = random.Random(number)
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            while time.monotonic() < until:
                seed = rng.randrange(_SEEDS)
                stream = await follow(client, seed, rng)
                whole = expected[seed]
                if stream.done and stream.text == whole:
                    outcome.counts["complete"] += 1
                elif not stream.done and whole.startswith(stream.text):
                    outcome.counts["given up" if stream.last_id else "never begun"] += 1
                    if stream.last_id and "store lost" not in outcome.faults:
                        outcome.wrong.append(f"seed {seed}: no rest after {stream.last_id}")
                else:
                    outcome.wrong.append(f"seed {seed}: {stream.text!r} is not {whole!r}")

    await asyncio.gather(*(one(number) for number in range(clients)))


class Monkey:
    """Breaks one thing at a time."""

    def __init__(self, server: Server, valkey: Valkey, outcome: Outcome, seed: int) -> None:
        self._server = server
        self._valkey = valkey
        self._outcome = outcome
        self._rng = random.Random(seed)
        self._faults: dict[str, Callable[[], object]] = {
            "worker killed": lambda: self._signal("Worker", signal.SIGKILL),
            "gateway killed": lambda: self._signal("Gateway", signal.SIGKILL),
            "worker paused": lambda: self._pause("Worker"),
            "gateway paused": lambda: self._pause("Gateway"),
            "store paused": self._pause_store,
            "store lost": self._lose_store,
        }

    def run(self, until: float, every_s: float) -> None:
        """One fault after the other, in no order, each kind as often as the others."""
        names: list[str] = []
        while time.monotonic() < until:
            time.sleep(
                max(0.0, min(self._rng.uniform(0.5, 1.5) * every_s, until - time.monotonic()))
            )
            if not names:
                names = self._rng.sample(sorted(self._faults), len(self._faults))
            name = names.pop()
            self._faults[name]()
            self._outcome.faults[name] += 1

    def _some(self, kind: str) -> int | None:
        found = [
            pid
            for pid, command in processes_of(self._server.log.parent).items()
            if f":specdec:{kind}" in command
        ]
        return self._rng.choice(sorted(found)) if found else None

    def _signal(self, kind: str, number: int) -> int | None:
        pid = self._some(kind)
        if pid is not None:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                return None
        return pid

    def _pause(self, kind: str) -> None:
        pid = self._signal(kind, signal.SIGSTOP)
        time.sleep(self._rng.uniform(0.5, 5))
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _pause_store(self) -> None:
        self._valkey.signal(signal.SIGSTOP)
        time.sleep(self._rng.uniform(0.5, 5))
        self._valkey.signal(signal.SIGCONT)

    def _lose_store(self) -> None:
        self._valkey.stop()
        time.sleep(self._rng.uniform(0.5, 5))
        self._valkey.start()


def left_over(server: Server, valkey: Valkey) -> list[str]:
    """What is still there once all has had time to settle."""
    cells = open_cells(valkey.url, StoreOptions("ckpt", TTL_S, 2**20))
    store = SwappingStore(cells, CheckpointCodec(2**20), TTL_S)
    end = time.monotonic() + TTL_S + 120
    problems: list[str] = ["not asked yet"]
    while problems and time.monotonic() < end:
        time.sleep(1)
        problems = []
        try:
            listed = store.list(10_000, 10)
            problems += [f"lease on {one.request_id}" for one in listed if one.leased]
            unfinished = [one for one in listed if one.state is State.UNFINISHED]
            problems += [f"checkpoint of {one.request_id}" for one in unfinished]
            for _ in range(4):  # of two workers one answers
                report = httpx.get(f"{server.url}/debug/integrity", timeout=30).json()
                if report.get("problem", "") is not None:
                    problems.append(f"integrity: {report}")
                elif report["pages_in_use"] or report["open_requests"] or report["has_work"]:
                    problems.append(f"in the engine: {report}")
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            problems.append(f"{type(error).__name__}: {error}")
    store.close()
    return problems


def chaos(seconds: float, clients: int, every_s: float, seed: int) -> Outcome:
    """Run it; what it found wrong is in the outcome."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="specdec-chaos-") as folder:
        valkey = Valkey(Path(folder))
        try:
            with running_server(_changes(valkey.url), DEFAULT_MODEL) as server:
                expected = asyncio.run(_expected(server))
                until = time.monotonic() + seconds
                monkey = Monkey(server, valkey, outcome, seed)

                async def all_of_it() -> None:
                    breaking = asyncio.to_thread(monkey.run, until, every_s)
                    await asyncio.gather(load(server, expected, until, clients, outcome), breaking)

                asyncio.run(all_of_it())
                outcome.wrong += left_over(server, valkey)
        finally:
            valkey.stop()
    return outcome


async def _expected(server: Server) -> dict[int, str]:
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
        texts = {}
        for seed in range(_SEEDS):
            stream = Stream(client, seed)
            await stream.connect()
            if not stream.done:
                raise RuntimeError("the server does not answer before anything is broken")
            texts[seed] = stream.text
        return texts


def _changes(url: str) -> dict[str, dict[str, Any]]:
    return {
        "engine": {
            "dtype": "float32",
            "threads": 1,
            "speculation": {"budget": "unlimited"},  # a new worker has nothing to time
            "kv": {"pages": 256},
            "batch": {"max_sequences": 8},
            "prefix_cache": {"store": {"url": url, "read_deadline_ms": 300}},
        },
        "gateway": {"replicas": 2, "debug": True, "health_check_period_s": 1},
        "worker": {"replicas": 2, "health_check_period_s": 1, "health_check_timeout_s": 8},
        "recovery": {
            "store": {"url": url, "ttl_s": TTL_S, "lease_s": 5, "breaker_backoff_cap_s": 2},
            "every_rounds": 4,
            "every_tokens": 16,
        },
    }


def main() -> int:
    """Command line. Returns 1 where anything was lost or left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--every", type=float, default=8, help="seconds between faults, about")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    outcome = chaos(options.seconds, options.clients, options.every, options.seed)
    print("streams:", dict(outcome.counts))
    print("faults:", dict(outcome.faults))
    for line in outcome.wrong:
        print("WRONG:", line)
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
