from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from prefix_cache.errors import StoreConfigError, StoreError, StoreFault
from prefix_cache.store import StoreOptions
from prefix_cache.stores.lmdb import LmdbStore
from tests.prefix_cache.opening import MIB, SOON, key, opened_folder


def test_the_file_keeps_its_budget_and_the_oldest_go_first(tmp_path: Path) -> None:
    with opened_folder(tmp_path / "blocks", 16 * MIB) as store:
        for number in range(400):
            store.put_many([(key(number), os.urandom(100_000))], SOON)
            store.touch_many([key(0)], SOON)
        there = store.has_many([key(n) for n in range(400)], SOON)
        store.check_integrity()
    kept = [number for number, yes in enumerate(there) if yes]
    assert kept[0] == 0, "it was in use all the time"
    assert kept[1:] == list(range(401 - len(kept), 400))
    assert len(kept) > 100
    assert (tmp_path / "blocks" / "data.mdb").stat().st_size <= 16 * MIB


def test_sizes_that_vary_fragment_the_file_but_always_find_room(tmp_path: Path) -> None:
    rng = random.Random(1)
    with opened_folder(tmp_path / "blocks", 8 * MIB) as store:
        for _ in range(300):
            items = [
                (key(rng.randrange(500)), rng.randbytes(rng.choice((10, 5_000, 60_000, 900_000))))
                for _ in range(3)
            ]
            store.put_many(items, SOON)
            assert store.get_many([items[-1][0]], SOON) == [items[-1][1]]
        store.check_integrity()
        with pytest.raises(StoreError) as caught:
            store.put_many([(key(1), bytes(4 * MIB))], SOON)
        assert caught.value.fault is StoreFault.FULL


def test_what_has_expired_is_gone_and_makes_room(tmp_path: Path) -> None:
    now = [10**18]
    with opened_folder(tmp_path / "blocks", ttl_s=100, clock_ns=lambda: now[0]) as store:
        store.put_many([(key(n), b"old") for n in range(50)], SOON)
        now[0] += 60 * 10**9
        store.touch_many([key(7)], SOON)
        now[0] += 60 * 10**9
        assert store.get_many([key(6), key(7)], SOON) == [None, b"old"]
        store.put_many([(key(100), b"new")], SOON)
        assert store.stats(SOON).entries == 2
        now[0] -= 10**12  # a clock that was set back
        store.put_many([(key(101), b"new")], SOON)
        store.touch_many([key(7)], SOON)
        store.check_integrity()


def test_it_outlives_its_process_and_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b" / "blocks"
    with opened_folder(folder) as store:
        store.put_many([(key(1), b"1")], SOON)
    with opened_folder(folder) as store:
        assert store.get_many([key(1)], SOON) == [b"1"]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_a_deadline_that_has_passed_is_a_timeout(tmp_path: Path) -> None:
    with opened_folder(tmp_path / "blocks") as store:
        for call in (
            lambda: store.get_many([key(1)], -1),
            lambda: store.put_many([(key(1), b"")], -1),
            lambda: store.touch_many([key(1)], -1),
        ):
            with pytest.raises(StoreError) as caught:
                call()
            assert caught.value.fault is StoreFault.TIMEOUT


def test_a_damaged_file_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    with opened_folder(folder) as store:
        store.put_many([(key(1), b"1")], SOON)
    (folder / "data.mdb").write_bytes(b"junk" * 5000)
    with pytest.raises(StoreError, match="delete it") as caught, opened_folder(folder):
        pass
    assert caught.value.fault is StoreFault.UNAVAILABLE


def test_what_cannot_be_opened_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file") as caught, opened_folder(tmp_path / "file"):
        pass
    assert caught.value.fault is StoreFault.UNAVAILABLE
    with opened_folder(tmp_path / "blocks"), pytest.raises(StoreError, match="already open"):
        LmdbStore(tmp_path / "blocks", StoreOptions("kv", 60, 16 * MIB))
    with pytest.raises(StoreConfigError, match="max_bytes"):
        LmdbStore(tmp_path / "small", StoreOptions("kv", 60, MIB - 1))
