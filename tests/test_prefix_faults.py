"""A store that fails: it costs a request time, and nobody an answer; float32.

What these catch: a block of other tokens or of a failed request that was believed, a fault of the
store that reaches a request, a request that waits for its blocks for ever.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import redis
import torch

from bench.reference import generate_greedy
from bench.valkey import Valkey
from tests.engines import (
    ALL,
    answer,
    answer_all,
    fail,
)
from tests.prefix_cache.servers import Proxy
from tests.prefix_engines import (
    DEADLINE_S,
    GREEDY,
    NEW_TOKENS,
    PAGE,
    engine_for,
    settings_for,
    settle,
    stats_of,
    text,
)
from tests.tiny_models import tiny_model


def spoil(values: dict[bytes, bytes], how: str) -> dict[bytes, bytes]:
    """Every stored value made wrong in one way."""
    if how == "swapped":
        found = list(values.values())
        return dict(zip(values, found[1:] + found[:1], strict=True))
    change: dict[str, Callable[[bytes], bytes]] = {
        "flipped": lambda value: value[:-40] + bytes([value[-40] ^ 1]) + value[-39:],
        "cut": lambda value: value[: len(value) // 2],
        "empty": lambda _: b"",
    }
    return {key: change[how](value) for key, value in values.items()}


@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "swapped"])
def test_spoiled_blocks_are_misses_and_mended(how: str, valkey: Valkey) -> None:
    model = tiny_model("llama", seed=5)
    prompt = text(1, 6 * PAGE)
    expected = generate_greedy(model, prompt, NEW_TOKENS)
    with closing(engine_for(model, valkey.url)) as engine:
        answer(engine, prompt, GREEDY)
        settle(engine)
    with closing(redis.Redis(port=valkey.port)) as raw:
        values = {key: raw.get(key) for key in raw.scan_iter()}
        assert len(values) >= 6
        for key, value in spoil(values, how).items():  # type: ignore[arg-type]
            raw.set(key, value)
    with closing(engine_for(model, valkey.url)) as engine:
        got, stats = answer(engine, prompt, GREEDY)
        assert got == expected
        assert stats.cached_tokens == 0
        assert sum(stats_of(engine).rejected.values()) == 1
        settle(engine)
    with closing(engine_for(model, valkey.url)) as engine:
        got, stats = answer(engine, prompt, GREEDY)
        assert got == expected
        assert stats.cached_tokens > 0  # the first block is good again


def test_a_store_that_stands_still_costs_its_deadline(valkey: Valkey) -> None:
    """The running batch does not wait, the request that asked waits no longer than that."""
    model = tiny_model("llama", seed=5)
    prompts = [text(i, 3 * PAGE) for i in range(4)]
    expected = [generate_greedy(model, prompt, NEW_TOKENS) for prompt in prompts]
    with closing(engine_for(model, valkey.url)) as engine:
        answer(engine, prompts[0], GREEDY)  # connections are there
        settle(engine)
        valkey.signal(signal.SIGSTOP)
        try:
            for prompt, tokens in zip(prompts[1:], expected[1:], strict=True):
                started = time.monotonic()
                got, stats = answer(engine, prompt, GREEDY)
                assert got == tokens
                assert stats.cached_tokens == 0
                assert time.monotonic() - started < DEADLINE_S + 1.0
            assert stats_of(engine).breaker == "open"
        finally:
            valkey.signal(signal.SIGCONT)


def test_a_store_that_is_slow_is_still_of_use(valkey: Valkey) -> None:
    """Each reply 50 ms late, within the deadline."""
    model = tiny_model("llama", seed=5)
    prompt = text(1, 12 * PAGE)
    expected = generate_greedy(model, prompt, NEW_TOKENS)
    with closing(engine_for(model, valkey.url)) as engine:
        answer(engine, prompt, GREEDY)
        settle(engine)
    proxy = Proxy(valkey.port, reply_delay_s=0.05)
    try:
        with closing(engine_for(model, f"redis://127.0.0.1:{proxy.port}")) as engine:
            started = time.monotonic()
            got, stats = answer(engine, prompt, GREEDY)
            assert time.monotonic() - started > 0.05
    finally:
        proxy.stop()
    assert got == expected
    assert stats.loaded_tokens == 11 * PAGE


def test_a_store_that_is_killed_and_comes_back(valkey: Valkey) -> None:
    model = tiny_model("llama", seed=5)
    prompts = [text(i, 3 * PAGE) for i in range(30)]
    expected = [generate_greedy(model, prompt, NEW_TOKENS) for prompt in prompts]
    with closing(engine_for(model, valkey.url)) as engine:
        for i, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True)):
            if i == 3:
                valkey.stop()
            if i == 12:
                valkey.start()
                time.sleep(1.2)  # the breaker's first back-off
            assert answer(engine, prompt, GREEDY)[0] == tokens
        settle(engine)
        counted = stats_of(engine)
        assert counted.breaker == "closed"
        assert sum(counted.errors.values()) >= 2
        engine.scheduler.allocator.clear()
        assert answer(engine, prompts[-1], GREEDY)[1].cached_tokens == 2 * PAGE


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1", "lmdb:///proc/nowhere"])
def test_a_store_that_was_never_there(url: str) -> None:
    model = tiny_model("llama", seed=5)
    prompt = text(1, 3 * PAGE)
    expected = generate_greedy(model, prompt, NEW_TOKENS)
    with closing(engine_for(model, url)) as engine:
        for found in (0, 2 * PAGE):
            got, stats = answer(engine, prompt, GREEDY)
            assert got == expected
            assert stats.cached_tokens == found
            assert stats.loaded_tokens == 0


def test_others_run_while_one_waits(valkey: Valkey) -> None:
    model = tiny_model("llama", seed=5)
    slow, fast = text(1, 3 * PAGE), text(2, 2)  # too short to ask for anything
    with closing(engine_for(model, valkey.url)) as engine:
        valkey.signal(signal.SIGSTOP)
        try:
            engine.add_request("slow", slow, GREEDY)
            engine.add_request("fast", fast, GREEDY)
            ended: list[str] = []
            while engine.has_work:
                ended += [o.request_id for o in engine.step() if o.finished]
                engine.check_integrity()
        finally:
            valkey.signal(signal.SIGCONT)
    assert ended == ["fast", "slow"]


def test_those_that_leave_while_they_wait(valkey: Valkey) -> None:
    """Before their reading began, and in the midst of it: nobody waits for them."""
    model = tiny_model("llama", seed=5)
    prompt = text(1, 3 * PAGE)
    expected = generate_greedy(model, prompt, NEW_TOKENS)
    with closing(engine_for(model, valkey.url)) as engine:
        answer(engine, prompt, GREEDY)
        settle(engine)
        engine.scheduler.allocator.clear()
        valkey.signal(signal.SIGSTOP)
        try:
            for number in range(40):
                engine.add_request(str(number), prompt, GREEDY)
                if number % 4 == 0:
                    engine.step()  # its reading begins
                assert engine.abort(str(number))
                assert [output.finish_reason for output in engine.step()] == ["abort"]
                assert not engine.has_work
        finally:
            valkey.signal(signal.SIGCONT)
        time.sleep(1.2)  # the breaker's back-off
        started = time.monotonic()
        got, stats = answer(engine, prompt, GREEDY)
        assert time.monotonic() - started < 1
        assert got == expected
        assert stats.cached_tokens == 2 * PAGE
        engine.check_integrity()


def test_many_that_wait_wait_together(valkey: Valkey) -> None:
    """A store that does not answer costs each of them one deadline, or two at most."""
    model = tiny_model("llama", seed=5)
    prompts = [text(i, 3 * PAGE) for i in range(30)]
    with closing(engine_for(model, valkey.url)) as engine:
        valkey.signal(signal.SIGSTOP)
        try:
            started = time.monotonic()
            answer_all(engine, [(prompt, replace(GREEDY, max_tokens=1), ALL) for prompt in prompts])
            assert time.monotonic() - started < 2 * DEADLINE_S + 1.5
        finally:
            valkey.signal(signal.SIGCONT)


def test_what_the_pool_serves_lives_on_in_the_store(tmp_path: Path) -> None:
    url = f"lmdb://{tmp_path}/blocks"
    model = tiny_model("llama", seed=5)
    prompt = text(1, 6 * PAGE)
    short = settings_for(url).model_copy(update={"ttl_s": 2.0})
    with closing(engine_for(model, short)) as engine:
        for _ in range(8):
            answer(engine, prompt, GREEDY)
            time.sleep(0.4)
        settle(engine)
    with closing(engine_for(model, short)) as engine:
        assert answer(engine, prompt, GREEDY)[1].loaded_tokens == 5 * PAGE


def test_a_failed_requests_blocks_do_not_come_back(
    valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama", seed=5)
    prompt = text(1, 5 * PAGE)
    with closing(engine_for(model, valkey.url)) as engine:
        answer(engine, prompt, GREEDY)
        settle(engine)
        fail(engine, prompt, monkeypatch)
        got, stats = answer(engine, prompt, GREEDY)
        assert got == generate_greedy(model, prompt, NEW_TOKENS)
        assert stats.cached_tokens == 0
        settle(engine)
        engine.scheduler.allocator.clear()
        assert answer(engine, prompt, GREEDY)[1].loaded_tokens == 4 * PAGE  # written anew


def test_what_is_not_finite_is_not_loaded(valkey: Valkey) -> None:
    """Sound by its checksum, it would make every request fail that begins with it."""
    model = tiny_model("llama", seed=5)
    prompt = text(1, 5 * PAGE)
    with closing(engine_for(model, valkey.url)) as engine:
        read = engine.runner.pool.read_blocks

        def spoiled(pages: list[int]) -> list[memoryview | None]:
            blocks = read(pages)
            for block in blocks:
                assert block is not None
                block[:4] = b"\x00\x00\xc0\x7f"
            return blocks

        engine.runner.pool.read_blocks = spoiled  # type: ignore[method-assign,assignment]
        answer(engine, prompt, GREEDY)
        settle(engine)
    with closing(engine_for(model, valkey.url)) as engine:
        got, stats = answer(engine, prompt, GREEDY)
        assert got == generate_greedy(model, prompt, NEW_TOKENS)
        assert stats.cached_tokens == 0


def test_what_finds_no_room_is_counted(valkey: Valkey) -> None:
    model = tiny_model("llama", seed=5)
    few = settings_for(valkey.url)
    with closing(engine_for(model, few)) as engine:
        block = engine.runner.pool.block_bytes
    with closing(engine_for(model, few.model_copy(update={"queue_bytes": block}))) as engine:
        answer(engine, text(1, 5 * PAGE), replace(GREEDY, max_tokens=1))
        settle(engine)
        assert stats_of(engine).written == 1
        assert stats_of(engine).dropped == 4


def test_what_is_not_finite_is_not_stored(valkey: Valkey) -> None:
    """A fault of the device must not outlive it."""
    model = tiny_model("llama", seed=5)
    with closing(engine_for(model, valkey.url)) as engine:
        prompt = text(1, 4 * PAGE)
        engine.add_request("x", prompt, GREEDY)
        run = engine.runner.run

        def faulty(*args: object) -> object:
            output = run(*args)  # type: ignore[arg-type]
            page = engine.scheduler.running[0].lease.pages[1]  # type: ignore[union-attr]
            engine.runner.pool.values[0, page * PAGE] = torch.nan
            return output

        engine.runner.run = faulty  # type: ignore[method-assign,assignment]
        while engine.has_work:
            engine.step()
        settle(engine)
    with closing(engine_for(model, valkey.url)) as engine:
        got, stats = answer(engine, prompt, GREEDY)
        assert got == generate_greedy(model, prompt, NEW_TOKENS)
        assert stats.cached_tokens <= PAGE
