"""Writing behind: blocks are handed over at once and stored by a thread of their own."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from prefix_cache.access import StoreAccess
from prefix_cache.codec import BlockCodec
from prefix_cache.priority import give_way
from prefix_cache.recent import RecentKeys
from prefix_cache.scratch import Scratch

_LOGGER = logging.getLogger("prefix_cache")

#: Bytes of payload stored at once.
_BATCH_BYTES = 8 * 2**20
#: Keys whose lives wait to be lengthened; more are forgotten.
_MOST_TOUCHES = 4096


@dataclass(frozen=True)
class Block:
    """A block to store.

    Attributes:
        key: 32 bytes, of the chain.
        tokens: the block's token ids.
        payload: its KV.
    """

    key: bytes
    tokens: Sequence[int]
    payload: bytes | memoryview


class Writer:
    """A bounded queue of blocks and the daemon thread that stores them."""

    def __init__(
        self,
        access: StoreAccess,
        codec: BlockCodec,
        stored: RecentKeys,
        distrusted: RecentKeys,
        queue_bytes: int,
        deadline_s: float,
    ) -> None:
        """Start the thread.

        Args:
            access: to the store.
            codec: of the blocks.
            stored: keys known to be in the store. Not written again.
            distrusted: keys whose stored block was rejected. Written whether they are there or
                not.
            queue_bytes: most bytes of payload that wait or are being written.
            deadline_s: of each call to the store.
        """
        self._access = access
        self._codec = codec
        self._stored = stored
        self._distrusted = distrusted
        self._most = queue_bytes
        self._deadline_s = deadline_s
        self._buffers = [Scratch() for _ in range(max(1, _BATCH_BYTES // codec.payload_bytes))]
        self._changed = threading.Condition()
        self._queue: deque[Block] = deque()
        self._waiting: set[bytes] = set()
        self._touches: dict[bytes, None] = {}
        self._bytes = 0
        self._busy = self._closed = False
        self._thread = threading.Thread(target=self._run, name="prefix-cache-writer", daemon=True)
        self._thread.start()

    @property
    def queue_bytes(self) -> int:
        """Bytes of payload that wait or are being written."""
        return self._bytes

    def save(self, blocks: Sequence[Block]) -> None:
        """Take over blocks; those for which there is no room are dropped and counted."""
        dropped = 0
        with self._changed:
            for block in blocks:
                if block.key in self._waiting or block.key in self._stored:
                    continue
                if self._closed or self._bytes + self._codec.payload_bytes > self._most:
                    dropped += 1
                    continue
                self._queue.append(block)
                self._waiting.add(block.key)
                self._bytes += self._codec.payload_bytes
            self._changed.notify_all()
        if dropped:
            self._drop(dropped, "the write queue is full")

    def wanted(self, keys: Sequence[bytes]) -> list[bool]:
        """Of each block, whether ``save`` would queue it now; the rest of the new ones is counted
        as dropped.
        """
        with self._changed:
            room = (self._most - self._bytes) // self._codec.payload_bytes
            new = [not (key in self._waiting or key in self._stored) for key in keys]
            answers = []
            for fresh in new:
                taken = fresh and not self._closed and room > 0
                room -= taken
                answers.append(taken)
        dropped = sum(new) - sum(answers)
        if dropped:
            self._drop(dropped, "the write queue is full")
        return answers

    def touch(self, keys: Sequence[bytes]) -> None:
        """Let keys live longer, when there is time."""
        with self._changed:
            room = 0 if self._closed else _MOST_TOUCHES - len(self._touches)
            self._touches.update(dict.fromkeys(keys[:room]))
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was taken over is stored or dropped; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending(), timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Take nothing more, store what waits, end the thread; what does not fit is dropped.

        Returns:
            Whether the thread has ended.
        """
        end = time.monotonic() + timeout_s
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.flush(timeout_s)
        with self._changed:
            left = list(self._queue)
            self._queue.clear()
            self._touches.clear()
            self._release(left)
        if left:
            self._drop(len(left), "the cache was closed")
        self._thread.join(max(0.0, end - time.monotonic()) + self._deadline_s)
        return not self._thread.is_alive()

    def _pending(self) -> bool:
        return bool(self._queue or self._touches or self._busy)

    def _run(self) -> None:
        give_way()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._touches or self._closed)
                if not self._queue and not self._touches:
                    return
                batch, touches = self._next_batch(), list(self._touches)
                self._touches.clear()
                self._busy = True
            try:
                if batch:
                    self._store(batch)
                if touches:
                    self._access.touch_many(touches, self._deadline_s)
            except Exception:  # a bug must not end all writing
                _LOGGER.exception("prefix cache: blocks not stored")
                self._access.counters.dropped(len(batch))
            finally:
                with self._changed:
                    self._busy = False
                    self._release(batch)

    def _release(self, blocks: Sequence[Block]) -> None:
        """Blocks are stored or dropped. Whoever calls holds the lock."""
        self._bytes -= self._codec.payload_bytes * len(blocks)
        self._waiting.difference_update(block.key for block in blocks)
        self._changed.notify_all()

    def _next_batch(self) -> list[Block]:
        most = min(len(self._buffers), len(self._queue))
        return [self._queue.popleft() for _ in range(most)]

    def _store(self, batch: list[Block]) -> None:
        there = self._access.has_many([block.key for block in batch], self._deadline_s)
        if there is None:
            self._drop(len(batch), "the store does not answer")
            return
        known = [block.key for block, yes in zip(batch, there, strict=True) if yes]
        self._stored.add(key for key in known if key not in self._distrusted)
        missing = [block for block in batch if block.key not in self._stored]
        items = [
            (block.key, buffer.join(self._codec.parts(block.key, block.tokens, block.payload)))
            for block, buffer in zip(missing, self._buffers, strict=False)
        ]
        if not items:
            return
        if self._access.put_many(items, self._deadline_s):
            keys = [key for key, _ in items]
            self._distrusted.discard(keys)
            self._stored.add(keys)
        else:
            self._drop(len(items), "the store does not take them")

    def _drop(self, blocks: int, why: str) -> None:
        self._access.counters.dropped(blocks)
        self._access.log.warn("dropped", f"prefix cache: {blocks} blocks not stored: {why}")
