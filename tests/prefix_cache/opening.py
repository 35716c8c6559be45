"""Stores that are closed again, and what calls to them end in."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prefix_cache.errors import StoreError, StoreFault
from prefix_cache.store import BlockStore, StoreOptions, open_store
from prefix_cache.stores.lmdb import LmdbStore

MIB = 2**20
#: A deadline that nothing here comes near to.
SOON = 10.0
#: A call may be late by this much on a busy machine.
SLACK_S = 0.5


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


@contextmanager
def opened(url: str) -> Iterator[BlockStore]:
    store = open_store(url, StoreOptions("kv", 60, 16 * MIB))
    try:
        yield store
    finally:
        store.close()


@contextmanager
def opened_folder(
    folder: Path,
    max_bytes: int = 16 * MIB,
    ttl_s: float = 60,
    clock_ns: Callable[[], int] = time.time_ns,
) -> Iterator[LmdbStore]:
    store = LmdbStore(folder, StoreOptions("kv", ttl_s, max_bytes), clock_ns=clock_ns)
    try:
        yield store
    finally:
        store.close()


def fault_of(call: Callable[[], object], within_s: float) -> StoreFault:
    """How a call failed, which must not take longer than ``within_s``."""
    start = time.monotonic()
    with pytest.raises(StoreError) as caught:
        call()
    assert time.monotonic() - start < within_s + SLACK_S
    return caught.value.fault
