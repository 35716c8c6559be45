"""What processes do to a folder that they share: die, sleep, disagree."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prefix_cache.codec import BlockCodec
from prefix_cache.errors import StoreError, StoreFault
from prefix_cache.stores.lmdb import LmdbStore
from tests.prefix_cache.opening import MIB, SOON, key, opened_folder


@contextmanager
def child(script: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has printed its first line; killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1].decode()
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)


# Stores blocks for ever, each batch a transaction of a megabyte.
BLOCK_WRITER = """
import random, sys
from pathlib import Path
from prefix_cache.codec import BlockCodec
from prefix_cache.store import StoreOptions
from prefix_cache.stores.lmdb import LmdbStore

rng = random.Random(int(sys.argv[2]))
codec = BlockCodec(b"i" * 32, 100_000)
store = LmdbStore(Path(sys.argv[1]), StoreOptions("kv", 60, 16 * 2**20))
payload = rng.randbytes(100_000)
print("ready", flush=True)
while True:
    batch = []
    for _ in range(10):
        key = rng.randrange(200).to_bytes(32, "big")
        batch.append((key, codec.encode(key, [key[-1]] * 16, payload)))
    store.put_many(batch, 20)
"""


def test_a_kill_in_mid_write_leaves_only_whole_blocks(tmp_path: Path) -> None:
    codec = BlockCodec(b"i" * 32, 100_000)
    rng = random.Random(0)
    readable = 0
    for attempt in range(50):
        with child(BLOCK_WRITER, str(tmp_path / "blocks"), str(attempt)) as writer:
            time.sleep(rng.uniform(0, 0.06))
            assert writer.poll() is None
            writer.kill()
        with opened_folder(tmp_path / "blocks") as store:
            store.check_integrity()
            for number, value in enumerate(store.get_many([key(n) for n in range(200)], SOON)):
                if value is not None:
                    codec.decode(value, key(number), [key(number)[-1]] * 16)
                    readable += 1
            store.put_many([(key(0), codec.encode(key(0), [0] * 16, bytes(100_000)))], SOON)
    assert readable > 50 * 10


# Holds a read transaction, or the lock of writers, until it is killed.
HOLDER = """
import sys, time
from pathlib import Path
from prefix_cache.store import StoreOptions
from prefix_cache.stores.deadline import Deadline
from prefix_cache.stores.lmdb import LmdbStore

store = LmdbStore(Path(sys.argv[1]), StoreOptions("kv", 60, 16 * 2**20))
held = store._read() if sys.argv[2] == "read" else store._write(Deadline(10))
with held as txn:
    store._tables.total(txn)
    print("held", flush=True)
    time.sleep(100)
"""


def churn(store: LmdbStore, rounds: int = 150) -> None:
    for number in range(rounds):
        store.put_many([(key(number), os.urandom(300_000))], SOON)


def test_a_dead_reader_holds_no_pages(tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    with opened_folder(folder) as store:
        churn(store, 10)
        with child(HOLDER, str(folder), "read") as reader:
            reader.send_signal(signal.SIGKILL)
            reader.wait(20)
        churn(store)
        store.check_integrity()


def test_a_reader_that_sleeps_can_fill_the_store_but_not_break_it(tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    with opened_folder(folder) as store:
        churn(store, 40)
        with child(HOLDER, str(folder), "read"):
            with pytest.raises(StoreError) as caught:
                churn(store)
            assert caught.value.fault is StoreFault.FULL
            store.check_integrity()
        churn(store)


def test_a_writer_that_sleeps_delays_nobody_beyond_the_deadline(tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    with opened_folder(folder) as store:
        store.put_many([(key(1), b"1")], SOON)
        with child(HOLDER, str(folder), "write") as writer:
            writer.send_signal(signal.SIGSTOP)
            start = time.monotonic()
            with pytest.raises(StoreError) as caught:
                store.put_many([(key(2), b"2")], 0.2)
            assert 0.15 < time.monotonic() - start < 1
            assert caught.value.fault is StoreFault.TIMEOUT
            assert store.get_many([key(1)], 0.2) == [b"1"]
            writer.send_signal(signal.SIGKILL)
            writer.wait(20)
        store.put_many([(key(2), b"2")], SOON)
        assert store.get_many([key(1), key(2)], SOON) == [b"1", b"2"]


def test_processes_that_disagree_about_the_size_are_told(tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    fill = f"""
from pathlib import Path
from prefix_cache.store import StoreOptions
from prefix_cache.stores.lmdb import LmdbStore
store = LmdbStore(Path({str(folder)!r}), StoreOptions("kv", 60, 32 * 2**20))
for n in range(200):
    store.put_many([(n.to_bytes(32, "big"), bytes(100_000))], 20)
print("filled", flush=True)
"""
    with opened_folder(folder, 4 * MIB) as store:
        with child(fill):
            pass
        with pytest.raises(StoreError, match="larger max_bytes"):
            store.get_many([key(1)], SOON)


# Reads and writes a folder whose file is damaged; says what came of it.
SURVIVOR = """
import sys
from pathlib import Path
from prefix_cache.codec import BlockCodec
from prefix_cache.errors import BlockRejected, StoreError
from prefix_cache.store import StoreOptions
from prefix_cache.stores.lmdb import LmdbStore

codec = BlockCodec(b"i" * 32, 20_000)
good = bad = 0
try:
    store = LmdbStore(Path(sys.argv[1]), StoreOptions("kv", 600, 8 * 2**20))
    for n in range(80):
        key = n.to_bytes(32, "big")
        try:
            if n >= 60:
                store.put_many([(key, codec.encode(key, [n] * 16, bytes([n]) * 20_000))], 20)
            (value,) = store.get_many([key], 20)
            if value is not None:
                assert codec.decode(value, key, [n] * 16) == bytes([n]) * 20_000
                good += 1
        except (BlockRejected, StoreError):
            bad += 1
except StoreError:
    bad += 1
print(good, bad)
"""


def test_a_damaged_file_gives_no_wrong_block_and_ends_no_process(tmp_path: Path) -> None:
    codec = BlockCodec(b"i" * 32, 20_000)
    with opened_folder(tmp_path / "whole", 8 * MIB) as store:
        for n in range(60):
            store.put_many([(key(n), codec.encode(key(n), [n] * 16, bytes([n]) * 20_000))], SOON)
    whole = (tmp_path / "whole" / "data.mdb").read_bytes()
    bad = 0
    for seed in range(8):
        rng, data = random.Random(seed), bytearray(whole)
        for page in rng.sample(range(2, len(data) // 4096), 40):
            place = page * 4096 + rng.randrange(64 if seed % 2 else 4096)
            data[place : place + 4] = rng.randbytes(4)
        folder = tmp_path / str(seed)
        folder.mkdir()
        (folder / "data.mdb").write_bytes(data)
        command = [sys.executable, "-c", SURVIVOR, str(folder)]
        outcome = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (outcome.returncode, outcome.stderr) == (0, ""), f"seed {seed}"
        bad += int(outcome.stdout.split()[1])
    assert bad > 0
