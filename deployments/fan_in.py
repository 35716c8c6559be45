"""Several asynchronous iterators as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TypeVar

ItemT = TypeVar("ItemT")


async def fan_in(sources: Sequence[AsyncIterator[ItemT]]) -> AsyncGenerator[ItemT]:
    """Items of all sources in the order of their coming; the first error ends them all."""
    queue: asyncio.Queue[ItemT | BaseException | None] = asyncio.Queue()

    async def pump(source: AsyncIterator[ItemT]) -> None:
        try:
            async for item in source:
                queue.put_nowait(item)
            queue.put_nowait(None)
        except Exception as error:  # noqa: BLE001  # raised at the other end
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
