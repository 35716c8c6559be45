"""What a worker writes of its requests: a tiny real engine, its thread, and a store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from pydantic import SecretStr

from deployments.checkpointing import Checkpointer
from deployments.config import RecoverySettings
from deployments.engine_thread import EngineThread
from deployments.messages import Event, Fault, GenerateRequest, Ticket
from deployments.progress import Progress
from prefix_cache.checkpoints.codec import CheckpointCodec
from prefix_cache.checkpoints.memory import MemoryCells
from prefix_cache.checkpoints.record import FIRST_FENCE, Checkpoint
from prefix_cache.checkpoints.settings import CheckpointSettings
from prefix_cache.checkpoints.store import Save, SwappingStore
from prefix_cache.errors import StoreError, StoreFault
from prefix_cache.store import StoreOptions
from specdec.heads.drafter import NullDrafter
from specdec.outputs import RequestOutput
from specdec.params import SamplingParams
from tests.engines import tiny_engine, tokens_of
from tests.tiny_models import tiny_model

ResultT = TypeVar("ResultT")
SOON = 10.0


class FailingStore(SwappingStore):
    """In memory; fails where it is told to."""

    def __init__(self) -> None:
        cells = MemoryCells(StoreOptions("ckpt", 600, 2**24))
        super().__init__(cells, CheckpointCodec(20_000), 600)
        self.fails = False
        self.saved: list[int] = []

    def save(self, saves: Sequence[Save], deadline_s: float) -> list[bool]:
        if self.fails:
            raise StoreError(StoreFault.UNAVAILABLE, "as told")
        self.saved += [len(save.checkpoint.emitted) for save in saves]
        return super().save(saves, deadline_s)


def request(name: str, count: int = 40, attempt: int = 0, **changes: Any) -> GenerateRequest:
    ticket = Ticket(FIRST_FENCE, b"request", b"answer")
    params = SamplingParams(max_tokens=count)
    return GenerateRequest(name, (1, 2, 3), params, attempt=attempt, ticket=ticket, **changes)


def with_store(
    body: Callable[[EngineThread, Checkpointer, FailingStore], Coroutine[Any, Any, ResultT]],
    every_rounds: int = 4,
    every_tokens: int = 1000,
    lease_s: float = 30.0,
) -> ResultT:
    store = FailingStore()
    settings = RecoverySettings(
        store=CheckpointSettings(url=SecretStr("memory://"), lease_s=lease_s),
        every_rounds=every_rounds,
        every_tokens=every_tokens,
    )
    thread = EngineThread(tiny_engine(tiny_model("llama"), NullDrafter()), 60)
    checkpoints = Checkpointer(store, settings, "me", thread.lose)
    thread.recorder = checkpoints
    try:
        return asyncio.run(asyncio.wait_for(body(thread, checkpoints, store), 60))
    finally:
        thread.close()
        checkpoints.close()


async def all_outputs(events: AsyncGenerator[Event]) -> list[RequestOutput]:
    return [event async for event in events if isinstance(event, RequestOutput)]


def stored(store: SwappingStore, name: str) -> Checkpoint:
    found = store.get(name, SOON)
    assert found is not None
    return found.checkpoint


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


def test_a_finished_request_is_kept_whole() -> None:
    async def body(thread: EngineThread, checkpoints: Checkpointer, store: FailingStore) -> None:
        outputs = await all_outputs(thread.generate(request("r")))
        assert checkpoints.flush(SOON)
        kept = stored(store, "r")
        assert list(kept.emitted) == tokens_of(outputs)
        assert (kept.finished, kept.owner, kept.fence) == (True, "me", FIRST_FENCE)
        assert (kept.request, kept.answer) == (b"request", b"answer")
        progress = Progress.decode(kept.progress)
        assert progress.finish_reason == outputs[-1].finish_reason
        assert progress.drafted == outputs[-1].drafted

    with_store(body)


def test_checkpoints_come_in_time_and_grow() -> None:
    async def body(thread: EngineThread, checkpoints: Checkpointer, store: FailingStore) -> None:
        async with aclosing(thread.generate(request("r", 400))) as events:
            count = 0
            async for event in events:
                if isinstance(event, RequestOutput):
                    count += len(event.new_tokens)
                if count >= 60:
                    break
            await until(lambda: bool(store.saved) and store.saved[-1] >= count - 16)
            running = store.get("r", SOON)
            assert running is not None
            assert not running.checkpoint.finished
            assert running.lease_left_s > 20
        assert store.saved == sorted(store.saved)

    with_store(body)


def test_what_a_client_leaves_is_kept_and_free_to_be_claimed() -> None:
    async def body(thread: EngineThread, checkpoints: Checkpointer, store: FailingStore) -> None:
        got: list[int] = []
        async with aclosing(thread.generate(request("r", 400))) as events:
            async for event in events:
                if isinstance(event, RequestOutput):
                    got += event.new_tokens
                if len(got) >= 10:
                    break

        def let_go() -> bool:
            found = store.get("r", SOON)
            return found is not None and found.lease_left_s == 0

        await until(let_go)
        claimed = store.claim("r", "another", 30, SOON)
        assert claimed is not None
        assert list(claimed.emitted[: len(got)]) == got
        again = replace(
            request("r", 400),
            prior_tokens=tuple(claimed.emitted),
            ticket=Ticket(claimed.fence, b"request", b"answer"),
        )
        rest = await all_outputs(thread.generate(again))
        assert len(claimed.emitted) + len(tokens_of(rest)) == 400

    with_store(body)


def test_who_was_superseded_stops_and_writes_nothing() -> None:
    async def body(thread: EngineThread, checkpoints: Checkpointer, store: FailingStore) -> None:
        async with aclosing(thread.generate(request("r", 450))) as events:
            await anext(events)
            await until(lambda: bool(store.saved))
            claimed = store.claim("r", "another", 30, SOON, supersede=FIRST_FENCE)
            assert claimed is not None
            rest = [event async for event in events]
        assert isinstance(rest[-1], Fault)
        assert rest[-1].kind == "superseded"
        assert not await thread.call(lambda engine, _: engine.has_work)
        assert checkpoints.flush(SOON)
        kept = stored(store, "r")
        assert (kept.fence, kept.emitted) == (claimed.fence, claimed.emitted)

    with_store(body, every_rounds=1)


def test_of_two_attempts_the_later_one_counts() -> None:
    async def body(thread: EngineThread, checkpoints: Checkpointer, store: FailingStore) -> None:
        first = asyncio.create_task(all_outputs(thread.generate(request("r", 450))))
        await until(lambda: bool(store.saved))
        later = await all_outputs(thread.generate(request("r", 50, attempt=1)))
        await first
        assert checkpoints.flush(SOON)
        kept = stored(store, "r")
        assert (kept.fence, kept.finished) == (FIRST_FENCE + 1, True)
        assert list(kept.emitted) == tokens_of(later)

    with_store(body, every_rounds=1)


def test_a_request_that_waits_keeps_its_lease() -> None:
    async def body(thread: EngineThread, checkpoints: Checkpointer, store: FailingStore) -> None:
        checkpoints.begin(request("waits"))  # the engine does not get to it
        await until(lambda: store.get("waits", SOON) is not None)
        await asyncio.sleep(1.0)
        found = store.get("waits", SOON)
        assert found is not None
        assert found.lease_left_s > 0

    with_store(body, lease_s=0.6)


@pytest.mark.parametrize("fails", [True, False])
def test_the_store_harms_no_request(fails: bool) -> None:
    async def body(thread: EngineThread, checkpoints: Checkpointer, store: FailingStore) -> None:
        store.fails = fails
        expected = await all_outputs(thread.generate(request("r", 60)))
        assert len(tokens_of(expected)) == 60
        # too many bytes for a checkpoint: it has none, and goes on
        large = request("large", 60)
        ticket = Ticket(FIRST_FENCE, b"", bytes(30_000))
        outputs = await all_outputs(
            thread.generate(GenerateRequest("large", (1, 2, 3), large.params, ticket=ticket))
        )
        assert tokens_of(outputs) == tokens_of(expected)
        await until(lambda: checkpoints.flush(0))
        assert (store.get("r", SOON) is None) == fails
        assert store.get("large", SOON) is None
        store.fails = False
        await all_outputs(thread.generate(request("later")))
        assert checkpoints.flush(SOON)
        assert stored(store, "later").finished

    with_store(body)


def test_a_request_without_a_ticket_is_nobodys_business() -> None:
    async def body(thread: EngineThread, checkpoints: Checkpointer, store: FailingStore) -> None:
        plain = GenerateRequest("r", (1, 2, 3), SamplingParams(max_tokens=20))
        assert len(tokens_of(await all_outputs(thread.generate(plain)))) == 20
        assert checkpoints.flush(SOON)
        assert store.saved == []

    with_store(body, every_rounds=1)


def test_a_closing_worker_lets_go() -> None:
    kept: list[FailingStore] = []

    async def body(thread: EngineThread, checkpoints: Checkpointer, store: FailingStore) -> None:
        kept.append(store)
        task = asyncio.create_task(all_outputs(thread.generate(request("r", 450))))
        await until(lambda: bool(store.saved))
        await asyncio.to_thread(thread.close)
        await task
        assert checkpoints.flush(SOON)
        claimed = store.claim("r", "another", 30, SOON)
        assert claimed is not None
        assert claimed.emitted

    with_store(body)
