"""The engine thread around a real, tiny engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import pytest
import torch

from deployments.engine_thread import EngineDownError, EngineThread
from deployments.health import ErrorStorm
from deployments.messages import Accepted, Alive, Event, Fault, GenerateRequest
from specdec.engine import Engine
from specdec.heads.drafter import NullDrafter
from specdec.outputs import RequestOutput
from specdec.params import SamplingParams
from tests.engines import run_all, tiny_engine, tokens_of
from tests.tiny_models import tiny_model

ResultT = TypeVar("ResultT")


def new_engine(**settings: Any) -> Engine:
    return tiny_engine(tiny_model("llama"), NullDrafter(), **settings)


def request(name: str, count: int = 8, prompt: tuple[int, ...] = (1, 2, 3)) -> GenerateRequest:
    return GenerateRequest(name, prompt, SamplingParams(max_tokens=count))


def with_thread(
    body: Callable[[EngineThread], Coroutine[Any, Any, ResultT]],
    engine: Engine | None = None,
    stall_timeout_s: float = 60.0,
    **options: Any,
) -> ResultT:
    thread = EngineThread(engine or new_engine(), stall_timeout_s, **options)
    try:
        return asyncio.run(asyncio.wait_for(body(thread), 60))
    finally:
        thread.close()
        assert not any(t.name == "engine" for t in threading.enumerate())


async def all_events(events: AsyncGenerator[Event]) -> list[Event]:
    return [event async for event in events]


def outputs_of(events: list[Event]) -> list[RequestOutput]:
    return [event for event in events if isinstance(event, RequestOutput)]


def test_events_carry_the_tokens_of_the_engine() -> None:
    names = [f"r{index}" for index in range(6)]
    requests = {name: request(name, 5 + index, (1, 2, index)) for index, name in enumerate(names)}
    expected = run_all(
        new_engine(),
        {name: (list(r.prompt_tokens), r.params) for name, r in requests.items()},
    )

    async def body(thread: EngineThread) -> list[list[Event]]:
        return await asyncio.gather(
            *(all_events(thread.generate(request)) for request in requests.values())
        )

    for name, events in zip(names, with_thread(body), strict=True):
        assert events[0] == Accepted()
        outputs = outputs_of(events)
        assert len(outputs) == len(events) - 1
        assert tokens_of(outputs) == tokens_of(expected[name])
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].stats is not None


def test_outputs_that_pile_up_are_joined() -> None:
    async def body(thread: EngineThread) -> list[Event]:
        async with aclosing(thread.generate(request("slow", 50))) as events:
            first = await anext(events)
            while await thread.call(lambda engine, _: engine.has_work):
                await asyncio.sleep(0.01)
            return [first, *await all_events(events)]

    events = with_thread(body)
    assert len(events) == 2
    assert len(tokens_of(outputs_of(events))) == 50


def test_refusals_are_faults() -> None:
    async def body(thread: EngineThread) -> list[list[Event]]:
        requests = (
            request("empty", prompt=()),
            request("outside", prompt=(100_000,)),
            request("long", prompt=(1,) * 600),
        )
        return [await all_events(thread.generate(request)) for request in requests]

    kinds = [
        [event.kind for event in events if isinstance(event, Fault)] for events in with_thread(body)
    ]
    assert kinds == [["invalid"], ["invalid"], ["too_long"]]


def test_leaving_early_aborts_in_the_engine() -> None:
    async def body(thread: EngineThread) -> tuple[int, int, int]:
        async with aclosing(thread.generate(request("left", 400))) as events:
            await anext(events)
            await anext(events)
        task = asyncio.create_task(all_events(thread.generate(request("cancelled", 400))))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while await thread.call(lambda engine, _: engine.has_work):
            await asyncio.sleep(0.01)
        return await thread.call(
            lambda engine, open_requests: (
                engine.pages_in_use,
                open_requests,
                engine.stats.finished.get("abort", 0),
            )
        )

    assert with_thread(body) == (0, 0, 2)


def test_a_failing_step_fails_all_and_is_seen_by_the_health_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = new_engine()
    step = engine.step
    steps = 0

    def failing() -> list[RequestOutput]:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise RuntimeError("out of luck")
        return step()

    monkeypatch.setattr(engine, "step", failing)

    async def body(thread: EngineThread) -> None:
        thread.check()
        running = await asyncio.gather(
            *(all_events(thread.generate(request(f"r{index}", 50))) for index in range(3))
        )
        for events in running:
            assert isinstance(events[-1], Fault)
            assert events[-1].kind in ("lost", "unavailable")  # there then, or too late
            assert "luck" not in events[-1].message
        with pytest.raises(EngineDownError, match="out of luck"):
            thread.check()
        (late,) = await all_events(thread.generate(request("late")))
        assert isinstance(late, Fault)
        with pytest.raises(EngineDownError):
            await thread.call(lambda engine, _: engine.has_work)

    with_thread(body, engine)


def test_a_request_that_the_engine_chokes_on_harms_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = new_engine()
    add = engine.add_request

    def choking(name: str, *rest: Any) -> None:
        if name == "bad":
            raise TypeError("nobody thought of it")
        add(name, *rest)

    monkeypatch.setattr(engine, "add_request", choking)

    async def body(thread: EngineThread) -> tuple[list[Event], list[Event]]:
        good, bad = await asyncio.gather(
            all_events(thread.generate(request("good"))),
            all_events(thread.generate(request("bad"))),
        )
        thread.check()
        return good, bad

    good, bad = with_thread(body, engine)
    assert outputs_of(good)[-1].finished
    assert [event.kind for event in bad if isinstance(event, Fault)] == ["internal"]


def hang(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let no step end before the event is set."""
    release = threading.Event()
    step = engine.step

    def hanging() -> list[RequestOutput]:
        release.wait(30)
        return step()

    monkeypatch.setattr(engine, "step", hanging)
    return release


def test_a_hanging_step_is_seen_by_the_health_check(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine()
    release = hang(engine, monkeypatch)

    async def body(thread: EngineThread) -> None:
        task = asyncio.create_task(all_events(thread.generate(request("r"))))
        await asyncio.sleep(0.3)
        with pytest.raises(EngineDownError, match="step has been running"):
            thread.check()
        release.set()
        assert outputs_of(await task)[-1].finished
        thread.check()

    with_thread(body, engine, stall_timeout_s=0.1)


def test_closing_ends_open_requests() -> None:
    async def body(thread: EngineThread) -> list[Event]:
        task = asyncio.create_task(all_events(thread.generate(request("r", 480))))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(thread.close)
        return await task

    last = with_thread(body)[-1]
    assert isinstance(last, Fault)
    assert last.kind == "handover"


def test_a_request_that_gets_no_tokens_hears_that_the_engine_lives_until_it_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What this catches: a long prompt taken for a dead worker, a hang taken for a long prompt."""
    engine = new_engine()
    release = hang(engine, monkeypatch)

    async def body(thread: EngineThread) -> None:
        async with aclosing(thread.generate(request("r"))) as events:
            assert await anext(events) == Accepted()
            assert [await anext(events) for _ in range(3)] == [Alive()] * 3
            while thread._problem() is None:
                await asyncio.sleep(0.05)
            nothing = asyncio.create_task(anext(events))
            while (await asyncio.wait({nothing}, timeout=0.3))[0]:
                assert nothing.result() == Alive()  # begun before
                nothing = asyncio.create_task(anext(events))
            release.set()
            while (found := await nothing) == Alive():  # it lives again
                nothing = asyncio.create_task(anext(events))
            assert isinstance(found, RequestOutput)

    with_thread(body, engine, stall_timeout_s=1.0, heartbeat_s=0.05)


def test_an_engine_whose_requests_fail_is_unhealthy_but_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = new_engine()
    run = engine.runner.run

    def broken(*args: Any) -> Any:
        output = run(*args)
        output.logits[:] = torch.nan
        return output

    async def body(thread: EngineThread) -> None:
        await all_events(thread.generate(request("good")))
        thread.check()
        with monkeypatch.context() as patch:
            patch.setattr(engine.runner, "run", broken)
            for number in range(3):
                thread.check()
                await all_events(thread.generate(request(f"bad{number}")))
        with pytest.raises(EngineDownError, match="3 requests"):
            thread.check()
        assert outputs_of(await all_events(thread.generate(request("after"))))[-1].stats

    with_thread(body, engine, storm=ErrorStorm(3))


def test_an_idle_thread_sleeps() -> None:
    async def body(thread: EngineThread) -> float:
        await all_events(thread.generate(request("r")))
        before = time.process_time()
        await asyncio.sleep(0.5)
        return time.process_time() - before

    assert with_thread(body) < 0.1


def test_a_call_passes_errors_on() -> None:
    def wrong(engine: Engine, _: int) -> None:
        raise LookupError(str(engine.pages_in_use))

    async def body(thread: EngineThread) -> None:
        with pytest.raises(LookupError, match="0"):
            await thread.call(wrong)
        thread.check()

    with_thread(body)
