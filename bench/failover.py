"""Workers killed at random moments: are all answers what they would have been, and how long is the
pause?

    python -m bench.failover               # 100 kills; half an hour
    python -m bench.failover --kills 4     # a short form

Real servers of a small float32 model made from a config, over HTTP: with one worker and checkpoints
in LMDB, with two and checkpoints in Valkey; greedy, seeded, and seeded within a JSON schema. Each
kill is a ``kill -9`` of the busiest worker in the midst of several streams. A token is a byte, so
that texts at random are full of unfinished characters.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import Figure, report, table, write_results
from bench.kills import Streamed, Streams, busiest, kill, serving, wait_for_workers
from bench.letters import END, letter_tokenizer
from bench.server import Server, running_server
from bench.small_model import make_small_model
from bench.valkey import Valkey

#: Seconds that the pause may take for 95 of 100 streams where a second worker is there.
PAUSE_TARGET_S = 2.0
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "ignore_eos": True},
    "seeded": {"temperature": 1, "top_p": 0.95, "ignore_eos": True},
    "json": {
        "temperature": 1,
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "notes",
                "strict": True,
                "schema": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            "title": {"type": "string", "maxLength": 20},
                            "count": {"type": "integer"},
                        },
                        "required": ["title", "count"],
                        "additionalProperties": False,
                    },
                    "minItems": 400,
                },
            },
        },
    },
}


@dataclass
class Outcome:
    """What the kills of one kind did.

    Attributes:
        kills: that hit streams.
        streams: that were under way.
        wrong: of them, those that failed, or differ in text or usage.
        pauses_s: of each stream, its longest one after the kill.
    """

    kills: int = 0
    streams: int = 0
    wrong: list[str] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)


def bodies(kind: str, count: int, tokens: int, rng: random.Random) -> list[dict[str, Any]]:
    """Requests of one kind."""
    return [
        {
            "prompt": [rng.randrange(END) for _ in range(rng.randint(4, 60))],
            "max_tokens": tokens,
            "seed": rng.getrandbits(32),
            **KINDS[kind],
        }
        for _ in range(count)
    ]


def fault_of(got: Streamed, wanted: Streamed) -> str | None:
    """How a stream differs from the undisturbed one, if it does."""
    if got.error:
        return f"error: {got.error}"
    if got.text != wanted.text:
        same = next(
            (i for i, (a, b) in enumerate(zip(got.text, wanted.text, strict=False)) if a != b), None
        )
        return f"text differs from character {same}; {len(got.text)} of {len(wanted.text)}"
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    if any(got.usage.get(key) != wanted.usage.get(key) for key in counts):
        return f"usage: {got.usage}, not {wanted.usage}"
    return None


def kill_often(
    server: Server,
    replicas: int,
    requests: Sequence[dict[str, Any]],
    kills: int,
    rng: random.Random,
) -> Outcome:
    """Run the requests together, once undisturbed, then with a kill each time."""
    outcome = Outcome()
    with ThreadPoolExecutor(len(requests)) as threads:
        began = time.monotonic()
        undisturbed = Streams(threads, server, requests).results()
        length_s = time.monotonic() - began
        for number in range(kills):
            before = serving(server)
            streams = Streams(threads, server, requests)
            time.sleep(rng.uniform(0.05, 0.8) * length_s)
            running = [len(found.at) for found in streams.found]
            at = kill(busiest(server))
            results = streams.results()
            outcome.kills += 1
            for got, wanted, seen in zip(results, undisturbed, running, strict=True):
                outcome.streams += 1
                fault = fault_of(got, wanted)
                if fault is not None:
                    outcome.wrong.append(f"kill {number}, after {seen} events: {fault}")
                elif got.at[-1] > at and seen:
                    outcome.pauses_s.append(got.pause_s(at))
            wait_for_workers(server, replicas, before)
    return outcome


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Outcome]:
    """All kinds with all numbers of workers."""
    outcomes: dict[str, Outcome] = {}
    each = max(1, options.kills // (2 * len(KINDS)))
    valkey = Valkey(folder.parent)
    try:
        for replicas, store in ((1, f"lmdb://{folder.parent}/checkpoints"), (2, valkey.url)):
            outcomes |= measure_workers(options, folder, replicas, store, each)
    finally:
        valkey.stop()
    return outcomes


def measure_workers(
    options: argparse.Namespace, folder: Path, replicas: int, store: str, each: int
) -> dict[str, Outcome]:
    """All kinds with one number of workers and one store of checkpoints."""
    outcomes: dict[str, Outcome] = {}
    changes: dict[str, dict[str, Any]] = {
        "engine": {
            "model": str(folder),
            "dtype": "float32",
            "threads": 1,
            "kv": {"memory_gib": 0.2},
        },
        "gateway": {"debug": True},
        "worker": {"replicas": replicas, "num_cpus": 0.1, "health_check_period_s": 1},
        "recovery": {"store": {"url": store}},
    }
    workers = "1 worker" if replicas == 1 else f"{replicas} workers"
    with running_server(changes, folder.name) as server:
        wait_for_workers(server, replicas)
        for kind in KINDS:
            rng = random.Random(f"{kind} {replicas}")
            requests = bodies(kind, options.streams, options.tokens, rng)
            name = f"{kind}, {workers}, {store.partition(':')[0]}"
            outcomes[name] = kill_often(server, replicas, requests, each, rng)
            found = outcomes[name]
            print(f"{name}: {found.kills} kills, {len(found.wrong)} wrong", flush=True)
            for fault in found.wrong:
                print(f"  {fault}", flush=True)
    return outcomes


def main() -> int:
    """Measure, write bench/results/failover.json, and compare with the targets."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=100, help="of all kinds together")
    parser.add_argument("--streams", type=int, default=4, help="under way at each kill")
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        small = make_small_model(Path(folder) / "small", tokenizer=letter_tokenizer())
        outcomes = measure(options, small)
    rows = []
    for name, found in outcomes.items():
        p50, p95 = np.percentile(found.pauses_s or [0.0], [50, 95])
        rows.append(
            (name, found.kills, found.streams, len(found.wrong), f"{p50:.2f}", f"{p95:.2f}")
        )
    print(table(("", "kills", "streams", "wrong", "pause p50 s", "pause p95 s"), rows))
    second = [s for name, found in outcomes.items() if "2" in name for s in found.pauses_s]
    figures = {
        "wrong_streams": Figure(sum(len(o.wrong) for o in outcomes.values()), 0, at_most=True),
        "pause_p95_s": Figure(
            float(np.percentile(second or [0.0], 95)), PAUSE_TARGET_S, at_most=True
        ),
    }
    details = {
        "kills": {name: found.kills for name, found in outcomes.items()},
        "streams": {name: found.streams for name, found in outcomes.items()},
        "pauses_s": {
            name: {
                f"p{share}": round(float(np.percentile(found.pauses_s or [0.0], share)), 3)
                for share in (50, 95, 100)
            }
            for name, found in outcomes.items()
        },
    }
    write_results("failover", figures, details)
    print(report(figures))
    return 0 if all(figure.met for figure in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
