"""``memory://``: the blocks of one process, the least recently used evicted first."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Self
from urllib.parse import SplitResult

from prefix_cache.errors import StoreConfigError, StoreError, StoreFault
from prefix_cache.store import StoreOptions, StoreStats, Value
from prefix_cache.stores.url import query_of


@dataclass
class _Entry:
    value: bytes
    expires_at: float


class MemoryStore:
    """Bytes in a dict, at most ``options.max_bytes`` of values."""

    def __init__(self, options: StoreOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._bytes = 0
        self._closed = False

    @classmethod
    def from_url(cls, parts: SplitResult, options: StoreOptions) -> Self:
        """Open ``memory://``.

        Raises:
            StoreConfigError: the URL says more than that.
        """
        query_of(parts, ())
        if parts.netloc or parts.path:
            raise StoreConfigError("memory:// takes neither host nor path")
        return cls(options)

    def get_many(self, keys: Sequence[bytes], deadline_s: float) -> list[bytes | None]:
        """See BlockStore."""
        with self._lock:
            entries = [self._find(key) for key in keys]
        return [None if entry is None else entry.value for entry in entries]

    def has_many(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        """See BlockStore."""
        with self._lock:
            return [self._find(key) is not None for key in keys]

    def put_many(self, items: Sequence[tuple[bytes, Value]], deadline_s: float) -> None:
        """See BlockStore."""
        with self._lock:
            self._check_open()
            for key, value in items:
                self._put(key, value, self._options.ttl_s)

    def touch_many(self, keys: Sequence[bytes], deadline_s: float) -> None:
        """See BlockStore."""
        with self._lock:
            for key in keys:
                entry = self._find(key)
                if entry is not None:
                    entry.expires_at = self._clock() + self._options.ttl_s
                    self._entries.move_to_end(key)

    def list_keys(self, most: int, deadline_s: float) -> list[bytes]:
        """See BlockStore."""
        with self._lock:
            self._check_open()
            return list(islice(self._entries, most))

    def purge(self, deadline_s: float) -> None:
        """See BlockStore."""
        with self._lock:
            self._check_open()
            self._entries.clear()
            self._bytes = 0

    def stats(self, deadline_s: float) -> StoreStats:
        """See BlockStore."""
        with self._lock:
            self._check_open()
            return StoreStats(len(self._entries), self._bytes)

    def close(self) -> None:
        """See BlockStore."""
        with self._lock:
            self._closed = True
            self._entries.clear()
            self._bytes = 0

    def _put(self, key: bytes, value: Value, ttl_s: float) -> None:
        """Whoever calls holds the lock."""
        self._drop(key)
        if len(value) > self._options.max_bytes:
            raise StoreError(StoreFault.FULL, f"{len(value)} bytes exceed the budget")
        while self._bytes + len(value) > self._options.max_bytes:
            self._drop(next(iter(self._entries)))
        self._entries[key] = _Entry(bytes(value), self._clock() + ttl_s)
        self._bytes += len(value)

    def _find(self, key: bytes) -> _Entry | None:
        self._check_open()
        entry = self._entries.get(key)
        if entry is not None and entry.expires_at <= self._clock():
            self._drop(key)
            return None
        return entry

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= len(entry.value)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(StoreFault.UNAVAILABLE, "the store is closed")
