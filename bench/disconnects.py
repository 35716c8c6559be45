"""Clients that leave at random moments: before the first token, within the stream, while they
wait. Their work must stop, and nothing of them may be left.

    python -m bench.disconnects --clients 500
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter
from typing import Any

import httpx

from bench.common import Figure, report, write_results
from bench.strict import StrictServer, strict_server

_LONG = 400
_SHORT = 5
_IN_STREAM = "left in the stream"
_BEFORE = "left before the first event"


def body(rng: random.Random, model: str, max_tokens: int, stream: bool) -> dict[str, Any]:
    """Of a request that takes a while, or none."""
    return {
        "model": model,
        "prompt": " ".join(str(rng.randrange(1000)) for _ in range(rng.randint(1, 60))),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": stream,
        "n": rng.choice([1, 1, 2]),
    }


async def run(strict: StrictServer, clients: int, seed: int, at_once: int) -> Counter[str]:
    """Clients that leave and some that stay; returns how each fared."""
    outcomes: Counter[str] = Counter()
    todo = iter(range(clients))
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=strict.server.url, headers=strict.headers, timeout=300, limits=limits
    ) as client:

        async def leave(rng: random.Random) -> str:
            sent = body(rng, strict.server.model, _LONG, rng.random() < 0.75)
            # by events it leaves within its stream however slow the server is
            by_events = sent["stream"] and rng.random() < 0.6
            events = rng.randint(0, 8) if by_events else 10**6
            seen = 0
            try:
                async with asyncio.timeout(120 if by_events else rng.uniform(0.0, 1.5)):
                    async with client.stream("POST", "/v1/completions", json=sent) as answer:
                        if answer.status_code != 200:
                            return f"refused {answer.status_code}"
                        async for line in answer.aiter_lines():
                            seen += bool(line)
                            if seen > events:
                                return _IN_STREAM
            except TimeoutError:
                return _IN_STREAM if seen else _BEFORE
            return "was answered before it left"

        async def stay(rng: random.Random) -> str:
            sent = body(rng, strict.server.model, _SHORT, False)
            while True:
                answer = await client.post("/v1/completions", json=sent)
                if answer.status_code not in (429, 503):
                    break
                await asyncio.sleep(float(answer.headers["retry-after"]))
            if answer.status_code != 200:
                return f"lost: {answer.status_code}"
            usage = answer.json()["usage"]
            whole = usage["completion_tokens"] == _SHORT * sent["n"]
            return "stayed, answered" if whole else "lost: not whole"

        async def work() -> None:
            for number in todo:
                rng = random.Random(f"{seed} {number}")
                outcomes[await (leave(rng) if number % 5 else stay(rng))] += 1

        await asyncio.gather(*(work() for _ in range(at_once)))
    return outcomes


def steps_after_leaving(strict: StrictServer, stream: bool) -> int:
    """Steps that the engine makes for one client once that has left."""
    sent = body(random.Random(3), strict.server.model, 1500, stream) | {"n": 1}
    timeout = httpx.Timeout(120)
    with httpx.Client(
        base_url=strict.server.url, headers=strict.headers, timeout=timeout
    ) as client:
        if stream:
            with client.stream("POST", "/v1/completions", json=sent) as answer:
                lines = answer.iter_lines()
                for _ in range(6):
                    next(lines)
        else:
            try:
                client.post("/v1/completions", json=sent, timeout=1.5)
            except httpx.ReadTimeout:
                pass
            else:
                raise RuntimeError("the answer came before the client could leave")
    before = strict.integrity()["stats"]["steps"]
    deadline = time.monotonic() + 60
    while (report := strict.integrity())["has_work"] and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not report["has_work"], "the work goes on"
    steps: int = report["stats"]["steps"] - before
    return steps


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--name", default="disconnects", help="of the results file")
    options = parser.parse_args()
    with strict_server() as strict:
        outcomes = asyncio.run(run(strict, options.clients, options.seed, options.at_once))
        strict.check_rest()
        after = {stream: steps_after_leaving(strict, stream) for stream in (True, False)}
        strict.check_rest()
    lost = sum(count for name, count in outcomes.items() if name.startswith("lost"))
    figures = {
        "clients": Figure(sum(outcomes.values()), options.clients),
        "left_in_the_stream": Figure(outcomes[_IN_STREAM], options.clients / 10),
        "left_before_the_first_event": Figure(outcomes[_BEFORE], options.clients / 10),
        "lost": Figure(lost, 0, True),
        "steps_after_leaving_a_stream": Figure(after[True], 2, True),
        "steps_after_leaving_a_plain_request": Figure(after[False], 2, True),
    }
    print(dict(outcomes))
    print(report(figures))
    print("wrote", write_results(options.name, figures, {"outcomes": dict(outcomes)}))
    return int(not all(figure.met for figure in figures.values()))


if __name__ == "__main__":
    raise SystemExit(main())
