"""The prefix cache as the engine uses it: nothing in here raises because of the store."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from prefix_cache.access import StoreAccess
from prefix_cache.codec import BlockCodec
from prefix_cache.errors import BlockRejected, StoreConfigError, StoreError
from prefix_cache.keys import KEY_BYTES, Identity, pack_tokens
from prefix_cache.recent import RecentKeys
from prefix_cache.settings import PrefixCacheSettings
from prefix_cache.stats import CacheStats
from prefix_cache.store import BlockStore, StoreStats, open_store
from prefix_cache.stores.reopening import ReopeningStore
from prefix_cache.writer import Block, Writer

_LOGGER = logging.getLogger("prefix_cache")

#: Bytes of payload fetched at once: a miss ends the reading, so not all are asked for together.
_FETCH_BYTES = 8 * 2**20
_KEYS_KNOWN = 2**16
#: How long a block is believed to be in the store without asking again.
_KNOWN_S = 600.0


class PrefixCache:
    """Verified blocks of one identity, read by deadline and written behind. Thread-safe."""

    def __init__(
        self,
        store: BlockStore,
        codec: BlockCodec,
        settings: PrefixCacheSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take over ``store``, which is closed with the cache. ``clock`` is the breaker's."""
        self._settings = settings
        self._codec = codec
        self._access = StoreAccess(store, settings.breaker(clock))
        self._stored = RecentKeys(_KEYS_KNOWN, min(_KNOWN_S, settings.ttl_s / 4))
        self._touched = RecentKeys(_KEYS_KNOWN, settings.ttl_s / 4)
        self._distrusted = RecentKeys(_KEYS_KNOWN, settings.ttl_s)
        self._writer = Writer(
            self._access,
            codec,
            self._stored,
            self._distrusted,
            settings.queue_bytes,
            settings.write_deadline_ms / 1000,
        )

    @classmethod
    def open(
        cls,
        settings: PrefixCacheSettings,
        identity: Identity,
        payload_bytes: int,
        element_bytes: int,
    ) -> PrefixCache:
        """The cache that ``settings`` describe. A store that cannot be opened now holds no
        blocks until it can.

        Args:
            settings: see there.
            identity: of the model whose blocks these are.
            payload_bytes: bytes of a block's KV.
            element_bytes: bytes of a number in it.

        Raises:
            StoreConfigError: the settings are wrong.
        """
        if settings.queue_bytes < payload_bytes:
            raise StoreConfigError(
                f"queue_bytes: {settings.queue_bytes} hold no block of {payload_bytes} bytes"
            )
        secret = settings.secret_bytes()
        codec = BlockCodec(
            identity.digest(), payload_bytes, element_bytes, settings.compression, secret
        )
        opener = partial(open_store, settings.store_url(), settings.store_options())
        try:
            store = opener()
        except StoreError as error:
            _LOGGER.warning("prefix cache: without stored blocks for now: %s", error)
            store = ReopeningStore(opener)
        return cls(store, codec, settings)

    def load(
        self,
        keys: Sequence[bytes],
        token_blocks: Sequence[Sequence[int]],
        deadline_s: float | None = None,
    ) -> list[memoryview]:
        """The longest run of stored blocks from the first one on, each of them verified.

        Blocks, so it belongs in a thread that may wait.

        Args:
            keys: of a chain, in its order.
            token_blocks: each block's token ids.
            deadline_s: None takes the one of the settings. What was read by then is returned.

        Returns:
            Payloads of the first blocks, possibly of none.

        Raises:
            ValueError: keys and blocks do not belong together.
        """
        if len(keys) != len(token_blocks):
            raise ValueError(f"{len(keys)} keys for {len(token_blocks)} blocks")
        limit_s = self._settings.read_deadline_ms / 1000 if deadline_s is None else deadline_s
        end = time.monotonic() + limit_s
        payloads: list[memoryview] = []
        chunk = max(1, _FETCH_BYTES // self._codec.payload_bytes)
        unanswered = 0
        readable = next((i for i, key in enumerate(keys) if key in self._distrusted), len(keys))
        while len(payloads) < readable and (left := end - time.monotonic()) > 0:
            start = len(payloads)
            wanted = keys[start : min(start + chunk, readable)]
            values = self._access.get_many(wanted, left)
            if values is None:
                unanswered = len(keys) - start
                break
            payloads += self._verified(wanted, token_blocks[start : start + len(wanted)], values)
            if len(payloads) < start + len(wanted):
                # what follows is not reachable, so it is to be written again
                self._stored.discard(keys[len(payloads) :])
                break
        self._access.counters.asked(len(keys), len(payloads), unanswered)
        self.use(keys[: len(payloads)])
        return payloads

    def save(self, blocks: Sequence[Block]) -> None:
        """Hand over blocks to be stored; returns at once.

        Nothing is copied: payloads and tokens must not change any more.

        Raises:
            ValueError: a block's key or payload has the wrong size, or its tokens are none.
        """
        for block in blocks:
            size = memoryview(block.payload).nbytes
            if len(block.key) != KEY_BYTES or size != self._codec.payload_bytes:
                raise ValueError(
                    f"a block of {self._codec.payload_bytes} bytes with a key of {KEY_BYTES} "
                    f"wanted, not {size} and {len(block.key)}"
                )
            pack_tokens(block.tokens)
        self._writer.save(blocks)

    def wanted(self, keys: Sequence[bytes]) -> list[bool]:
        """Which blocks are to be handed over to :meth:`save`: neither stored lately nor waiting,
        with room in the queue. Others for which there is no room are counted as dropped.
        """
        return self._writer.wanted(keys)

    def distrust(self, keys: Sequence[bytes]) -> None:
        """Believe these blocks no more, sound as they look, until they are written anew."""
        self._distrusted.add(keys)
        self._stored.discard(keys)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was saved is stored or dropped; whether it is."""
        return self._writer.flush(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Store what waits, as far as the time allows, and close the store.

        A write that is under way then may take until its own deadline.
        """
        self._writer.close(timeout_s)
        self._access.close()

    def stats(self) -> CacheStats:
        """What was counted so far."""
        breaker = self._access.breaker
        return self._access.counters.snapshot(
            self._writer.queue_bytes, breaker.state, breaker.transitions
        )

    def store_stats(self) -> StoreStats:
        """What the store holds, as far as it can tell in time. May wait like ``load``."""
        return self._access.stats(self._settings.read_deadline_ms / 1000)

    def _verified(
        self,
        keys: Sequence[bytes],
        token_blocks: Sequence[Sequence[int]],
        values: Sequence[bytes | None],
    ) -> list[memoryview]:
        """Payloads up to the first that is missing or rejected."""
        payloads: list[memoryview] = []
        for key, tokens, value in zip(keys, token_blocks, values, strict=True):
            if value is None:
                break
            try:
                payloads.append(self._codec.decode(value, key, tokens))
            except BlockRejected as rejection:
                self._access.counters.rejected(rejection.reason)
                self._access.log.warn(
                    f"rejected {rejection.reason}", f"prefix cache: key {key.hex()}: {rejection}"
                )
                self._distrusted.add([key])
                break
        return payloads

    def use(self, keys: Sequence[bytes]) -> None:
        """Blocks in use live on, wherever they were found. Returns at once."""
        due = [key for key in keys if key not in self._touched]
        if due:
            self._touched.add(due)
            self._writer.touch(due)
