"""A bounded memory of keys that were seen lately."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable


class RecentKeys:
    """The last ``limit`` keys that were added, each for ``age_s`` seconds. Thread-safe."""

    def __init__(
        self, limit: int, age_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = limit
        self._age_s = age_s
        self._clock = clock
        self._lock = threading.Lock()
        self._added: OrderedDict[bytes, float] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            added = self._added.get(key)
            return added is not None and self._clock() - added < self._age_s

    def __len__(self) -> int:
        return len(self._added)

    def add(self, keys: Iterable[bytes]) -> None:
        """Remember keys, and forget the oldest beyond the limit."""
        now = self._clock()
        with self._lock:
            for key in keys:
                self._added[key] = now
                self._added.move_to_end(key)
            while len(self._added) > self._limit:
                self._added.popitem(last=False)

    def discard(self, keys: Iterable[bytes]) -> None:
        """Forget keys."""
        with self._lock:
            for key in keys:
                self._added.pop(key, None)
