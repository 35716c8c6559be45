"""``memory://`` with swaps: for tests, and for servers of one process."""

from __future__ import annotations

from collections.abc import Sequence

from prefix_cache.checkpoints.cells import Swap
from prefix_cache.stores.memory import MemoryStore


class MemoryCells(MemoryStore):
    """Entries in a dict; see :class:`prefix_cache.checkpoints.cells.Cells`."""

    def heads(self, keys: Sequence[bytes], size: int, deadline_s: float) -> list[bytes]:
        """See Cells."""
        return [(value or b"")[:size] for value in self.get_many(keys, deadline_s)]

    def swap_many(self, swaps: Sequence[Swap], deadline_s: float) -> list[bool]:
        """See Cells."""
        return [self._swap(swap) for swap in swaps]

    def _swap(self, swap: Swap) -> bool:
        with self._lock:
            entry = self._find(swap.key)
            value = b"" if entry is None else entry.value
            if value[: len(swap.head)] != swap.expected:
                return False
            body = value[len(swap.head) :] if swap.body is None else swap.body
            self._put(swap.key, swap.head + body, swap.ttl_s)
            return True
