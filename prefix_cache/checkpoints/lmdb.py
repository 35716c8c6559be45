"""``lmdb:///folder`` with swaps: checkpoints of all processes of a machine.

Not the folder of the prefix cache: a process opens a folder once, and each has its own budget.
"""

from __future__ import annotations

from collections.abc import Sequence

import lmdb

from prefix_cache.checkpoints.cells import Swap
from prefix_cache.errors import StoreError, StoreFault
from prefix_cache.stores.deadline import Deadline
from prefix_cache.stores.lmdb import LmdbStore
from prefix_cache.stores.lmdb_tables import size_of


class LmdbCells(LmdbStore):
    """Entries in an LMDB environment; see :class:`prefix_cache.checkpoints.cells.Cells`.

    All swaps of a call are one write transaction, so that they cost one wait for the disk.
    """

    def heads(self, keys: Sequence[bytes], size: int, deadline_s: float) -> list[bytes]:
        """See Cells."""
        return [(value or b"")[:size] for value in self.get_many(keys, deadline_s)]

    def swap_many(self, swaps: Sequence[Swap], deadline_s: float) -> list[bool]:
        """See Cells."""
        size = sum(size_of(swap.head + (swap.body or b"")) for swap in swaps)
        if size > self._budget // 4:
            raise StoreError(StoreFault.FULL, f"{size} bytes are too many for max_bytes")
        return self._write_evicting(
            size,
            Deadline(deadline_s),
            lambda txn, now: [self._swap(txn, swap, now) for swap in swaps],
        )

    def _swap(self, txn: lmdb.Transaction[bytes], swap: Swap, now: int) -> bool:
        key = self._options.key(swap.key)
        entry = self._tables.entry(txn, key)
        fresh = entry is not None and entry.expires_at > now
        value = (self._tables.value(txn, key) or b"") if fresh else b""
        if value[: len(swap.head)] != swap.expected:
            return False
        body = value[len(swap.head) :] if swap.body is None else swap.body
        self._tables.put(txn, key, swap.head + body, now, now + int(swap.ttl_s * 1e9))
        return True
