"""Small caches for tests, and a store that does as it is told."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from prefix_cache.cache import PrefixCache
from prefix_cache.codec import BlockCodec
from prefix_cache.errors import StoreError, StoreFault
from prefix_cache.keys import Identity, block_keys
from prefix_cache.settings import PrefixCacheSettings
from prefix_cache.store import StoreOptions, StoreStats, Value
from prefix_cache.stores.memory import MemoryStore
from prefix_cache.writer import Block

SIZE = 1024
BLOCK = 4
IDENTITY = Identity(b"w", b"t", "float32", 2, 2, 8, BLOCK)


class TestStore(MemoryStore):
    """In memory, with a fault or a gate where one is set; counts the calls."""

    __test__ = False

    def __init__(self) -> None:
        super().__init__(StoreOptions("kv", 3600, 2**30))
        self.fault: StoreFault | None = None
        self.full = False
        self.open = threading.Event()
        self.open.set()
        self.calls: list[str] = []

    def get_many(self, keys: Sequence[bytes], deadline_s: float) -> list[bytes | None]:
        self._called("get")
        return super().get_many(keys, deadline_s)

    def has_many(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        self._called("has")
        return super().has_many(keys, deadline_s)

    def put_many(self, items: Sequence[tuple[bytes, Value]], deadline_s: float) -> None:
        self._called("put")
        if self.full:
            raise StoreError(StoreFault.FULL, "as told")
        super().put_many(items, deadline_s)

    def touch_many(self, keys: Sequence[bytes], deadline_s: float) -> None:
        self._called("touch")
        super().touch_many(keys, deadline_s)

    def stats(self, deadline_s: float) -> StoreStats:
        self._called("stats")
        return super().stats(deadline_s)

    def _called(self, name: str) -> None:
        assert self.open.wait(20)
        self.calls.append(name)
        if self.fault is not None:
            raise StoreError(self.fault, "as told")


class Prompt:
    """A prompt with its blocks: tokens, keys and payloads that follow from them."""

    def __init__(
        self, seed: int, blocks: int = 5, salt: bytes = b"", identity: Identity = IDENTITY
    ) -> None:
        rng = random.Random(seed)
        tokens = [rng.randrange(50_000) for _ in range(blocks * BLOCK)]
        self.keys = block_keys(identity, tokens, salt=salt)
        self.tokens = [tokens[start : start + BLOCK] for start in range(0, len(tokens), BLOCK)]
        self.payloads = [rng.randbytes(SIZE) for _ in self.keys]

    def blocks(self) -> list[Block]:
        return [
            Block(key, tokens, payload)
            for key, tokens, payload in zip(self.keys, self.tokens, self.payloads, strict=True)
        ]


@contextmanager
def cache_on(
    store: MemoryStore,
    settings: PrefixCacheSettings | None = None,
    codec: BlockCodec | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[PrefixCache]:
    cache = PrefixCache(
        store,
        codec or BlockCodec(IDENTITY.digest(), SIZE),
        settings or PrefixCacheSettings(),
        clock,
    )
    try:
        yield cache
    finally:
        cache.close(1)


def stored(cache: PrefixCache, prompt: Prompt) -> None:
    cache.save(prompt.blocks())
    assert cache.flush(20)
