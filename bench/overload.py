"""Ten times more requests than the server can answer: what becomes of those that it accepts, and
how fast the others hear of it.

    python -m bench.overload --seconds 120
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.common import Figure, report, write_results
from bench.server import processes_of
from bench.strict import StrictServer, strict_server

_TOKENS = 24
#: Requests at once when capacity is measured: what the strict server runs and some that wait.
_CLOSED_LOOP = 12
_RECOVERY_S = 60.0
#: Requests per second that are a storm to the strict server on any machine.
_LEAST_RATE = 20.0


@dataclass(frozen=True)
class Answer:
    """One request of the storm.

    Attributes:
        status: HTTP status; 0 where the connection failed.
        seconds: to the end of the answer.
        retry_after: whether it says when to come again.
        complete: whether a 200 had all its tokens.
    """

    status: int
    seconds: float
    retry_after: bool
    complete: bool


@dataclass(frozen=True)
class Storm:
    """What came of it.

    Attributes:
        capacity: requests per second that the server answers, measured before.
        sent: requests.
        statuses: how often each came.
        accepted_p99_s: seconds of accepted requests.
        accepted_max_s: likewise.
        incomplete: accepted requests whose answer was not whole.
        refused_p99_s: seconds of refused requests.
        without_retry_after: refusals that do not say when to come again.
        memory_growth_mib: of all processes of the server, from before to the highest moment.
        recovery_s: seconds from the last request to an answer as fast as before.
    """

    capacity: float
    sent: int
    statuses: dict[int, int]
    accepted_p99_s: float
    accepted_max_s: float
    incomplete: int
    refused_p99_s: float
    without_retry_after: int
    memory_growth_mib: float
    recovery_s: float


async def ask(client: httpx.AsyncClient, model: str, number: int) -> Answer:
    """One request, not repeated."""
    sent: dict[str, Any] = {
        "model": model,
        "prompt": f"Report {number}: the weather today is",
        "max_tokens": _TOKENS,
        "ignore_eos": True,
    }
    began = time.perf_counter()
    try:
        answer = await client.post("/v1/completions", json=sent)
    except httpx.HTTPError:
        return Answer(0, time.perf_counter() - began, False, False)
    seconds = time.perf_counter() - began
    complete = answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == _TOKENS
    return Answer(answer.status_code, seconds, "retry-after" in answer.headers, complete)


async def storm(strict: StrictServer, seconds: float, factor: float, measured_s: float) -> Storm:
    """Measure capacity, send ``factor`` times as much, and see how it ends."""
    model = strict.server.model
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(
        base_url=strict.server.url, headers=strict.headers, timeout=300, limits=limits
    ) as client:
        await asyncio.gather(*(ask(client, model, number) for number in range(8)))  # warm up
        capacity = await _capacity(client, model, measured_s)
        usual = sorted([(await ask(client, model, number)).seconds for number in range(5)])[2]
        memory, peak = _memory(strict), 0
        tasks: list[asyncio.Task[Answer]] = []
        rng, began, due = random.Random(1), time.perf_counter(), 0.0
        looked = 0.0
        while (now := time.perf_counter() - began) < seconds:
            while due <= now:
                tasks.append(asyncio.create_task(ask(client, model, len(tasks))))
                due += rng.expovariate(max(factor * capacity, _LEAST_RATE))
            if now - looked > 1:
                looked, peak = now, max(peak, _memory(strict))
            await asyncio.sleep(min(0.005, max(due - now, 0)))
        ended = time.perf_counter()
        recovery = await _recovery(client, model, usual, ended)
        answers = await asyncio.gather(*tasks)
    accepted = [a for a in answers if a.status == 200]
    refused = [a for a in answers if a.status in (429, 503)]
    return Storm(
        capacity=capacity,
        sent=len(answers),
        statuses=dict(Counter(a.status for a in answers)),
        accepted_p99_s=_percentile([a.seconds for a in accepted]),
        accepted_max_s=max((a.seconds for a in accepted), default=0.0),
        incomplete=sum(not a.complete for a in accepted),
        refused_p99_s=_percentile([a.seconds for a in refused]),
        without_retry_after=sum(not a.retry_after for a in refused),
        memory_growth_mib=max(peak - memory, 0) / 2**20,
        recovery_s=recovery,
    )


async def _capacity(client: httpx.AsyncClient, model: str, seconds: float) -> float:
    """Requests per second with as many at once as run."""
    began, done = time.perf_counter(), 0

    async def loop() -> None:
        nonlocal done
        while time.perf_counter() - began < seconds:
            answer = await ask(client, model, done)
            done += answer.status == 200  # not with the await: that reads `done` before it waits

    await asyncio.gather(*(loop() for _ in range(_CLOSED_LOOP)))
    return done / (time.perf_counter() - began)


async def _recovery(client: httpx.AsyncClient, model: str, usual: float, ended: float) -> float:
    """Seconds until an answer is at most twice as slow as before the storm."""
    while time.perf_counter() - ended < _RECOVERY_S:
        answer = await ask(client, model, -1)
        if answer.status == 200 and answer.seconds <= 2 * usual:
            return time.perf_counter() - ended
        await asyncio.sleep(0.1)
    return _RECOVERY_S


def _memory(strict: StrictServer) -> int:
    """Resident bytes of the server's processes, what they share counted once for each."""
    total = 0
    for pid in processes_of(strict.server.log.parent):
        try:
            pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
        except (OSError, IndexError):  # it has just ended
            continue
        total += int(pages) * os.sysconf("SC_PAGE_SIZE")
    return total


def _percentile(values: list[float], share: float = 0.99) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--factor", type=float, default=10, help="times the capacity")
    parser.add_argument("--name", default="overload", help="of the results file")
    options = parser.parse_args()
    wait_s = 10.0
    with strict_server(wait_s=wait_s) as strict:
        found = asyncio.run(storm(strict, options.seconds, options.factor, 10))
        strict.check_rest()
    print(found)
    unexpected = sum(n for status, n in found.statuses.items() if status not in (200, 429, 503))
    figures = {
        "accepted": Figure(found.statuses.get(200, 0), 1),
        # what it answers in the storm is the capacity that counts; else it was no storm
        "sent_over_accepted": Figure(
            found.sent / max(found.statuses.get(200, 0), 1), 0.9 * options.factor
        ),
        # its time in the queue, and as long again to be answered among others
        "accepted_max_s": Figure(found.accepted_max_s, 2 * wait_s, True),
        "accepted_incomplete": Figure(found.incomplete, 0, True),
        "refused_p99_ms": Figure(found.refused_p99_s * 1e3, 200, True),
        "refused_without_retry_after": Figure(found.without_retry_after, 0, True),
        "neither_accepted_nor_refused": Figure(unexpected, 0, True),
        "memory_growth_mib": Figure(found.memory_growth_mib, 300, True),
        "recovery_s": Figure(found.recovery_s, 10, True),
    }
    print(report(figures))
    print("wrote", write_results(options.name, figures, {"storm": asdict(found)}))
    return int(not all(figure.met for figure in figures.values()))


if __name__ == "__main__":
    raise SystemExit(main())
