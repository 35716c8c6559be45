"""Answers that go on behind any event: the API around a real, tiny engine, without HTTP.

The tokenizer has a token for each byte, so that text at random is full of unfinished characters.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from pydantic import SecretStr
from starlette.responses import StreamingResponse
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from deployments.admission import Admission, Need
from deployments.api import CompletionApi
from deployments.checkpointing import Checkpointer
from deployments.client import WorkerClient
from deployments.config import LimitSettings, RecoverySettings
from deployments.engine_thread import EngineThread
from deployments.errors import ApiError, from_fault
from deployments.idempotency import Idempotency
from deployments.messages import Accepted, Fault, GenerateRequest, WorkerInfo
from deployments.recovery import Recovery
from deployments.security.guard import Caller
from deployments.tools.parser import FORMATS
from deployments.tools.transcript import Transcript
from prefix_cache.checkpoints.codec import CheckpointCodec
from prefix_cache.checkpoints.memory import MemoryCells
from prefix_cache.checkpoints.record import State
from prefix_cache.checkpoints.settings import CheckpointSettings
from prefix_cache.checkpoints.store import Save, SwappingStore
from prefix_cache.store import StoreOptions
from specdec.detokenize import text_decoder
from specdec.heads.drafter import NullDrafter
from specdec.outputs import RequestOutput
from tests.engines import tiny_engine
from tests.tiny_models import tiny_model

BYTES = 256
SOON = 10.0
ME = Caller(None, b"me")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {sign: i for i, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer


class LocalStream:
    """Stands for a stream from a worker in another process."""

    def __init__(self, thread: EngineThread, request: GenerateRequest) -> None:
        self._name = request.request_id
        self._events = thread.generate(request)
        self._closing: asyncio.Task[None] | None = None

    async def accepted(self) -> None:
        while not isinstance(event := await anext(self._events), Accepted):
            if isinstance(event, Fault):
                raise from_fault(event, self._name, 1)

    async def outputs(self) -> AsyncGenerator[RequestOutput]:
        async for event in self._events:
            if isinstance(event, Fault):
                raise from_fault(event, self._name, 1)
            if isinstance(event, RequestOutput):
                yield event

    def close(self) -> None:
        async def end() -> None:
            await self._events.aclose()

        self._closing = asyncio.create_task(end())


@dataclass
class World:
    """A gateway, a worker and a store in one process."""

    api: CompletionApi
    thread: EngineThread
    checkpoints: Checkpointer
    store: SwappingStore

    def start(self, request: GenerateRequest) -> LocalStream:
        return LocalStream(self.thread, request)


def in_world(body: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    tokenizer = byte_tokenizer()
    engine = tiny_engine(tiny_model("llama", vocab_size=BYTES), NullDrafter())
    engine._decode = text_decoder(tokenizer)
    thread = EngineThread(engine, 60)
    store = SwappingStore(
        MemoryCells(StoreOptions("ckpt", 600, 2**26)), CheckpointCodec(2**20), 600
    )
    settings = RecoverySettings(
        store=CheckpointSettings(url=SecretStr("memory://")), every_rounds=3, every_tokens=5
    )
    checkpoints = Checkpointer(store, settings, "worker", thread.lose)
    thread.recorder = checkpoints

    async def run() -> None:
        world = World(cast(CompletionApi, None), thread, checkpoints, store)
        world.api = CompletionApi(
            cast(WorkerClient, world),
            tokenizer,
            WorkerInfo(512, frozenset(), BYTES, 4096),
            LimitSettings(),
            "tiny",
            "fp",
            Admission(lambda: Need(64, 100_000), 64, 10.0),
            1,
            Transcript(tokenizer, False),
            FORMATS["hermes"],
            Recovery(store, settings, "tiny float32", 1),
        )
        await body(world)

    try:
        asyncio.run(asyncio.wait_for(run(), 120))
    finally:
        thread.close()
        checkpoints.close()


@dataclass
class Seen:
    """Events of a stream."""

    ids: list[str]
    chunks: list[dict[str, Any]]

    def text(self, first: int = 0, choice: int = 0) -> str:
        found = [c for chunk in self.chunks[first:] for c in chunk["choices"]]
        return "".join(
            c["text"] if "text" in c else c["delta"].get("content") or ""
            for c in found
            if c["index"] == choice
        )


async def read(response: Any, most: int | None = None) -> Seen:
    assert isinstance(response, StreamingResponse)
    seen = Seen([], [])
    events = cast("AsyncGenerator[bytes]", response.body_iterator)
    async with aclosing(events):
        async for event in events:
            lines = event.decode().strip().split("\n")
            if lines == ["data: [DONE]"]:
                break
            assert len(lines) == 2, lines
            seen.ids.append(lines[0].removeprefix("id: "))
            seen.chunks.append(json.loads(lines[1].removeprefix("data: ")))
            if len(seen.chunks) == most:
                break
    await response._on_close()  # type: ignore[attr-defined]
    return seen


CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "é and more"}],
    "temperature": 1,
    "seed": 3,
    "max_tokens": 30,
    "stream": True,
    "stream_options": {"include_usage": True},
}
TEXT = {key: value for key, value in CHAT.items() if key != "messages"} | {"prompt": "ab€"}


def endpoint(world: World, body: dict[str, Any]) -> Coroutine[Any, Any, Any]:
    return world.api.chat(body, ME) if "messages" in body else world.api.complete(body, ME)


@pytest.mark.parametrize(
    "body",
    [
        CHAT,
        TEXT | {"prompt": ["a", "b", "a"], "n": 2, "max_tokens": 8},
        CHAT | {"stop": ["ab", "\n\n"], "logit_bias": {"66": 30, "65": 30}, "temperature": 2},
        TEXT | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
    ids=["chat", "six", "stops", "usage"],
)
def test_behind_every_event_the_rest_is_exact(body: dict[str, Any]) -> None:
    async def run(world: World) -> None:
        whole = await read(await endpoint(world, body))
        assert world.checkpoints.flush(SOON)
        assert len(set(whole.ids)) == len(whole.ids)
        choices = {c["index"] for chunk in whole.chunks for c in chunk["choices"]}
        for number, name in enumerate(whole.ids):
            rest = await read(await world.api.resume(name, ME))
            for choice in choices:
                assert rest.text(choice=choice) == whole.text(number + 1, choice)
            ended = [c["finish_reason"] for x in rest.chunks for c in x["choices"]]
            told = [c["finish_reason"] for x in whole.chunks[number + 1 :] for c in x["choices"]]
            assert sorted(filter(None, ended)) == sorted(filter(None, told))
            if rest.chunks:
                assert rest.chunks[-1]["usage"] == whole.chunks[-1]["usage"]
                assert {x["id"] for x in rest.chunks} == {whole.chunks[0]["id"]}

    in_world(run)


@pytest.mark.parametrize("body", [CHAT, TEXT], ids=["chat", "text"])
def test_whatever_the_checkpoint_holds_the_rest_is_exact(body: dict[str, Any]) -> None:
    """Less than the client has, as much, or more: as a late write, or a lost one, leaves it."""

    async def run(world: World) -> None:
        whole = await read(await endpoint(world, body))
        assert world.checkpoints.flush(SOON)
        name = f"{whole.chunks[0]['id']}-0"
        found = world.store.get(name, SOON)
        assert found is not None
        full, fence = found.checkpoint, found.checkpoint.fence
        usage = whole.chunks[-1]["usage"]
        for kept in (0, 17, 29):
            for number in (0, len(whole.ids) // 2, len(whole.ids) - 3):
                fence += 2**17
                cut = replace(
                    full, emitted=full.emitted[:kept], finished=False, progress=b"", fence=fence
                )
                assert world.store.save([Save(cut, 0)], SOON) == [True]
                rest = await read(await world.api.resume(whole.ids[number], ME))
                assert rest.text() == whole.text(number + 1)
                assert rest.chunks[-1]["usage"]["completion_tokens"] == usage["completion_tokens"]
                assert world.checkpoints.flush(SOON)
                ended = world.store.get(name, SOON)
                assert ended is not None
                assert (ended.checkpoint.finished, ended.checkpoint.emitted) == (True, full.emitted)

    in_world(run)


def test_tokens_that_differ_are_an_error_and_no_patchwork() -> None:
    async def run(world: World) -> None:
        whole = await read(await endpoint(world, TEXT))
        assert world.checkpoints.flush(SOON)
        found = world.store.get(f"{whole.chunks[0]['id']}-0", SOON)
        assert found is not None
        other = replace(found.checkpoint, emitted=(1,) * len(found.checkpoint.emitted))
        assert world.store.save([Save(other, 0)], SOON) == [True]
        response: Any = await world.api.resume(whole.ids[10], ME)
        events = [event async for event in response.body_iterator]
        await response._on_close()
        (event,) = events
        assert json.loads(event.decode().removeprefix("data: "))["error"]["code"] == (
            "answer_differs"
        )

    in_world(run)


def test_who_comes_back_takes_the_answer_over() -> None:
    async def run(world: World) -> None:
        body = TEXT | {"max_tokens": 200}
        whole = await read(await endpoint(world, body))
        old: Any = await endpoint(world, body)
        events = old.body_iterator
        first = [await anext(events) for _ in range(3)]
        last = first[-1].decode().split("\n")[0].removeprefix("id: ")
        rest = await read(await world.api.resume(last, ME))
        assert rest.text() == whole.text(3)
        remaining = [event async for event in events]
        await old._on_close()
        assert b"[DONE]" in remaining[-1] or b"answer_taken_over" in remaining[-1]
        for caller in (Caller(None, b"other"), Caller(None, b"")):
            with pytest.raises(ApiError) as caught:
                await world.api.resume(last, caller)
            assert caught.value.status == 404

    in_world(run)


def test_a_client_that_left_leaves_nothing_behind_but_its_checkpoint() -> None:
    async def run(world: World) -> None:
        body = CHAT | {"max_tokens": 200}
        whole = await read(await endpoint(world, body))
        begun = await read(await endpoint(world, body), most=5)
        while await world.thread.call(lambda engine, _: engine.has_work):
            await asyncio.sleep(0.01)
        assert await world.thread.call(lambda engine, _: engine.pages_in_use) == 0
        while any(one.leased for one in world.store.list(10, SOON)):
            await asyncio.sleep(0.01)
        rest = await read(await world.api.resume(begun.ids[-1], ME))
        assert begun.text() + rest.text() == whole.text()
        assert world.checkpoints.flush(SOON)
        assert {one.state for one in world.store.list(10, SOON)} == {State.FINISHED}

    in_world(run)


def test_a_key_answers_once() -> None:
    async def run(world: World) -> None:
        body = {k: v for k, v in TEXT.items() if k not in ("stream", "stream_options", "seed")}
        once = Idempotency("key", "digest")
        first = await world.api.complete(body, ME, once)
        assert world.checkpoints.flush(SOON)
        again = await world.api.complete(body, ME, once)
        assert json.loads(bytes(first.body)) == json.loads(bytes(again.body))
        with pytest.raises(ApiError) as caught:
            await world.api.complete(body, ME, Idempotency("key", "another"))
        assert (caught.value.status, caught.value.code) == (422, "idempotency_key_reused")
        other = await world.api.complete(body, Caller(None, b"other"), once)
        assert json.loads(bytes(other.body))["id"] != json.loads(bytes(first.body))["id"]

    in_world(run)


def test_a_key_in_use_is_a_conflict_and_one_that_was_left_goes_on() -> None:
    async def run(world: World) -> None:
        body, once = TEXT | {"max_tokens": 200}, Idempotency("key", "digest")
        response: Any = await world.api.complete(body, ME, once)
        events = response.body_iterator
        begun = await anext(events)
        with pytest.raises(ApiError) as caught:
            await world.api.complete(body, ME, once)
        assert (caught.value.status, caught.value.code) == (409, "idempotency_in_progress")
        await events.aclose()
        await response._on_close()
        while any(one.leased for one in world.store.list(10, SOON)):
            await asyncio.sleep(0.01)
        again = await read(await world.api.complete(body, ME, once))
        whole = await read(await endpoint(world, body))
        assert again.text() == whole.text()
        assert json.loads(begun.decode().split("data: ")[1])["id"] == again.chunks[0]["id"]

    in_world(run)


def test_a_refused_request_leaves_its_key_free() -> None:
    async def run(world: World) -> None:
        once = Idempotency("key", "digest")
        long = TEXT | {"prompt": "x" * 509, "max_tokens": 3, "stop": ["y"], "stream": False}
        del long["stream_options"]
        with pytest.raises(ApiError):
            await world.api.complete(long | {"logit_bias": {"999": 1}}, ME, once)
        assert (await world.api.complete(long, ME, once)).status_code == 200

    in_world(run)
