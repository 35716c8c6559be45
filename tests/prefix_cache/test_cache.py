from __future__ import annotations

import threading
from pathlib import Path

import pytest

from prefix_cache.cache import PrefixCache
from prefix_cache.codec import BlockCodec
from prefix_cache.errors import StoreConfigError
from prefix_cache.keys import block_keys
from prefix_cache.settings import PrefixCacheSettings
from prefix_cache.writer import Block
from tests.prefix_cache.caches import (
    BLOCK,
    IDENTITY,
    SIZE,
    Prompt,
    TestStore,
    cache_on,
    stored,
)

CODEC = BlockCodec(IDENTITY.digest(), SIZE)
SOON = 10.0


def test_what_was_saved_is_loaded(any_url: str, tmp_path: Path) -> None:
    settings = PrefixCacheSettings.model_validate({"url": any_url, "namespace": tmp_path.name})
    prompt = Prompt(1)
    cache = PrefixCache.open(settings, IDENTITY, SIZE, 4)
    try:
        assert cache.load(prompt.keys, prompt.tokens) == []
        stored(cache, prompt)
        assert cache.load(prompt.keys, prompt.tokens) == prompt.payloads
        stats = cache.stats()
    finally:
        cache.close()
    assert (stats.hits, stats.misses, stats.written, stats.dropped) == (5, 5, 5, 0)
    assert stats.bytes_read == stats.bytes_written >= 5 * SIZE
    assert stats.read.count == 2
    assert stats.write.count == 1
    assert 0 < stats.read.max_s <= stats.read.total_s
    assert stats.queue_bytes == 0
    assert stats.errors == {}
    assert stats.rejected == {}


def test_only_the_unbroken_run_from_the_first_block_is_returned() -> None:
    prompt = Prompt(1)
    with cache_on(TestStore()) as cache:
        cache.save([block for index, block in enumerate(prompt.blocks()) if index != 2])
        assert cache.flush(SOON)
        assert cache.load(prompt.keys, prompt.tokens) == prompt.payloads[:2]
        assert cache.load(prompt.keys[:1], prompt.tokens[:1]) == prompt.payloads[:1]
        assert cache.load([], []) == []
        assert (cache.stats().hits, cache.stats().misses) == (3, 3)
        with pytest.raises(ValueError, match="5 keys for 4 blocks"):
            cache.load(prompt.keys, prompt.tokens[:4])


def test_a_long_prompt_is_read_in_chunks_and_no_further_than_it_is_stored() -> None:
    store, big = TestStore(), 5 * 2**20
    codec = BlockCodec(IDENTITY.digest(), big)
    prompt = Prompt(1, blocks=6)
    with cache_on(store, codec=codec) as cache:
        cache.save(
            [Block(k, t, bytes(big)) for k, t in zip(prompt.keys[:2], prompt.tokens, strict=False)]
        )
        assert cache.flush(SOON)
        store.calls.clear()
        assert len(cache.load(prompt.keys, prompt.tokens)) == 2
        assert [call for call in store.calls if call == "get"] == ["get"] * 3


def test_what_is_stored_is_not_written_again() -> None:
    store, prompt = TestStore(), Prompt(1)
    with cache_on(store) as cache:
        stored(cache, prompt)
        calls = list(store.calls)
        stored(cache, prompt)
        assert store.calls == calls
    with cache_on(store := TestStore()) as first, cache_on(store) as second:
        stored(first, prompt)
        stored(second, prompt)  # knows only by asking
        assert store.calls == ["has", "put", "has"]


def test_what_the_store_has_lost_is_written_again() -> None:
    store, prompt = TestStore(), Prompt(1)
    with cache_on(store) as cache:
        stored(cache, prompt)
        store.purge(SOON)
        stored(cache, prompt)
        assert cache.load(prompt.keys, prompt.tokens) == []
        stored(cache, prompt)
        assert cache.load(prompt.keys, prompt.tokens) == prompt.payloads


def test_blocks_that_wait_are_not_queued_twice() -> None:
    store, prompt = TestStore(), Prompt(1)
    with cache_on(store) as cache:
        store.open.clear()
        for _ in range(3):
            cache.save(prompt.blocks())
        assert cache.stats().queue_bytes == 5 * SIZE
        store.open.set()


def test_hits_live_on_and_the_store_is_told_seldom() -> None:
    store, prompt = TestStore(), Prompt(1)
    with cache_on(store) as cache:
        stored(cache, prompt)
        for _ in range(10):
            cache.load(prompt.keys, prompt.tokens)
            assert cache.flush(SOON)
        assert store.calls.count("touch") == 1


def test_close_stores_what_waits_and_later_calls_are_harmless() -> None:
    store, prompt = TestStore(), Prompt(1)
    cache = PrefixCache(store, CODEC, PrefixCacheSettings())
    cache.save(prompt.blocks())
    cache.close(SOON)
    assert cache.stats().written == 5
    cache.save(Prompt(2).blocks())
    assert cache.load(prompt.keys, prompt.tokens) == []
    assert cache.stats().dropped == 5
    assert cache.flush(SOON)
    cache.close()


def test_threads_share_a_cache() -> None:
    prompts = [Prompt(seed) for seed in range(6)]
    wrong: list[int] = []
    with cache_on(TestStore()) as cache:

        def work(thread: int) -> None:
            for turn in range(60):
                prompt = prompts[(thread + turn) % len(prompts)]
                got = cache.load(prompt.keys, prompt.tokens)
                if got != prompt.payloads[: len(got)]:
                    wrong.append(turn)
                cache.save(prompt.blocks()[len(got) :])

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert cache.flush(SOON)
        stats = cache.stats()
    assert wrong == []
    assert stats.hits + stats.misses == 8 * 60 * 5
    assert stats.written >= 30


@pytest.mark.parametrize(
    "bad",
    [
        Block(b"short", [1] * BLOCK, bytes(SIZE)),
        Block(b"k" * 32, [1] * BLOCK, bytes(SIZE - 1)),
        Block(b"k" * 32, [-1] * BLOCK, bytes(SIZE)),
    ],
)
def test_a_block_of_the_wrong_size_is_refused_at_once(bad: Block) -> None:
    with cache_on(TestStore()) as cache:
        with pytest.raises(ValueError, match=r"wanted|token"):
            cache.save([bad])
        stored(cache, Prompt(1))


def test_tenants_share_nothing_but_the_system_prompt() -> None:
    tokens = list(range(5 * BLOCK))
    blocks = [tokens[start : start + BLOCK] for start in range(0, len(tokens), BLOCK)]
    keys = {tenant: block_keys(IDENTITY, tokens, 2 * BLOCK + 1, tenant) for tenant in (b"a", b"b")}
    with cache_on(TestStore()) as cache:
        cache.save([Block(k, t, bytes(SIZE)) for k, t in zip(keys[b"a"], blocks, strict=True)])
        assert cache.flush(SOON)
        assert len(cache.load(keys[b"a"], blocks)) == 5
        assert len(cache.load(keys[b"b"], blocks)) == 2


def test_a_wrong_url_is_an_error_at_start_up() -> None:
    settings = PrefixCacheSettings.model_validate({"url": "redis://:hunter2@host:port"})
    with pytest.raises(StoreConfigError, match="port"):
        PrefixCache.open(settings, IDENTITY, SIZE, 4)
