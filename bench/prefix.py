"""The prefix cache: time to first token by where a system prompt's KV is found, and what it costs.

Real servers: ours, over HTTP, as ``make serve`` starts it, and valkey. Each system prompt is of
its own, so that only what is meant to be found is found.

    python -m bench.prefix
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import openai
from pydantic import SecretStr
from tqdm import tqdm

from bench.arms import Ask, EngineArm, throughput
from bench.common import Figure, load_prompts, report, table, write_results
from bench.server import Server, running_server
from bench.valkey import Valkey
from prefix_cache.settings import PrefixCacheSettings
from specdec.blocks import PoolOnly
from specdec.chat import encode_prompt
from specdec.config import DEFAULT_MODEL, EngineSettings, KvSettings, PrefixSettings
from specdec.engine import Engine
from specdec.params import CacheScope

LENGTHS = (1000, 4000)
#: Cold time is held against: found in the pool, found in the store.
DEVICE_TARGET, STORE_TARGET = 0.15, 0.3
#: Words of about one token each.
_WORDS = "time year people way day man thing woman life child world school state family student"
_SYSTEMS, _ROOM_FOR = 20, 13
#: KV of one token of the default model: keys and values, 30 layers of 3 heads of 64 in float32.
_TOKEN_BYTES = 2 * 30 * 3 * 64 * 4


@dataclass(frozen=True)
class Seen:
    """One request: seconds to its first token, and tokens of its prompt that were found."""

    first_s: float
    prompt: int
    cached: int


class Client:
    """Asks a server as a user would."""

    def __init__(self, server: Server) -> None:
        self._model = server.model
        self._sdk = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300)

    def ask(self, system: str, question: str, max_tokens: int = 4) -> Seen:
        """Stream an answer."""
        started = time.perf_counter()
        first = 0.0
        stream = self._sdk.chat.completions.create(
            model=self._model,
            messages=[
                {"role": "system", "content": system},
                {"role": "user", "content": question},
            ],
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        usage = None
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content and not first:
                first = time.perf_counter() - started
            usage = chunk.usage or usage
        if usage is None or usage.prompt_tokens_details is None:
            raise RuntimeError("the server told no usage")
        return Seen(first, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0)

    def close(self) -> None:
        """Let go of connections."""
        self._sdk.close()


@contextmanager
def client_of(changes: Mapping[str, Mapping[str, Any]]) -> Iterator[Client]:
    """A server for the time of the block, already asked once."""
    with running_server(changes, DEFAULT_MODEL) as server:
        client = Client(server)
        client.ask("You are a warm-up.", "Hello")
        try:
            yield client
        finally:
            client.close()


def system_prompt(seed: int, tokens: int) -> str:
    """A text of about that many tokens that shares nothing with others from its first words on."""
    rng = random.Random(seed)
    return f"Rules of {seed}: " + " ".join(rng.choices(_WORDS.split(), k=tokens - 12))


def question(number: int) -> str:
    """A user's turn of its own."""
    return f"What do you say of number {number}?"


def store(url: str) -> dict[str, Any]:
    """Settings of an engine with that store."""
    return {"prefix_cache": {"store": {"url": url}}}


def first_tokens(url: str, repeats: int, seed: int) -> dict[str, list[Seen]]:
    """Times by where the KV was found: nowhere, in the pool, in the store after a restart."""
    changes = {"engine": store(url)}
    seen: dict[str, list[Seen]] = {}
    prompts = [
        (length, system_prompt(seed + 100 * length + i, length))
        for length in LENGTHS
        for i in range(repeats)
    ]
    with client_of(changes) as client:
        for number, (length, system) in enumerate(tqdm(prompts, desc="cold, pool")):
            seen.setdefault(f"cold {length}", []).append(client.ask(system, question(number)))
            seen.setdefault(f"pool {length}", []).append(
                client.ask(system, question(1000 + number))
            )
        time.sleep(2)  # what is written behind
    with client_of(changes) as client:
        for number, (length, system) in enumerate(tqdm(prompts, desc="store")):
            seen.setdefault(f"store {length}", []).append(
                client.ask(system, question(2000 + number))
            )
    return seen


def routed(requests: int, slack: int, factor: float) -> float:
    """Share of requests whose system prompt was in the pool of the worker that got them: 20
    prompts by Zipf's law, room for 13 of them in each of two workers.
    """
    pages = _ROOM_FOR * 22
    changes: dict[str, dict[str, Any]] = {
        "engine": {"threads": 1, "kv": {"pages": pages}, "batch": {"max_sequences": 4}},
        "worker": {
            "replicas": 2,
            "routing": {"slack": slack, "factor": factor, "stats_period_s": 1},
        },
    }
    rng = random.Random(1)
    systems = [system_prompt(i, 320) for i in range(_SYSTEMS)]
    chosen = rng.choices(range(_SYSTEMS), [1 / (i + 1) for i in range(_SYSTEMS)], k=requests)
    found = 0
    with client_of(changes) as client, ThreadPoolExecutor(4) as threads:
        asked = threads.map(
            lambda job: client.ask(systems[job[1]], question(job[0]), 2), enumerate(chosen)
        )
        for seen in tqdm(asked, total=requests, desc="routing"):
            found += seen.cached >= 300
    return found / requests


def write_cost(url: str, repeats: int, batch: int, prompt_file: Path | None) -> tuple[float, float]:
    """What writing behind costs while answers are computed, and how much is written in that time.

    Returns:
        Throughput with the store written behind, of that without one, and the share of the blocks
        that are in the store when the last answer ends; medians of pairs.
    """
    settings = EngineSettings(
        kv=KvSettings(memory_gib=2),
        prefix_cache=PrefixSettings(store=PrefixCacheSettings(url=SecretStr(url))),
    )
    engine = Engine.from_settings(settings)
    stored, pool_only = engine.blocks, PoolOnly(engine.runner.pool)
    prompts = [
        encode_prompt(engine.tokenizer, [{"role": "user", "content": prompt.text}])[-256:]
        for prompt in load_prompts(batch, prompt_file)
    ]
    EngineArm(engine, True).run(prompts, Ask(32))
    ratios, shares = [], []

    def written() -> int:
        stats = stored.stats()
        return 0 if stats is None else stats.written

    for pair in tqdm(range(repeats), desc="writing behind"):
        speeds = {}
        for writing in (True, False) if pair % 2 else (False, True):
            engine.blocks = stored if writing else pool_only
            # by its salt, every block is new to pool and store
            arm = EngineArm(engine, True, CacheScope(0, f"{pair} {writing}".encode()))
            before = written()
            speeds[writing] = throughput(arm.run(prompts, Ask(64)))
            at_once = written() - before
            stored.flush(60)
            if writing:
                shares.append(at_once / (written() - before))
        ratios.append(speeds[True] / speeds[False])
    engine.blocks = stored
    engine.close()
    return median(ratios), median(shares)


def measure(options: argparse.Namespace) -> int:
    """Run the parts asked for and print their figures."""
    figures: dict[str, Figure] = {}
    details: dict[str, object] = {}
    with tempfile.TemporaryDirectory(prefix="specdec-prefix-") as folder:
        valkey = Valkey(Path(folder), "--maxmemory", "8gb")
        try:
            urls = {"redis": valkey.url, "lmdb": f"lmdb://{folder}/blocks"}
            if "first" in options.parts:
                for seed, (kind, url) in enumerate(urls.items()):
                    rows, found = summarise(kind, first_tokens(url, options.repeats, 10_000 * seed))
                    print(f"\n{kind}\n{rows}\n")
                    figures |= found
                    details[kind] = rows
            if "writing" in options.parts:
                ratio, share = write_cost(
                    valkey.url, options.repeats + 1, options.batch, options.prompt_file
                )
                figures["writing_behind_throughput"] = Figure(ratio, 0.97)
                print(f"{share:.0%} of the blocks were written before the last answer ended")
                details["written_meanwhile"] = share
            if "routing" in options.parts:
                blind = routed(options.requests, 0, 1.0)
                figures["affinity_hit_ratio"] = Figure(routed(options.requests, 4, 1.5), 0.9)
                print(f"without affinity: {blind:.2f} of the requests found their prompt")
                details["hit_ratio_without_affinity"] = blind
        finally:
            valkey.stop()
    print(report(figures))
    print("wrote", write_results(options.name, figures, details))
    return 0


def summarise(kind: str, seen: Mapping[str, Sequence[Seen]]) -> tuple[str, dict[str, Figure]]:
    """A table of medians, and the figures: times as shares of the cold one."""
    rows, figures = [], {}
    for case, all_seen in seen.items():
        place, length = case.split()
        cold = median(one.first_s for one in seen[f"cold {length}"])
        first = median(one.first_s for one in all_seen)
        cached = median(one.cached for one in all_seen)
        moved = f"{cached * _TOKEN_BYTES / 1e6:.0f}" if place == "store" else "0"
        rows.append((length, place, f"{first:.3f}", f"{first / cold:.2f}", f"{cached:.0f}", moved))
        if place != "cold":
            name = "pool" if place == "pool" else f"{kind}_after_restart"
            target = DEVICE_TARGET if place == "pool" else STORE_TARGET
            figures[f"{kind}_first_token_{name}_{length}"] = Figure(first / cold, target, True)
    header = ("tokens", "found in", "first token, s", "of cold", "tokens found", "MB read")
    return table(header, rows), figures


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=300, help="for the routing")
    parser.add_argument("--batch", type=int, default=16, help="for the cost of writing")
    parser.add_argument("--prompt-file", type=Path, help="for the cost of writing")
    parts = ("first", "writing", "routing")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--name", default="prefix", help="of the results file")
    return measure(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
