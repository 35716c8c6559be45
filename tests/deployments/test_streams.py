"""Merging of choices, and clean-up of event streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from deployments.fan_in import fan_in
from deployments.sse import EventStream, event


async def numbers(start: int, count: int, ended: list[int]) -> AsyncGenerator[int]:
    try:
        for number in range(start, start + count):
            await asyncio.sleep(0)
            yield number
    finally:
        ended.append(start)


async def failing() -> AsyncGenerator[int]:
    await asyncio.sleep(0.01)
    yield 1
    raise LookupError("gone")


def test_fan_in_has_all_items_in_the_order_of_each_source() -> None:
    async def run() -> list[int]:
        sources = [numbers(0, 5, []), numbers(100, 3, []), numbers(200, 0, [])]
        return [item async for item in fan_in(sources)]

    items = asyncio.run(run())
    assert sorted(items) == [0, 1, 2, 3, 4, 100, 101, 102]
    assert [i for i in items if i < 100] == [0, 1, 2, 3, 4]


def test_fan_in_ends_all_sources_with_an_error_or_an_early_leave() -> None:
    ended: list[int] = []

    async def fails() -> None:
        async with aclosing(fan_in([failing(), numbers(0, 10**9, ended)])) as items:
            async for _ in items:
                pass

    async def leaves() -> None:
        async with aclosing(fan_in([numbers(7, 10**9, ended)])) as items:
            await anext(items)

    with pytest.raises(LookupError):
        asyncio.run(fails())
    asyncio.run(leaves())
    assert ended == [0, 7]


@pytest.mark.parametrize("broken", [False, True])
def test_a_stream_is_closed_whether_or_not_it_began(broken: bool) -> None:
    closed = []

    async def events() -> AsyncGenerator[bytes]:
        yield b"data: 1\n\n"

    async def close() -> None:
        closed.append(True)

    async def receive() -> Message:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if broken:
            raise OSError("the client has left")

    async def run() -> None:
        stream = EventStream(events(), close)
        scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
        if not broken:
            await stream(scope, receive, send)
            return
        with pytest.raises(ClientDisconnect):
            await stream(scope, receive, send)

    asyncio.run(run())
    assert closed == [True]


def test_events_are_ascii_on_one_line() -> None:
    data = event({"text": "line\nbreak \u2028 \x85 é 日"})
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    assert data.isascii()
