"""A store that fails costs hits, and nothing else."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from bench.valkey import Valkey
from prefix_cache.breaker import BreakerState
from prefix_cache.cache import PrefixCache
from prefix_cache.codec import BlockCodec
from prefix_cache.errors import StoreFault
from prefix_cache.settings import PrefixCacheSettings
from prefix_cache.store import StoreStats
from tests.prefix_cache.caches import (
    IDENTITY,
    SIZE,
    Prompt,
    TestStore,
    cache_on,
    stored,
)

CODEC = BlockCodec(IDENTITY.digest(), SIZE)
SOON = 10.0


def test_a_failed_write_is_no_hit_and_is_tried_again_with_the_next() -> None:
    store, prompt = TestStore(), Prompt(1)
    with cache_on(store) as cache:
        store.full = True
        stored(cache, prompt)
        stats = cache.stats()
        assert (stats.written, stats.dropped) == (0, 5)
        assert stats.errors == {StoreFault.FULL: 1}
        assert cache.load(prompt.keys, prompt.tokens) == []
        store.full = False
        stored(cache, prompt)
        assert cache.load(prompt.keys, prompt.tokens) == prompt.payloads


def test_what_the_store_holds_is_told_where_it_can_be_asked() -> None:
    store = TestStore()
    with cache_on(store) as cache:
        stored(cache, Prompt(1))
        held = cache.store_stats()
        assert held.entries == 5
        assert held.bytes == cache.stats().bytes_written
        store.fault = StoreFault.UNAVAILABLE
        assert cache.store_stats() == StoreStats(None, None)


def test_a_full_store_is_still_read() -> None:
    store, prompt = TestStore(), Prompt(0)
    with cache_on(store, PrefixCacheSettings(breaker_failures=2)) as cache:
        stored(cache, prompt)
        store.full = True
        for seed in range(1, 10):
            stored(cache, Prompt(seed))
        assert cache.stats().breaker is BreakerState.CLOSED
        assert cache.load(prompt.keys, prompt.tokens) == prompt.payloads


def test_the_queue_is_bounded_and_drops_are_counted() -> None:
    store = TestStore()
    with cache_on(store, PrefixCacheSettings(queue_bytes=8 * SIZE)) as cache:
        store.open.clear()
        start = time.monotonic()
        for seed in range(10):
            cache.save(Prompt(seed).blocks())
        assert time.monotonic() - start < 1, "save must not wait for the store"
        assert cache.stats().queue_bytes == 8 * SIZE
        assert cache.stats().dropped == 50 - 8
        assert not cache.flush(0.05)
        store.open.set()
        assert cache.flush(SOON)
        assert cache.stats().written == 8
        assert cache.stats().queue_bytes == 0


def test_close_does_not_wait_for_ever() -> None:
    store = TestStore()
    settings = PrefixCacheSettings(write_deadline_ms=200)
    cache = PrefixCache(store, CODEC, settings)
    store.open.clear()
    cache.save(Prompt(1).blocks())
    while store.calls or cache.stats().queue_bytes == 0:
        time.sleep(0.01)
    time.sleep(0.05)
    cache.save(Prompt(2).blocks())
    start = time.monotonic()
    cache.close(0.2)
    assert time.monotonic() - start < 2
    assert cache.stats().dropped == 5
    store.open.set()
    assert cache.flush(SOON)
    assert cache.stats().queue_bytes == 0


def test_faults_are_misses_and_open_the_breaker_until_a_probe_succeeds() -> None:
    now = [0.0]
    store, prompt = TestStore(), Prompt(1)
    settings = PrefixCacheSettings(breaker_failures=3, breaker_backoff_s=10)
    with cache_on(store, settings, clock=lambda: now[0]) as cache:
        stored(cache, prompt)
        store.fault = StoreFault.TIMEOUT
        for _ in range(10):
            assert cache.load(prompt.keys, prompt.tokens) == []
        stats = cache.stats()
        assert stats.errors == {StoreFault.TIMEOUT: 3}
        assert stats.unanswered == stats.misses == 50
        assert stats.breaker is BreakerState.OPEN
        stored(cache, Prompt(2))  # dropped, without a call
        assert cache.stats().dropped == 5
        assert store.calls.count("get") == 3
        now[0] = 10
        assert cache.load(prompt.keys, prompt.tokens) == []  # the probe fails
        store.fault = None
        now[0] = 29
        assert cache.load(prompt.keys, prompt.tokens) == []
        now[0] = 30
        assert cache.load(prompt.keys, prompt.tokens) == prompt.payloads
        assert cache.stats().transitions == {
            BreakerState.OPEN: 2,
            BreakerState.HALF_OPEN: 2,
            BreakerState.CLOSED: 1,
        }


def test_an_outage_of_a_real_server(own_valkey: Valkey) -> None:
    settings = PrefixCacheSettings.model_validate(
        {
            "url": own_valkey.url,
            "read_deadline_ms": 100,
            "write_deadline_ms": 200,
            "breaker_failures": 3,
            "breaker_backoff_s": 0.3,
        }
    )
    prompt = Prompt(1)
    cache = PrefixCache.open(settings, IDENTITY, SIZE, 4)
    try:
        stored(cache, prompt)
        assert cache.load(prompt.keys, prompt.tokens, SOON) == prompt.payloads
        assert cache.flush(SOON)
        own_valkey.signal(signal.SIGSTOP)
        start = time.monotonic()
        for _ in range(50):
            assert cache.load(prompt.keys, prompt.tokens) == []
        assert time.monotonic() - start < 1.5, "three calls wait, the others do not"
        assert cache.stats().breaker is BreakerState.OPEN
        assert cache.stats().errors[StoreFault.TIMEOUT] >= 3
        own_valkey.signal(signal.SIGCONT)
        end = time.monotonic() + 20
        while cache.load(prompt.keys, prompt.tokens) != prompt.payloads:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert cache.stats().breaker is BreakerState.CLOSED

        own_valkey.stop()
        while cache.stats().breaker is BreakerState.CLOSED:
            assert cache.load(prompt.keys, prompt.tokens) == []
            assert time.monotonic() < end + 20
        own_valkey.start()
        while cache.load(prompt.keys, prompt.tokens) != prompt.payloads:
            stored(cache, prompt)  # the server came back empty
            assert time.monotonic() < end + 40
            time.sleep(0.05)
    finally:
        cache.close()


def test_a_store_that_cannot_be_opened_is_used_as_soon_as_it_can(tmp_path: Path) -> None:
    (tmp_path / "blocks").write_text("in the way")
    settings = PrefixCacheSettings.model_validate(
        {"url": f"lmdb://{tmp_path}/blocks", "breaker_backoff_s": 0.01}
    )
    prompt = Prompt(1)
    cache = PrefixCache.open(settings, IDENTITY, SIZE, 4)
    try:
        assert cache.load(prompt.keys, prompt.tokens) == []
        assert cache.stats().errors == {StoreFault.UNAVAILABLE: 1}
        (tmp_path / "blocks").unlink()
        stored(cache, prompt)
        assert cache.load(prompt.keys, prompt.tokens) == prompt.payloads
    finally:
        cache.close()
