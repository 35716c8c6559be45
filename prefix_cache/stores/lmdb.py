"""``lmdb:///folder``: blocks in a folder of this machine, shared by its processes.

    lmdb:///var/cache/specdec      an absolute path; /~/ at its start is the home folder
    lmdb:///folder?sync=false      do not wait for the disk: faster, and after a power cut the
                                   folder may have to be deleted

Not for network file systems. All processes of a folder use the same ``max_bytes``; it bounds the
file, so a fifth of it is left free for what is being written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self, TypeVar
from urllib.parse import SplitResult, unquote

import lmdb

from prefix_cache.errors import StoreConfigError, StoreError, StoreFault
from prefix_cache.store import StoreOptions, StoreStats, Value
from prefix_cache.stores.deadline import Deadline
from prefix_cache.stores.gate import Gate
from prefix_cache.stores.lmdb_tables import Tables, size_of
from prefix_cache.stores.mutex import FileMutex
from prefix_cache.stores.url import flag, option, query_of

_LEAST_BYTES = 2**20
_READERS = 1024
#: Share of the file that entries may take, and share of that in one transaction. Pages that a
#: transaction frees can be used again two transactions later.
_BUDGET = 0.8
_TRANSACTION = 1 / 32
#: Share of the budget evicted each time that the file is too fragmented for a block; and tries.
_SPARE = 0.1
_TRIES = 5
_PURGED_AT_ONCE = 256
_DAMAGE = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.VersionMismatchError,
)
_OPEN_S = 2.0
_CLOSE_S = 10.0

ResultT = TypeVar("ResultT")


class LmdbStore:
    """Blocks in an LMDB environment. Reads wait for nobody; writers take turns."""

    def __init__(
        self,
        folder: Path,
        options: StoreOptions,
        sync: bool = True,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Open the folder, made if it is missing, private to its user.

        Raises:
            StoreConfigError: ``max_bytes`` is below a mebibyte, or this process has it open.
            StoreError: UNAVAILABLE, where it cannot be opened; TIMEOUT, where another process
                holds it.
        """
        if options.max_bytes < _LEAST_BYTES:
            raise StoreConfigError(f"lmdb: max_bytes must be at least {_LEAST_BYTES}")
        self._options = options
        self._folder = folder
        self._budget = int(options.max_bytes * _BUDGET)
        self._clock_ns = clock_ns
        self._gate = Gate()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._mutex = FileMutex(folder / "write.lock")
        except OSError as error:
            raise StoreError(StoreFault.UNAVAILABLE, f"lmdb at {folder}: {error}") from error
        try:
            with self._mutex.held(Deadline(_OPEN_S)), self._translated():
                self._environment = _open(folder, options.max_bytes, sync)
                self._tables = Tables(self._environment)
        except BaseException:
            self._mutex.close()
            raise

    @classmethod
    def from_url(cls, parts: SplitResult, options: StoreOptions) -> Self:
        """Open the folder of a URL; raises as the class does, and where the URL is wrong."""
        query = query_of(parts, ("sync",))
        path = unquote(parts.path)
        if parts.netloc or not path.strip("/"):
            raise StoreConfigError("lmdb: an absolute path is wanted, such as lmdb:///var/cache/x")
        folder = Path(path[1:]).expanduser() if path.startswith("/~") else Path(path)
        return cls(folder, options, sync=option(query, "sync", flag, True))

    def get_many(self, keys: Sequence[bytes], deadline_s: float) -> list[bytes | None]:
        """See BlockStore."""
        deadline, now = Deadline(deadline_s), self._clock_ns()
        values: list[bytes | None] = []
        with self._read() as txn:
            for key in map(self._options.key, keys):
                deadline.left()
                entry = self._tables.entry(txn, key)
                fresh = entry is not None and entry.expires_at > now
                values.append(self._tables.value(txn, key) if fresh else None)
        return values

    def has_many(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        """See BlockStore."""
        now = self._clock_ns()
        with self._read() as txn:
            entries = [self._tables.entry(txn, self._options.key(key)) for key in keys]
        return [entry is not None and entry.expires_at > now for entry in entries]

    def put_many(self, items: Sequence[tuple[bytes, Value]], deadline_s: float) -> None:
        """See BlockStore."""
        deadline = Deadline(deadline_s)
        batch: list[tuple[bytes, Value]] = []
        size, most = 0, int(self._budget * _TRANSACTION)
        for key, value in items:
            if size_of(value) > self._budget // 4:
                raise StoreError(StoreFault.FULL, f"{len(value)} bytes are too many for max_bytes")
            if batch and size + size_of(value) > most:
                self._put(batch, size, deadline)
                batch, size = [], 0
            batch.append((self._options.key(key), value))
            size += size_of(value)
        if batch:
            self._put(batch, size, deadline)

    def touch_many(self, keys: Sequence[bytes], deadline_s: float) -> None:
        """See BlockStore."""
        now = self._clock_ns()
        with self._write(Deadline(deadline_s)) as txn:
            for key in keys:
                self._tables.touch(txn, self._options.key(key), now, self._expiry(now))

    def list_keys(self, most: int, deadline_s: float) -> list[bytes]:
        """See BlockStore."""
        prefix = self._options.key(b"")
        with self._read() as txn:
            keys = self._tables.keys_from(txn, prefix, most)
        return [key.removeprefix(prefix) for key in keys]

    def purge(self, deadline_s: float) -> None:
        """See BlockStore."""
        deadline, prefix = Deadline(deadline_s), self._options.key(b"")
        while True:
            with self._write(deadline) as txn:
                keys = self._tables.keys_from(txn, prefix, _PURGED_AT_ONCE)
                for key in keys:
                    self._tables.delete(txn, key)
            if len(keys) < _PURGED_AT_ONCE:
                return

    def stats(self, deadline_s: float) -> StoreStats:
        """Entries and their bytes on disk, all namespaces together."""
        with self._read() as txn:
            return StoreStats(self._tables.count(txn), self._tables.total(txn))

    def check_integrity(self) -> None:
        """Prove that index, order, values and total agree.

        Raises:
            AssertionError: they do not. A bug.
        """
        with self._read() as txn:
            self._tables.check_integrity(txn)

    def close(self) -> None:
        """See BlockStore. Waits for calls that are under way."""
        if self._gate.shut(_CLOSE_S):
            self._environment.close()
            self._mutex.close()

    def _put(self, batch: list[tuple[bytes, Value]], size: int, deadline: Deadline) -> None:
        def put(txn: lmdb.Transaction[bytes], now: int) -> None:
            for key, value in batch:
                self._tables.put(txn, key, value, now, self._expiry(now))

        self._write_evicting(size, deadline, put)

    def _write_evicting(
        self,
        size: int,
        deadline: Deadline,
        write: Callable[[lmdb.Transaction[bytes], int], ResultT],
    ) -> ResultT:
        """One transaction of ``write(transaction, now)``, which adds at most ``size`` bytes; where
        the file is too fragmented, others before it that evict.
        """
        for attempt in range(_TRIES):
            now = self._clock_ns()
            spare = int(self._budget * _SPARE) * attempt
            try:
                if attempt:
                    with self._write(deadline) as txn:
                        self._environment.reader_check()
                        self._tables.evict(txn, self._budget - size - spare, now)
                with self._write(deadline) as txn:
                    self._tables.evict(txn, self._budget - size, now)
                    return write(txn, now)
            except _MapFull:
                continue
        raise StoreError(StoreFault.FULL, f"lmdb at {self._folder}: no room for {size} bytes")

    def _expiry(self, now: int) -> int:
        return now + int(self._options.ttl_s * 1e9)

    @contextmanager
    def _read(self) -> Iterator[lmdb.Transaction[bytes]]:
        with self._gate.entered(), self._translated(), self._environment.begin() as txn:
            yield txn

    @contextmanager
    def _write(self, deadline: Deadline) -> Iterator[lmdb.Transaction[bytes]]:
        """A transaction that is committed at the end, and undone by an error."""
        with (
            self._gate.entered(),
            self._mutex.held(deadline),
            self._translated(),
            self._environment.begin(write=True) as txn,
        ):
            yield txn

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Errors of LMDB as those of this package."""
        where = f"lmdb at {self._folder}"
        try:
            yield
        except lmdb.MapFullError as error:
            raise _MapFull(StoreFault.FULL, f"{where}: {error}") from error
        except lmdb.DiskError as error:
            raise StoreError(StoreFault.FULL, f"{where}: {error}") from error
        except lmdb.MapResizedError as error:
            message = f"{where}: another process has a larger max_bytes; use one for all"
            raise StoreError(StoreFault.UNAVAILABLE, message) from error
        except _DAMAGE as error:
            message = f"{where}: {error}; stop all that use the folder, and delete it"
            raise StoreError(StoreFault.UNAVAILABLE, message) from error
        except lmdb.Error as error:
            raise StoreError(StoreFault.UNAVAILABLE, f"{where}: {error}") from error


class _MapFull(StoreError):
    """No run of free pages is long enough."""


def _open(folder: Path, max_bytes: int, sync: bool) -> lmdb.Environment:
    environment = lmdb.Environment(
        str(folder),
        map_size=max_bytes,
        mode=0o600,
        max_dbs=4,
        max_readers=_READERS,
        sync=sync,
        metasync=False,
    )
    environment.reader_check()
    return environment
