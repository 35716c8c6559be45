"""What a store of blocks offers, and how one is opened. It knows bytes, not what they mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar
from urllib.parse import SplitResult, urlsplit

from prefix_cache.errors import StoreConfigError

T = TypeVar("T")

#: What a store takes as a value.
Value = bytes | memoryview

#: Kinds of stores, by the schemes of their URLs.
KINDS = {"redis": "redis", "rediss": "redis", "unix": "redis", "lmdb": "lmdb", "memory": "memory"}


@dataclass(frozen=True)
class StoreStats:
    """What a store holds.

    Attributes:
        entries: blocks, or None where the store cannot tell.
        bytes: that they take, or None where the store cannot tell.
    """

    entries: int | None
    bytes: int | None


@dataclass(frozen=True)
class StoreOptions:
    """What all stores are told.

    Attributes:
        namespace: set before every key, so that several caches may share a store.
        ttl_s: seconds after which a block that was neither written nor touched is gone.
        max_bytes: that the store may take. Redis has its own ``maxmemory`` instead.
    """

    namespace: str
    ttl_s: float
    max_bytes: int

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", self.namespace):
            raise StoreConfigError(
                f"namespace {self.namespace!r}: 1 to 64 letters, digits, dots, _ or - wanted"
            )
        if self.ttl_s <= 0 or self.max_bytes < 1:
            raise StoreConfigError("ttl_s and max_bytes must be above 0")

    def key(self, key: bytes) -> bytes:
        """The key within the namespace."""
        return self.namespace.encode() + b":" + key


class BlockStore(Protocol):
    """Bytes by key, shared by threads and, but for ``memory://``, by processes.

    Every call takes at most ``deadline_s`` seconds, over all that it does, and every call but
    ``close`` raises StoreError: UNAVAILABLE, TIMEOUT, or FULL where a write finds no room.
    """

    def get_many(self, keys: Sequence[bytes], deadline_s: float) -> list[bytes | None]:
        """The values of ``keys``, in their order; None where there is none."""

    def has_many(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        """Which keys have a value."""

    def put_many(self, items: Sequence[tuple[bytes, Value]], deadline_s: float) -> None:
        """Write values, over those that are there. If it raises, some may be written. Nothing is
        kept of a buffer: it may change once the call has returned.
        """

    def touch_many(self, keys: Sequence[bytes], deadline_s: float) -> None:
        """Let keys live for another TTL, and be evicted later than those not touched."""

    def list_keys(self, most: int, deadline_s: float) -> list[bytes]:
        """Some keys of the namespace, as they were given, in no order; expired ones may be among
        them. All, if there are no more than ``most``.
        """

    def purge(self, deadline_s: float) -> None:
        """Delete everything in the namespace. If it raises, some may be left."""

    def stats(self, deadline_s: float) -> StoreStats:
        """What the store holds, all namespaces together where it cannot tell them apart."""

    def close(self) -> None:
        """Let go of files and connections. Later calls raise StoreError."""


def open_store(url: str, options: StoreOptions) -> BlockStore:
    """Open the store that ``url`` names.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://`` (see stores/redis.py), ``lmdb:///folder``
            (stores/lmdb.py) or ``memory://`` (stores/memory.py).
        options: see StoreOptions.

    Raises:
        StoreConfigError: the URL is wrong, or a package that it needs is missing.
        StoreError: UNAVAILABLE, where an embedded store cannot be opened. A server is not
            called before the first use.
    """
    return open_kind(url, options, _OPENERS)


def open_kind(
    url: str, options: StoreOptions, openers: Mapping[str, Callable[[SplitResult, StoreOptions], T]]
) -> T:
    """Open what ``url`` names by the one of ``openers`` for that kind of store; see ``KINDS``.

    Raises:
        StoreConfigError: the URL is wrong; and whatever the opener raises.
    """
    kind = KINDS[check_scheme(url)]
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise StoreConfigError("the store's URL cannot be parsed") from error
    return openers[kind](parts, options)


def check_scheme(url: str) -> str:
    """The kind of store that a URL names.

    Raises:
        StoreConfigError: there is no such kind.
    """
    scheme = url.partition("://")[0]
    if scheme not in KINDS:
        known = ", ".join(f"{scheme}://" for scheme in KINDS)
        raise StoreConfigError(f"a store's URL begins with one of {known}")
    return scheme


def _open_memory(parts: SplitResult, options: StoreOptions) -> BlockStore:
    from prefix_cache.stores.memory import MemoryStore

    return MemoryStore.from_url(parts, options)


def _open_lmdb(parts: SplitResult, options: StoreOptions) -> BlockStore:
    from prefix_cache.stores.lmdb import LmdbStore

    return LmdbStore.from_url(parts, options)


def _open_redis(parts: SplitResult, options: StoreOptions) -> BlockStore:
    from prefix_cache.stores.redis import RedisStore

    return RedisStore.from_url(parts, options)


_OPENERS: dict[str, Callable[[SplitResult, StoreOptions], BlockStore]] = {
    "redis": _open_redis,
    "lmdb": _open_lmdb,
    "memory": _open_memory,
}
