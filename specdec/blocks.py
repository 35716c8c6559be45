"""Where the engine finds blocks beside its pool: the interface, and nowhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from prefix_cache.keys import Identity
from prefix_cache.stats import CacheStats
from specdec.model.kv import KvPool
from specdec.policy.plan import BlockLoad, PublishedBlock
from specdec.policy.scheduler import Scheduler
from specdec.policy.sequence import Sequence as SequenceState
from specdec.prefix import pool_identity


class BlockSource(Protocol):
    """Called by the engine's thread alone.

    Attributes:
        identity: what all its blocks have in common.
    """

    identity: Identity

    def enqueue(self, scheduler: Scheduler, sequence: SequenceState) -> None:
        """Add a new sequence, which first waits for blocks if it is worth it.

        Raises:
            RequestError: as ``Scheduler.add``, as are all others.
        """

    def arrive(self, scheduler: Scheduler) -> None:
        """Let the sequences take their places whose blocks have come."""

    def wait(self, seconds: float) -> None:
        """Wait for blocks to come, but no longer than that."""

    def load(self, loads: Sequence[BlockLoad]) -> None:
        """Write blocks to their pages, before a forward."""

    def save(self, published: Sequence[PublishedBlock]) -> None:
        """Hear of blocks whose KV is in place."""

    def reuse(self, shared: Sequence[PublishedBlock]) -> None:
        """Hear of blocks in the pool that a request has found there."""

    def withdraw(self, keys: Sequence[bytes]) -> None:
        """Hear of blocks that may be wrong: a request with them failed."""

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was saved is stored or dropped; whether it is."""

    def stats(self) -> CacheStats | None:
        """What was counted; None where there is no store."""

    def close(self, timeout_s: float = 5.0) -> None:
        """Store what waits, as far as the time allows."""


class PoolOnly:
    """Blocks are found in the pool, and nowhere else.

    Args:
        pool: of the engine.
    """

    def __init__(self, pool: KvPool) -> None:
        self.identity = pool_identity(pool)

    def enqueue(self, scheduler: Scheduler, sequence: SequenceState) -> None:
        """Add it."""
        scheduler.add(sequence)

    def arrive(self, scheduler: Scheduler) -> None:
        """Nothing ever comes."""

    def wait(self, seconds: float) -> None:
        """Nor is it waited for."""

    def load(self, loads: Sequence[BlockLoad]) -> None:
        """There is nothing to load."""

    def save(self, published: Sequence[PublishedBlock]) -> None:
        """They are where they are."""

    def reuse(self, shared: Sequence[PublishedBlock]) -> None:
        """Nobody else keeps them."""

    def withdraw(self, keys: Sequence[bytes]) -> None:
        """The scheduler has done so."""

    def flush(self, timeout_s: float) -> bool:
        """Nothing waits."""
        return True

    def stats(self) -> CacheStats | None:
        """There is no store."""
        return None

    def close(self, timeout_s: float = 5.0) -> None:
        """There is nothing to close."""
