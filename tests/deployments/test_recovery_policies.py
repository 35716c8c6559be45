"""The small policies of recovery, with their clocks in hand: fleet, probation, retries, storms."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from deployments.fleet import Fleet
from deployments.health import ErrorStorm
from deployments.probation import Probation, Turn
from deployments.retry import Backoff, RetryBudget


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_worker_that_vanishes_has_left_until_it_is_back() -> None:
    clock = Clock()
    fleet = Fleet(clock)
    fleet.update(["a", "b"])
    assert fleet.left("a") is None
    clock.now += 5
    fleet.update(["b"])
    clock.now += 5
    fleet.update(["b"])
    assert fleet.left("a") == 1005.0
    assert fleet.usable() == {"b"}
    assert not fleet.others("b")
    assert fleet.others("a")
    fleet.update(["a", "b"])
    assert fleet.left("a") is None


def test_an_avoided_worker_is_used_again_after_a_while_or_once_it_serves() -> None:
    clock = Clock()
    fleet = Fleet(clock)
    fleet.update(["a", "b"])
    fleet.avoid("a")
    assert fleet.usable() == {"b"}
    fleet.serves("a")
    assert fleet.usable() == {"a", "b"}
    fleet.avoid("a")
    clock.now += 14
    assert fleet.usable() == {"b"}
    clock.now += 2
    assert fleet.usable() == {"a", "b"}


def test_what_a_fleet_remembers_is_bounded() -> None:
    fleet = Fleet()
    for number in range(5000):
        fleet.update([f"w{number}"])
        fleet.chose(f"a{number}", "w")
    assert fleet.choice("a0") is None
    assert fleet.choice("a4999") == "w"
    assert fleet.left("w0") is None
    assert fleet.left("w4998") is not None


def with_probation(
    body: Callable[[Probation, Clock], Coroutine[Any, Any, None]],
) -> None:
    clock = Clock()
    asyncio.run(asyncio.wait_for(body(Probation(clock), clock), 60))


async def others(probation: Probation, count: int) -> list[asyncio.Task[Turn]]:
    tasks = [asyncio.create_task(probation.enter()) for _ in range(count)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


def test_suspects_are_alone_and_in_order() -> None:
    async def body(probation: Probation, _: Clock) -> None:
        turn = await probation.enter()
        waiting = await others(probation, 3)
        for task in waiting:
            assert not task.done()
            probation.leave(turn)
            probation.leave(turn)  # a second time changes nothing
            turn = await task
            assert turn.alone
        probation.leave(turn)

    with_probation(body)


def test_a_turn_counts_from_when_a_worker_has_the_request() -> None:
    """With one worker none may be there for long: nobody may slip in beside a suspect meanwhile."""

    async def body(probation: Probation, clock: Clock) -> None:
        turn = await probation.enter()
        (second,) = await others(probation, 1)
        clock.now += 1000
        await asyncio.sleep(1.2)
        assert not second.done()
        probation.begin(turn)
        clock.now += 16
        assert not (await second).alone
        assert not turn.alone

    with_probation(body)


def test_many_suspects_go_several_at_once() -> None:
    async def body(probation: Probation, clock: Clock) -> None:
        tasks = await others(probation, 100)
        rounds, at_once = 0, []
        while tasks:
            entered, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)
            entered = {task for task in tasks if task.done()}
            at_once.append(len(entered))
            tasks = [task for task in tasks if task not in entered]
            for task in entered:
                probation.leave(task.result())
            rounds += 1
        assert rounds < 80
        assert at_once[-10:] == [1] * 10  # the last ones alone
        assert max(at_once) > 1

    with_probation(body)


def test_a_suspect_that_leaves_the_queue_or_its_turn_blocks_nobody() -> None:
    async def body(probation: Probation, _: Clock) -> None:
        turn = await probation.enter()
        first, second, third = await others(probation, 3)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        probation.leave(turn)
        first.cancel()  # it has just been given its turn
        await asyncio.gather(first, return_exceptions=True)
        if not first.cancelled():
            probation.leave(first.result())
        assert (await third).alone

    with_probation(body)


def test_waits_double_and_are_bounded() -> None:
    backoff = Backoff(0.1, 1.0, random.Random(1))
    most = [max(backoff.wait_s(failures) for _ in range(200)) for failures in range(1, 8)]
    for seen, bound in zip(most, [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0], strict=True):
        assert 0.8 * bound < seen <= bound
    assert min(backoff.wait_s(10_000) for _ in range(200)) < 0.1


def test_a_budget_is_a_bucket() -> None:
    clock = Clock()
    budget = RetryBudget(3, 2.0, clock)
    assert [budget.take() for _ in range(5)] == [True, True, True, False, False]
    clock.now += 0.6
    assert [budget.take() for _ in range(2)] == [True, False]
    clock.now += 1000
    assert [budget.take() for _ in range(4)] == [True, True, True, False]


@pytest.mark.parametrize(
    ("ends", "storm"),
    [
        (["error"] * 4, True),
        (["error"] * 3, False),
        (["error"] * 4 + ["stop"] * 4, True),
        (["error"] * 4 + ["stop"] * 5, False),
        (["error"] * 4 + ["abort"] * 50, True),  # a client that leaves says nothing
    ],
)
def test_a_storm_is_many_failures_and_few_good_ends(ends: list[Any], storm: bool) -> None:
    clock = Clock()
    watch = ErrorStorm(4, clock)
    for end in ends:
        watch.count(end)
    assert (watch.failed() > 0) == storm
    clock.now += 31
    assert watch.failed() == 0
