"""The tables of an LMDB folder, and what a write transaction does to them.

    blocks  key → value
    index   key → order, expiry, size
    order   order → key     order: nanoseconds of the last use, made unique, big-endian
    totals  "bytes" → sum of sizes

Every transaction leaves all four in agreement, so a process that is killed leaves either all of
a transaction or nothing of it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import lmdb

from prefix_cache.store import Value

_INDEX = struct.Struct(">QQQ")
_NUMBER = struct.Struct(">Q")
_TOTAL = b"bytes"
_PAGE = 4096
#: What an entry takes beside its value: page header, index, order.
_OVERHEAD = 256
#: A transaction is not lengthened by more expired keys than this.
_EXPIRED_AT_ONCE = 256


@dataclass(frozen=True)
class IndexEntry:
    """What is known of a key without its value: order and expiry in ns, size in bytes."""

    order: int
    expires_at: int
    size: int


class Tables:
    """The tables of one environment. Whoever calls has the transaction."""

    def __init__(self, environment: lmdb.Environment) -> None:
        self._blocks = environment.open_db(b"blocks")
        self._index = environment.open_db(b"index")
        self._order = environment.open_db(b"order")
        self._totals = environment.open_db(b"totals")

    def entry(self, txn: lmdb.Transaction[bytes], key: bytes) -> IndexEntry | None:
        """What the index says of a key."""
        packed = txn.get(key, db=self._index)
        return None if packed is None else IndexEntry(*_INDEX.unpack(packed))

    def value(self, txn: lmdb.Transaction[bytes], key: bytes) -> bytes | None:
        """A key's value, expired or not."""
        return txn.get(key, db=self._blocks)

    def total(self, txn: lmdb.Transaction[bytes]) -> int:
        """Bytes that all entries take."""
        packed = txn.get(_TOTAL, db=self._totals)
        total: int = 0 if packed is None else _NUMBER.unpack(packed)[0]
        return total

    def count(self, txn: lmdb.Transaction[bytes]) -> int:
        """Number of entries."""
        return txn.stat(self._index)["entries"]

    def put(
        self, txn: lmdb.Transaction[bytes], key: bytes, value: Value, now: int, expires_at: int
    ) -> None:
        """Write a value, as the one used last."""
        self.delete(txn, key)
        size = size_of(value)
        order = self._next_order(txn, now)
        txn.put(key, value, db=self._blocks)
        txn.put(key, _INDEX.pack(order, expires_at, size), db=self._index)
        txn.put(_NUMBER.pack(order), key, db=self._order)
        self._add(txn, size)

    def touch(self, txn: lmdb.Transaction[bytes], key: bytes, now: int, expires_at: int) -> None:
        """Make a key the one used last; one that is not there stays so."""
        entry = self.entry(txn, key)
        if entry is None:
            return
        order = self._next_order(txn, now)
        txn.delete(_NUMBER.pack(entry.order), db=self._order)
        txn.put(_NUMBER.pack(order), key, db=self._order)
        txn.put(key, _INDEX.pack(order, expires_at, entry.size), db=self._index)

    def delete(self, txn: lmdb.Transaction[bytes], key: bytes) -> None:
        """Remove a key, if it is there."""
        entry = self.entry(txn, key)
        if entry is None:
            return
        txn.delete(key, db=self._blocks)
        txn.delete(key, db=self._index)
        txn.delete(_NUMBER.pack(entry.order), db=self._order)
        self._add(txn, -entry.size)

    def evict(self, txn: lmdb.Transaction[bytes], budget: int, now: int) -> None:
        """Remove the keys used longest ago until the rest takes ``budget`` bytes at most, and
        some beside them that have expired.
        """
        total, expired = self.total(txn), 0
        while (oldest := self._oldest(txn)) is not None:
            entry = self.entry(txn, oldest)
            if entry is None or (total <= budget and entry.expires_at > now):
                return
            if total <= budget:
                expired += 1
            if expired > _EXPIRED_AT_ONCE:
                return
            self.delete(txn, oldest)
            total -= entry.size

    def keys_from(self, txn: lmdb.Transaction[bytes], prefix: bytes, limit: int) -> list[bytes]:
        """The first ``limit`` keys that begin with ``prefix``."""
        keys: list[bytes] = []
        with txn.cursor(self._index) as cursor:
            there = cursor.set_range(prefix)
            while there and len(keys) < limit and cursor.key().startswith(prefix):
                keys.append(cursor.key())
                there = cursor.next()
        return keys

    def check_integrity(self, txn: lmdb.Transaction[bytes]) -> None:
        """Prove that the tables agree.

        Raises:
            AssertionError: they do not. A bug.
        """
        index = {key: IndexEntry(*_INDEX.unpack(row)) for key, row in _rows(txn, self._index)}
        order = {key: _NUMBER.unpack(number)[0] for number, key in _rows(txn, self._order)}
        sizes = {key: size_of(value) for key, value in _rows(txn, self._blocks)}
        if {key: entry.order for key, entry in index.items()} != order:
            raise AssertionError("index and order disagree")
        if {key: entry.size for key, entry in index.items()} != sizes:
            raise AssertionError("index and blocks disagree")
        if sum(sizes.values()) != self.total(txn):
            raise AssertionError("the total is not the sum of sizes")

    def _oldest(self, txn: lmdb.Transaction[bytes]) -> bytes | None:
        with txn.cursor(self._order) as cursor:
            return cursor.value() if cursor.first() else None

    def _next_order(self, txn: lmdb.Transaction[bytes], now: int) -> int:
        with txn.cursor(self._order) as cursor:
            last: int = _NUMBER.unpack(cursor.key())[0] if cursor.last() else 0
        return max(now, last + 1)

    def _add(self, txn: lmdb.Transaction[bytes], size: int) -> None:
        txn.put(_TOTAL, _NUMBER.pack(self.total(txn) + size), db=self._totals)


def size_of(value: Value) -> int:
    """Bytes that an entry takes on disk, whole pages and what belongs to it included."""
    return -(-(len(value) + _OVERHEAD) // _PAGE) * _PAGE


def _rows(txn: lmdb.Transaction[bytes], table: lmdb._Database) -> Iterable[tuple[bytes, bytes]]:
    with txn.cursor(table) as cursor:
        yield from cursor
