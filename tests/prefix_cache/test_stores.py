"""The contract that all stores keep."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from prefix_cache.errors import StoreConfigError, StoreError, StoreFault
from prefix_cache.store import BlockStore, StoreOptions, open_store

OPTIONS = StoreOptions("kv", ttl_s=60, max_bytes=64 * 2**20)
SOON = 10.0


def key(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def value(number: int, size: int = 1000) -> bytes:
    return random.Random(number).randbytes(size)


@pytest.fixture
def store(any_url: str) -> Iterator[BlockStore]:
    store = open_store(any_url, OPTIONS)
    store.purge(SOON)
    yield store
    store.close()


def test_what_was_put_is_got_in_the_order_of_the_keys(store: BlockStore) -> None:
    items = [(key(n), value(n)) for n in range(100)]
    store.put_many(items, SOON)
    keys = [key(n) for n in (7, 500, 3, 99, 3, 501)]
    expected = [value(7), None, value(3), value(99), value(3), None]
    assert store.get_many(keys, SOON) == expected
    assert store.has_many(keys, SOON) == [v is not None for v in expected]


def test_any_bytes_are_values(store: BlockStore) -> None:
    values = [b"", b"\0", b"\r\n$-1\r\n", bytes(range(256)), value(1, 3_000_000)]
    store.put_many([(key(n), v) for n, v in enumerate(values)], SOON)
    assert store.get_many([key(n) for n in range(len(values))], SOON) == values


def test_a_buffer_may_change_once_it_is_put(store: BlockStore) -> None:
    buffers = [bytearray(value(n, size)) for n, size in enumerate((10, 20_000, 3_000_000))]
    store.put_many([(key(n), memoryview(buffer)) for n, buffer in enumerate(buffers)], SOON)
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))
    expected = [value(n, size) for n, size in enumerate((10, 20_000, 3_000_000))]
    assert store.get_many([key(n) for n in range(3)], SOON) == expected


def test_any_bytes_are_keys(store: BlockStore) -> None:
    keys = [b"\r\n" * 16, b"\0" * 32, b"\xff" * 32, b"*" * 32, b" " * 32]
    store.put_many([(k, k * 2) for k in keys], SOON)
    assert store.get_many(keys, SOON) == [k * 2 for k in keys]
    store.purge(SOON)
    assert store.has_many(keys, SOON) == [False] * 5


def test_a_later_value_replaces_an_earlier_one(store: BlockStore) -> None:
    store.put_many([(key(1), value(1)), (key(1), value(2))], SOON)
    store.put_many([(key(2), value(3))], SOON)
    store.put_many([(key(2), value(4, 50_000))], SOON)
    assert store.get_many([key(1), key(2)], SOON) == [value(2), value(4, 50_000)]


def test_nothing_asked_nothing_done(store: BlockStore) -> None:
    assert store.get_many([], SOON) == []
    assert store.has_many([], SOON) == []
    store.put_many([], SOON)
    store.touch_many([key(1)], SOON)
    assert store.has_many([key(1)], SOON) == [False]


def test_keys_are_listed_as_they_were_given(store: BlockStore) -> None:
    keys = {key(n) for n in range(2500)}
    store.put_many([(k, b"x") for k in keys], SOON)
    assert set(store.list_keys(5000, SOON)) == keys
    some = store.list_keys(7, SOON)
    assert len(set(some)) == 7
    assert set(some) <= keys


def test_purge_leaves_nothing(store: BlockStore) -> None:
    store.put_many([(key(n), b"x") for n in range(600)], SOON)
    store.purge(SOON)
    assert store.has_many([key(n) for n in range(600)], SOON) == [False] * 600


def test_stats_grow_with_what_is_held(store: BlockStore) -> None:
    before = store.stats(SOON)
    store.put_many([(key(n), value(n, 20_000)) for n in range(20)], SOON)
    after = store.stats(SOON)
    assert (before.entries or 0) + 20 == after.entries
    assert (after.bytes or 0) >= (before.bytes or 0) + 20 * 20_000


def test_blocks_expire_unless_they_are_touched(any_url: str) -> None:
    store = open_store(any_url, StoreOptions("ttl", ttl_s=0.6, max_bytes=2**24))
    try:
        store.put_many([(key(1), b"1"), (key(2), b"2")], SOON)
        assert store.get_many([key(1), key(2)], SOON) == [b"1", b"2"]
        time.sleep(0.35)
        store.touch_many([key(1)], SOON)
        time.sleep(0.35)
        assert store.get_many([key(1), key(2)], SOON) == [b"1", None]
        assert store.has_many([key(1), key(2)], SOON) == [True, False]
        time.sleep(0.4)
        assert store.get_many([key(1)], SOON) == [None]
    finally:
        store.close()


def test_a_closed_store_says_so(any_url: str) -> None:
    store = open_store(any_url, OPTIONS)
    store.close()
    store.close()
    for call in (
        lambda: store.get_many([key(1)], SOON),
        lambda: store.has_many([key(1)], SOON),
        lambda: store.put_many([(key(1), b"")], SOON),
        lambda: store.touch_many([key(1)], SOON),
        lambda: store.purge(SOON),
        lambda: store.stats(SOON),
    ):
        with pytest.raises(StoreError) as caught:
            call()
        assert caught.value.fault is StoreFault.UNAVAILABLE


def test_namespaces_do_not_see_each_other(shared_url: str) -> None:
    def using(namespace: str) -> BlockStore:
        return open_store(shared_url, StoreOptions(namespace, 60, 2**24))

    for namespace in ("a", "ab"):
        store = using(namespace)
        store.purge(SOON)
        store.put_many([(key(1), namespace.encode())], SOON)
        store.close()
    store = using("a")
    assert store.get_many([key(1)], SOON) == [b"a"]
    store.purge(SOON)
    store.close()
    store = using("ab")
    assert store.get_many([key(1)], SOON) == [b"ab"]
    store.close()


def test_threads_share_a_store(store: BlockStore) -> None:
    failures: list[str] = []

    def work(thread: int) -> None:
        rng = random.Random(thread)
        for _ in range(15):
            numbers = rng.sample(range(40), 6)
            store.put_many([(key(n), value(n, 5000)) for n in numbers[:3]], SOON)
            store.touch_many([key(n) for n in numbers], SOON)
            for n, got in zip(
                numbers, store.get_many([key(n) for n in numbers], SOON), strict=True
            ):
                if got not in (None, value(n, 5000)):
                    failures.append(f"thread {thread}: wrong value of {n}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []


# Writes values that follow from their keys and checks whatever it reads.
WORKER = """
import hashlib, random, sys
from prefix_cache.store import StoreOptions, open_store

def key(n): return hashlib.sha256(b"%d" % n).digest()
def value(n): return random.Random(n).randbytes(20_000)

rng = random.Random(int(sys.argv[2]))
store = open_store(sys.argv[1], StoreOptions("many", 60, 64 * 2**20))
sys.stdin.readline()
hits = 0
for _ in range(25):
    numbers = rng.sample(range(60), 8)
    store.put_many([(key(n), value(n)) for n in numbers[:4]], 20)
    for n, got in zip(numbers, store.get_many([key(n) for n in numbers], 20)):
        assert got in (None, value(n)), n
        hits += got is not None
    assert all(store.has_many([key(n) for n in numbers[:4]], 20))
    store.touch_many([key(n) for n in numbers], 20)
store.close()
print(hits)
"""


def test_eight_processes_at_once(shared_url: str) -> None:
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, shared_url, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(8)
    ]
    outcomes = [worker.communicate("go\n", timeout=120) for worker in workers]
    assert [errors for _, errors in outcomes] == [""] * 8
    assert all(int(hits) >= 25 * 4 for hits, _ in outcomes)
    store = open_store(shared_url, StoreOptions("many", 60, 64 * 2**20))
    found = store.get_many([key(n) for n in range(60)], SOON)
    store.purge(SOON)
    store.close()
    assert found == [value(n, 20_000) for n in range(60)]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "begins with one of"),
        ("blocks", "begins with one of"),
        ("memcached://host", "begins with one of"),
        ("memory://host", "neither host nor path"),
        ("memory://?max=1", "unknown option 'max'"),
        ("lmdb://", "an absolute path"),
        ("lmdb:///", "an absolute path"),
        ("lmdb://relative/folder", "an absolute path"),
        ("lmdb:///folder?sync=perhaps", "option sync"),
        ("lmdb:///folder?sync=true&sync=false", "given twice"),
        ("lmdb:///folder?sync", "malformed"),
        ("redis://", "host is missing"),
        ("redis://user:hunter2@host:port", "port is not a number"),
        ("redis://user:hunter2@host/database", "the database is a number"),
        ("redis://user:hunter2@host?ca=x", "unknown option 'ca'"),
        ("redis://user:hunter2@host?connections=0", "option connections"),
        ("rediss://user:hunter2@host?db=1", "unknown option 'db'"),
        ("redis://user:hunter2@[host", "cannot be parsed"),
    ],
)
def test_a_wrong_url_is_named_without_its_password(url: str, message: str) -> None:
    with pytest.raises(StoreConfigError, match=message) as caught:
        open_store(url, OPTIONS)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "bad", [("", 1, 1), ("a:b", 1, 1), ("*", 1, 1), ("a" * 65, 1, 1), ("a", 0, 1), ("a", 1, 0)]
)
def test_wrong_options_are_refused(bad: tuple[str, float, int]) -> None:
    with pytest.raises(StoreConfigError):
        StoreOptions(*bad)


def test_memory_evicts_what_was_used_longest_ago() -> None:
    store = open_store("memory://", StoreOptions("kv", 60, 3000))
    store.put_many([(key(n), value(n)) for n in range(3)], SOON)
    store.touch_many([key(0)], SOON)
    store.put_many([(key(3), value(3))], SOON)
    assert store.has_many([key(n) for n in range(4)], SOON) == [True, False, True, True]
    with pytest.raises(StoreError) as caught:
        store.put_many([(key(4), value(4, 3001))], SOON)
    assert caught.value.fault is StoreFault.FULL
    store.close()
