"""Who gets in, who waits and who is turned away."""

from __future__ import annotations

import asyncio
import random

import pytest

from deployments.admission import Admission, Need, NoRoomError, Ticket


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_room_is_never_overdrawn_and_always_comes_back() -> None:
    """Requests of all sizes, many of which give up while they wait or hold room."""

    async def run() -> None:
        capacity = Need(8, 1000)
        admission = Admission(lambda: capacity, 10_000, 60)
        rng = random.Random(5)
        held: list[Need] = []

        async def request() -> None:
            await asyncio.sleep(rng.random() / 50)
            need = Need(rng.randint(1, 4), rng.randint(1, 1500))
            try:
                async with asyncio.timeout(rng.choice([None, None, rng.random() / 20])):
                    ticket = await admission.admit(need, rng.randint(0, 2))
                    held.append(need)
                    try:
                        total = Need(sum(n.sequences for n in held), sum(n.tokens for n in held))
                        assert total.within(capacity) or len(held) == 1
                        await asyncio.sleep(rng.random() / 500)
                    finally:
                        held.remove(need)
                        ticket.release()
                        ticket.release()
            except TimeoutError:
                pass

        await asyncio.gather(*(request() for _ in range(500)))
        assert admission.waiting == 0
        assert admission._taken == Need(0, 0)
        assert admission._waiting_tokens == 0

    asyncio.run(run())


async def waiter(admission: Admission, need: Need, priority: int = 0) -> asyncio.Task[Ticket]:
    task = asyncio.create_task(admission.admit(need, priority))
    await asyncio.sleep(0)
    return task


def test_order_of_priority_then_of_arrival() -> None:
    async def run() -> list[int]:
        admission = Admission(lambda: Need(1, 100), 10, 60)
        ticket = await admission.admit(Need(1, 1))
        order: list[int] = []

        async def one(number: int, priority: int) -> None:
            got = await admission.admit(Need(1, 1), priority)
            order.append(number)
            got.release()

        tasks = [asyncio.create_task(one(i, p)) for i, p in enumerate([0, 0, -1, 5, -1])]
        await asyncio.sleep(0)
        ticket.release()
        await asyncio.gather(*tasks)
        return order

    assert asyncio.run(run()) == [2, 4, 0, 1, 3]


def test_a_big_request_is_not_passed_by_small_ones_for_ever() -> None:
    async def run() -> None:
        admission = Admission(lambda: Need(10, 100), 10, 60)
        first = await admission.admit(Need(1, 60))
        big = await waiter(admission, Need(1, 80))
        small = await waiter(admission, Need(1, 10))
        assert not big.done()
        assert not small.done()
        first.release()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert big.done()
        assert small.done()

    asyncio.run(run())


def test_a_request_larger_than_everything_gets_in_alone() -> None:
    async def run() -> None:
        admission = Admission(lambda: Need(2, 100), 10, 60)
        ticket = await admission.admit(Need(16, 5000))
        other = await waiter(admission, Need(1, 1))
        assert not other.done()
        ticket.release()
        (await other).release()

    asyncio.run(run())


def test_a_full_queue_turns_away_at_once() -> None:
    async def run() -> None:
        admission = Admission(lambda: Need(1, 100), 2, 60)
        ticket = await admission.admit(Need(1, 1))
        waiting = [await waiter(admission, Need(1, 1)) for _ in range(2)]
        for _ in range(3):
            with pytest.raises(NoRoomError) as caught:
                await admission.admit(Need(1, 1))
            assert not caught.value.waited
            with pytest.raises(NoRoomError):
                admission.check()
        waiting[0].cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        admission.check()
        ticket.release()
        (await waiting[1]).release()

    asyncio.run(run())


def test_a_wait_ends_at_its_deadline() -> None:
    async def run() -> None:
        admission = Admission(lambda: Need(1, 100), 2, 0.02)
        ticket = await admission.admit(Need(1, 1))
        with pytest.raises(NoRoomError) as caught:
            await admission.admit(Need(1, 1))
        assert caught.value.waited
        assert admission.waiting == 0
        ticket.release()
        (await admission.admit(Need(1, 1))).release()

    asyncio.run(run())


def test_who_would_wait_too_long_is_turned_away_at_once() -> None:
    async def run() -> None:
        clock = Clock()
        admission = Admission(lambda: Need(1, 100), 1000, 10, clock)
        ticket = await admission.admit(Need(1, 100))
        queue = [await waiter(admission, Need(1, 100)) for _ in range(30)]
        clock.seconds = 2.0  # 100 tokens in 2 s: 50 a second, and 29 requests still wait
        ticket.release()
        with pytest.raises(NoRoomError) as caught:
            await admission.admit(Need(1, 100))
        assert not caught.value.waited
        assert caught.value.retry_s == pytest.approx(29 * 100 / 50 - 10)
        for task in queue[5:]:
            task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        admission.check()
        (await waiter(admission, Need(1, 100))).cancel()
        for task in queue[:5]:
            task.cancel()

    asyncio.run(run())


def test_a_ticket_that_comes_as_the_client_leaves_is_not_lost() -> None:
    async def run() -> None:
        admission = Admission(lambda: Need(1, 100), 10, 60)
        ticket = await admission.admit(Need(1, 1))
        task = await waiter(admission, Need(1, 1))
        ticket.release()  # the waiter is let in, and has not run since
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert admission._taken == Need(0, 0)
        first = await waiter(admission, Need(1, 1))
        await asyncio.sleep(0)
        assert first.done()
        gone = await waiter(admission, Need(1, 1))
        stays = await waiter(admission, Need(1, 1))
        gone.cancel()
        await asyncio.sleep(0)
        assert not stays.done()

    asyncio.run(run())


def test_room_grows_with_the_workers() -> None:
    async def run() -> None:
        room = [Need(1, 100)]
        admission = Admission(lambda: room[0], 10, 60)
        first = await admission.admit(Need(1, 1))
        second = await waiter(admission, Need(1, 1))
        assert not second.done()
        room[0] = Need(3, 100)
        third = await waiter(admission, Need(1, 1))
        first.release()
        (await second).release()
        (await third).release()

    asyncio.run(run())
