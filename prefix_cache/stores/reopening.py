"""The store in place of one that could not be opened: every call tries again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from prefix_cache.errors import StoreError, StoreFault
from prefix_cache.store import BlockStore, StoreStats, Value

StoreT = TypeVar("StoreT", bound=BlockStore)


class ReopeningStore(Generic[StoreT]):
    """Opens a store when it is used, and passes calls on. A circuit breaker spaces the tries."""

    def __init__(self, opener: Callable[[], StoreT]) -> None:
        self._opener = opener
        self._lock = threading.Lock()
        self._store: StoreT | None = None
        self._closed = False

    def get_many(self, keys: Sequence[bytes], deadline_s: float) -> list[bytes | None]:
        """See BlockStore."""
        return self._opened(deadline_s).get_many(keys, deadline_s)

    def has_many(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        """See BlockStore."""
        return self._opened(deadline_s).has_many(keys, deadline_s)

    def put_many(self, items: Sequence[tuple[bytes, Value]], deadline_s: float) -> None:
        """See BlockStore."""
        self._opened(deadline_s).put_many(items, deadline_s)

    def touch_many(self, keys: Sequence[bytes], deadline_s: float) -> None:
        """See BlockStore."""
        self._opened(deadline_s).touch_many(keys, deadline_s)

    def list_keys(self, most: int, deadline_s: float) -> list[bytes]:
        """See BlockStore."""
        return self._opened(deadline_s).list_keys(most, deadline_s)

    def purge(self, deadline_s: float) -> None:
        """See BlockStore."""
        self._opened(deadline_s).purge(deadline_s)

    def stats(self, deadline_s: float) -> StoreStats:
        """See BlockStore."""
        return self._opened(deadline_s).stats(deadline_s)

    def close(self) -> None:
        """See BlockStore."""
        with self._lock:
            self._closed = True
            if self._store is not None:
                self._store.close()

    def _opened(self, deadline_s: float) -> StoreT:
        if not self._lock.acquire(timeout=deadline_s):
            raise StoreError(StoreFault.TIMEOUT, "another thread is opening the store")
        try:
            if self._closed:
                raise StoreError(StoreFault.UNAVAILABLE, "the store is closed")
            if self._store is None:
                self._store = self._opener()
            return self._store
        finally:
            self._lock.release()
