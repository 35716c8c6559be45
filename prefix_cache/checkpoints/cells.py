"""The one thing that checkpoints ask of a store beyond blocks: to swap an entry atomically."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import SplitResult

from prefix_cache.store import BlockStore, StoreOptions, open_kind
from prefix_cache.stores.reopening import ReopeningStore


@dataclass(frozen=True)
class Swap:
    """A write to one entry that happens only if nobody else has written meanwhile.

    Attributes:
        key: of the entry.
        expected: what the entry must begin with; empty if it must not be there.
        head: what it shall begin with, as long as ``expected`` where that is not empty.
        body: what shall follow; None leaves what is there.
        ttl_s: for how long.
    """

    key: bytes
    expected: bytes
    head: bytes
    body: bytes | None
    ttl_s: float


class Cells(BlockStore, Protocol):
    """A store of bytes by key whose entries can be swapped. Errors and deadlines as there."""

    def heads(self, keys: Sequence[bytes], size: int, deadline_s: float) -> list[bytes]:
        """The first ``size`` bytes of each entry; none where there is no entry."""

    def swap_many(self, swaps: Sequence[Swap], deadline_s: float) -> list[bool]:
        """Which of them were done. If it raises, some may have been."""


def open_cells(url: str, options: StoreOptions) -> Cells:
    """Open the store that ``url`` names; see :func:`prefix_cache.store.open_store`.

    Raises:
        StoreConfigError: the URL is wrong, or a package that it needs is missing.
        StoreError: UNAVAILABLE, where an embedded store cannot be opened.
    """
    return open_kind(url, options, _OPENERS)


class ReopeningCells(ReopeningStore[Cells]):
    """Cells in place of those that could not be opened; every call tries again."""

    def heads(self, keys: Sequence[bytes], size: int, deadline_s: float) -> list[bytes]:
        """See Cells."""
        return self._opened(deadline_s).heads(keys, size, deadline_s)

    def swap_many(self, swaps: Sequence[Swap], deadline_s: float) -> list[bool]:
        """See Cells."""
        return self._opened(deadline_s).swap_many(swaps, deadline_s)


def _open_memory(parts: SplitResult, options: StoreOptions) -> Cells:
    from prefix_cache.checkpoints.memory import MemoryCells

    return MemoryCells.from_url(parts, options)


def _open_lmdb(parts: SplitResult, options: StoreOptions) -> Cells:
    from prefix_cache.checkpoints.lmdb import LmdbCells

    return LmdbCells.from_url(parts, options)


def _open_redis(parts: SplitResult, options: StoreOptions) -> Cells:
    from prefix_cache.checkpoints.redis import RedisCells

    return RedisCells.from_url(parts, options)


_OPENERS: dict[str, Callable[[SplitResult, StoreOptions], Cells]] = {
    "redis": _open_redis,
    "lmdb": _open_lmdb,
    "memory": _open_memory,
}
