"""Blocks of the prefix cache's store on their way into the pool and out of it.

Reads run in threads of their own while the engine steps on; writes wait in the cache's queue.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from prefix_cache.cache import PrefixCache
from prefix_cache.errors import StoreConfigError
from prefix_cache.keys import Identity
from prefix_cache.stats import CacheStats
from prefix_cache.writer import Block
from specdec.blocks import BlockSource, PoolOnly
from specdec.config import EngineSettings
from specdec.errors import ConfigError
from specdec.model.kv import KvPool
from specdec.model.runner import ModelRunner
from specdec.policy.plan import BlockLoad, PublishedBlock
from specdec.policy.scheduler import Scheduler
from specdec.policy.sequence import FoundBlocks, Status
from specdec.policy.sequence import Sequence as SequenceState
from specdec.prefix import stored_identity

log = logging.getLogger(__name__)

#: Reads at the same time.
_READERS = 4
#: Bytes of blocks asked for at once. Each time the store has its full deadline: one that answers
#: is read to the end, as that takes less time than computing, and one that does not costs one
#: deadline.
_SLICE_BYTES = 24 * 2**20
#: Bytes of blocks that are being read or were read and wait for their request's start. Further
#: reads begin once these have started.
_MOST_BYTES = 2**30


@dataclass(frozen=True)
class _Read:
    """Blocks that a sequence wants, from index ``first`` on; begun by ``until``, on the monotonic
    clock, or not at all.
    """

    sequence: SequenceState
    first: int
    keys: Sequence[bytes]
    tokens: Sequence[Sequence[int]]
    until: float


class StoredBlocks:
    """The engine's side of a :class:`prefix_cache.cache.PrefixCache`, as a
    :class:`specdec.blocks.BlockSource`.

    Args:
        cache: closed with this.
        pool: whose pages the blocks come from and go to.
        identity: what all blocks have in common.
        patience_s: seconds that a request may wait for the begin of its reading.
    """

    def __init__(
        self, cache: PrefixCache, pool: KvPool, identity: Identity, patience_s: float
    ) -> None:
        self.identity = identity
        self._patience_s = patience_s
        self._closing = False
        self._cache = cache
        self._pool = pool
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="prefix-cache-reader")
        self._waiting: deque[_Read] = deque()
        self._reading: dict[Future[list[memoryview]], _Read] = {}
        self._arrived = threading.Event()

    def enqueue(self, scheduler: Scheduler, sequence: SequenceState) -> None:
        """Add a sequence, and ask for those of its blocks that lie in no page."""
        first, keys = scheduler.blocks_wanted(sequence)
        scheduler.add(sequence, loading=bool(keys))
        if not keys:
            return
        size = self._pool.page_size
        keys = keys[: max(1, _MOST_BYTES // self._pool.block_bytes)]
        blocks = range(first, first + len(keys))
        tokens = [sequence.tokens[i * size : (i + 1) * size] for i in blocks]
        until = time.monotonic() + self._patience_s
        self._waiting.append(_Read(sequence, first, keys, tokens, until))

    def arrive(self, scheduler: Scheduler) -> None:
        """Enter what was found, and begin to read what there is room for."""
        self._arrived.clear()
        for future in [future for future in self._reading if future.done()]:
            scheduler.loaded(*_result(self._reading.pop(future), future))
        if not self._waiting:
            return
        held = sum(len(sequence.found.payloads) for sequence in scheduler.waiting)
        held += sum(len(read.keys) for read in self._reading.values())
        most = _MOST_BYTES // self._pool.block_bytes
        while self._waiting:
            read = self._waiting[0]
            if read.sequence.status is not Status.LOADING:
                self._waiting.popleft()  # it has left
            elif time.monotonic() > read.until:
                self._waiting.popleft()
                scheduler.loaded(read.sequence, FoundBlocks())
            elif (held and held + len(read.keys) > most) or len(self._reading) >= _READERS:
                break
            else:
                self._waiting.popleft()
                held += len(read.keys)
                future = self._readers.submit(self._load, read)
                self._reading[future] = read
                future.add_done_callback(lambda _: self._arrived.set())

    def _load(self, read: _Read) -> list[memoryview]:
        """In a thread of its own."""
        size = max(1, _SLICE_BYTES // self._pool.block_bytes)
        payloads: list[memoryview] = []
        for start in range(0, len(read.keys), size):
            if self._closing or read.sequence.status is not Status.LOADING:
                break
            keys, tokens = read.keys[start : start + size], read.tokens[start : start + size]
            found = self._cache.load(keys, tokens)
            sound = list(takewhile(self._pool.is_finite, found))
            payloads += sound
            if len(sound) < len(found):
                self._cache.distrust(keys[len(sound) : len(found)])
            if len(sound) < len(keys):
                break
        return payloads if read.sequence.status is Status.LOADING else []

    def wait(self, seconds: float) -> None:
        """Wait for anything to arrive, but no longer than that."""
        self._arrived.wait(seconds)

    def load(self, loads: Sequence[BlockLoad]) -> None:
        """Write blocks to their pages."""
        for block in loads:
            self._pool.write_block(block.page, block.payload)

    def save(self, published: Sequence[PublishedBlock]) -> None:
        """Hand over copies of what pages hold, where the store may not have it yet."""
        if not published:
            return
        wanted = self._cache.wanted([block.key for block in published])
        blocks = [block for block, yes in zip(published, wanted, strict=True) if yes]
        if not blocks:
            return
        payloads = self._pool.read_blocks([block.page for block in blocks])
        self._cache.save(
            [
                Block(block.key, block.tokens, payload)
                for block, payload in zip(blocks, payloads, strict=True)
                if payload is not None
            ]
        )

    def reuse(self, shared: Sequence[PublishedBlock]) -> None:
        """Let the store's copies live on; those that it did not take before are offered again."""
        if shared:
            self._cache.use([block.key for block in shared])
            self.save(shared)

    def withdraw(self, keys: Sequence[bytes]) -> None:
        """Believe the store's copies of these blocks no more."""
        if keys:
            self._cache.distrust(keys)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was saved is stored or dropped; whether it is."""
        return self._cache.flush(timeout_s)

    def stats(self) -> CacheStats | None:
        """What the cache has counted."""
        return self._cache.stats()

    def close(self, timeout_s: float = 5.0) -> None:
        """Store what waits, as far as the time allows, and let go of the store."""
        self._closing = True
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._cache.close(timeout_s)


def open_blocks(settings: EngineSettings, folder: Path, runner: ModelRunner) -> BlockSource:
    """The store that the settings name, or none.

    Raises:
        ConfigError: the store's settings are wrong.
    """
    store = settings.prefix_cache.store
    if store is None or not settings.prefix_cache.enabled:
        return PoolOnly(runner.pool)
    pool = runner.pool
    identity = stored_identity(folder, runner, settings.dtype)
    try:
        cache = PrefixCache.open(store, identity, pool.block_bytes, pool.layout.dtype.itemsize)
    except StoreConfigError as error:
        raise ConfigError(f"prefix_cache.store: {error}") from error
    return StoredBlocks(cache, pool, identity, store.read_deadline_ms / 1000)


def _result(read: _Read, future: Future[list[memoryview]]) -> tuple[SequenceState, FoundBlocks]:
    error = future.exception()
    if error is not None:  # a bug, since faults of the store are misses: it costs time only
        log.error("reading the prefix cache failed", exc_info=error)
        return read.sequence, FoundBlocks()
    return read.sequence, FoundBlocks(read.first, tuple(future.result()))
