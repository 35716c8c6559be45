"""What is told of an engine agrees with what its requests were told."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest

from deployments.engine_thread import EngineThread
from deployments.messages import Event, GenerateRequest
from deployments.metrics import table
from deployments.metrics.definition import Metric
from deployments.metrics.engine_watch import EngineWatch
from deployments.metrics.recorder import Recorder
from specdec.engine import Engine
from specdec.heads.drafter import NullDrafter
from specdec.outputs import RequestOutput, RequestStats
from specdec.params import SamplingParams
from tests.engines import tiny_engine
from tests.tiny_models import tiny_model


class Watched:
    """An engine on its thread, and all that was counted of it."""

    def __init__(self, engine: Engine) -> None:
        self.recorder = Recorder()
        self.watch = EngineWatch(self.recorder)
        self.thread = EngineThread(engine, 60, after_step=self.watch.after_step)
        self.sums: Counter[tuple[Any, ...]] = Counter()
        self.levels: dict[tuple[Any, ...], float] = {}
        self.seen: Counter[Metric] = Counter()

    async def read(self) -> None:
        await self.thread.call(lambda engine, _: self.watch.read(engine))
        batch = self.recorder.drain()
        for (metric, labels), amount in batch.sums.items():
            self.sums[(metric, *labels)] += amount  # type: ignore[assignment]
        self.levels = {(metric, *labels): v for (metric, labels), v in batch.levels.items()}
        for (metric, _), values in batch.observations.items():
            self.seen[metric] += len(values)

    def total(self, metric: Metric) -> float:
        return sum(amount for key, amount in self.sums.items() if key[0] is metric)


async def _answer(thread: EngineThread, request: GenerateRequest) -> RequestStats:
    events: list[Event] = [event async for event in thread.generate(request)]
    last = events[-1]
    assert isinstance(last, RequestOutput)
    assert last.stats is not None
    return last.stats


def request(name: str, tokens: int) -> GenerateRequest:
    prompt = tuple(range(1, 40)) if name != "other" else (5, 6, 7)
    return GenerateRequest(name, prompt, SamplingParams(max_tokens=tokens))


def test_sums_equal_what_requests_were_told_aborted_ones_apart() -> None:
    engine = tiny_engine(tiny_model("llama"), NullDrafter(), lookup=True)
    watched = Watched(engine)

    async def body() -> list[RequestStats]:
        told = [await _answer(watched.thread, request("first", 20))]
        await watched.read()
        told += await asyncio.gather(
            *(_answer(watched.thread, request(name, 10)) for name in ("a", "b", "other"))
        )
        left = watched.thread.generate(request("left", 400))
        await anext(left)
        await anext(left)
        await left.aclose()
        while await watched.thread.call(lambda engine, _: engine.has_work):
            await asyncio.sleep(0.01)
        await watched.read()
        return told

    try:
        told = asyncio.run(asyncio.wait_for(body(), 60))
    finally:
        watched.thread.close()
    sums, stats = watched.sums, engine.stats
    assert sums[table.ENDED, "length"] == len(told)
    assert sums[table.ENDED, "abort"] == 1
    for metric, values in (
        (table.PROMPT_TOKENS, [s.prompt_tokens for s in told]),
        (table.OUTPUT_TOKENS, [s.completion_tokens for s in told]),
        (table.REQUEST_ROUNDS, [s.rounds for s in told]),
        (table.REQUEST_ACCEPTED, [s.accepted for s in told]),
    ):
        assert sums[metric, "length"] == sum(values), metric.name
    assert sums[table.CACHED_TOKENS, "pool", "length"] == sum(s.cached_tokens for s in told) > 0
    assert watched.total(table.OUTPUT_TOKENS) == sums[(table.GENERATED,)] == stats.emitted
    assert watched.total(table.REQUEST_ROUNDS) == sums[(table.ROUNDS,)] == stats.rounds
    assert watched.total(table.REQUEST_ACCEPTED) == sums[(table.ACCEPTED,)] == stats.accepted
    assert sums[(table.STEPS,)] == stats.steps == watched.seen[table.STEP_TIME]
    assert watched.total(table.PHASE_TIME) == pytest.approx(sum(stats.phase_s.values()))
    assert watched.seen[table.QUEUE_TIME] == len(told) + 1
    assert watched.levels[table.SEQUENCES, "running"] == 0
    assert watched.levels[table.PAGES, "used"] == 0
    assert watched.levels[table.PAGES, "free"] == engine.scheduler.allocator.num_pages


def test_an_error_of_the_watch_ends_no_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(tiny_engine(tiny_model("llama"), NullDrafter(), lookup=True))

    def wrong(*_: object) -> None:
        raise RuntimeError("no figures today")

    monkeypatch.setattr(watched.recorder, "observe", wrong)

    async def body() -> RequestStats:
        told = await _answer(watched.thread, request("r", 8))
        watched.thread.check()
        return told

    try:
        assert asyncio.run(asyncio.wait_for(body(), 60)).completion_tokens == 8
    finally:
        watched.thread.close()
    assert sum("reading the engine failed" in r.message for r in caplog.records) == 1


def test_a_posted_function_runs_between_two_steps() -> None:
    watched = Watched(tiny_engine(tiny_model("llama"), NullDrafter(), lookup=True))
    ran: list[bool] = []
    assert watched.thread.post(lambda engine: ran.append(engine.has_work))
    end = time.monotonic() + 20
    while not ran:
        assert time.monotonic() < end
        time.sleep(0.01)
    watched.thread.close()
    assert ran == [False]
    assert not watched.thread.post(lambda engine: None)
