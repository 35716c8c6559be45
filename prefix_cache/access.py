"""Calls to the store that cannot fail: through the breaker, timed, counted, errors logged."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from prefix_cache.breaker import CircuitBreaker
from prefix_cache.errors import StoreError, StoreFault
from prefix_cache.quiet_log import QuietLog
from prefix_cache.stats import Counters
from prefix_cache.store import BlockStore, StoreStats, Value

_LOGGER = logging.getLogger("prefix_cache")

ResultT = TypeVar("ResultT")


class StoreAccess:
    """What a PrefixCache and its writer share. No method raises StoreError."""

    def __init__(self, store: BlockStore, breaker: CircuitBreaker) -> None:
        self.breaker = breaker
        self.counters = Counters()
        self.log = QuietLog(_LOGGER)
        self._store = store

    def get_many(self, keys: Sequence[bytes], deadline_s: float) -> list[bytes | None] | None:
        """The values; None where the store cannot be asked or does not answer in time."""
        start = time.monotonic()
        values = self._guarded(lambda: self._store.get_many(keys, deadline_s))
        if values is not None:
            size = sum(len(value) for value in values if value is not None)
            self.counters.read(size, time.monotonic() - start)
        return values

    def has_many(self, keys: Sequence[bytes], deadline_s: float) -> list[bool] | None:
        """Which are there; None where the store cannot be asked or does not answer in time."""
        return self._guarded(lambda: self._store.has_many(keys, deadline_s))

    def put_many(self, items: Sequence[tuple[bytes, Value]], deadline_s: float) -> bool:
        """Whether all were stored."""
        start = time.monotonic()

        def put() -> bool:
            self._store.put_many(items, deadline_s)
            return True

        if not self._guarded(put):
            return False
        size = sum(len(value) for _, value in items)
        self.counters.wrote(len(items), size, time.monotonic() - start)
        return True

    def touch_many(self, keys: Sequence[bytes], deadline_s: float) -> None:
        """Let them live longer, if the store can be reached."""
        self._guarded(lambda: self._store.touch_many(keys, deadline_s))

    def stats(self, deadline_s: float) -> StoreStats:
        """What the store holds; nothing is known where it cannot be asked."""
        stats = self._guarded(lambda: self._store.stats(deadline_s))
        return StoreStats(None, None) if stats is None else stats

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def _guarded(self, call: Callable[[], ResultT]) -> ResultT | None:
        if not self.breaker.allow():
            return None
        try:
            result = call()
        except StoreError as error:
            self.counters.failed(error.fault)
            if error.fault is StoreFault.FULL:
                self.breaker.success()  # it answers, and may be read
            else:
                self.breaker.failure()
            self.log.warn(error.fault, f"prefix cache: {error}")
            return None
        self.breaker.success()
        return result
