"""What a prefix cache counts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from prefix_cache.breaker import BreakerState
from prefix_cache.errors import Rejection, StoreFault


@dataclass(frozen=True)
class Latency:
    """Durations of calls to the store, in seconds."""

    count: int = 0
    total_s: float = 0.0
    max_s: float = 0.0

    def plus(self, seconds: float) -> Latency:
        """With one more."""
        return Latency(self.count + 1, self.total_s + seconds, max(self.max_s, seconds))


@dataclass(frozen=True)
class CacheStats:
    """Counted since the cache was opened; blocks unless it says otherwise.

    Attributes:
        hits: asked for, found and verified.
        misses: asked for and not given, whatever the reason.
        rejected: found and not believed, by reason. Misses too.
        unanswered: asked for while the store failed or the breaker was open. Misses too.
        written: stored.
        dropped: not stored: no room in the queue, the store failing, or the cache closed.
        errors: failed calls, by kind.
        bytes_read: as stored.
        bytes_written: as stored.
        read: durations of reads.
        write: durations of writes.
        queue_bytes: of payloads that wait to be written, now.
        breaker: its state now.
        transitions: how often the breaker entered each state.
    """

    hits: int
    misses: int
    rejected: Mapping[Rejection, int]
    unanswered: int
    written: int
    dropped: int
    errors: Mapping[StoreFault, int]
    bytes_read: int
    bytes_written: int
    read: Latency
    write: Latency
    queue_bytes: int
    breaker: BreakerState
    transitions: Mapping[BreakerState, int]


class Counters:
    """The counters behind CacheStats. Thread-safe: a method is one change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: Counter[str] = Counter()
        self._rejected: Counter[Rejection] = Counter()
        self._errors: Counter[StoreFault] = Counter()
        self._read = Latency()
        self._write = Latency()

    def asked(self, blocks: int, hits: int, unanswered: int = 0) -> None:
        """Blocks were asked for."""
        with self._lock:
            self._sums.update(hits=hits, misses=blocks - hits, unanswered=unanswered)

    def rejected(self, reason: Rejection) -> None:
        """A block was not believed."""
        with self._lock:
            self._rejected[reason] += 1

    def failed(self, fault: StoreFault) -> None:
        """A call failed."""
        with self._lock:
            self._errors[fault] += 1

    def dropped(self, blocks: int) -> None:
        """Blocks will not be stored."""
        with self._lock:
            self._sums["dropped"] += blocks

    def read(self, stored_bytes: int, seconds: float) -> None:
        """A read was answered."""
        with self._lock:
            self._sums["bytes_read"] += stored_bytes
            self._read = self._read.plus(seconds)

    def wrote(self, blocks: int, stored_bytes: int, seconds: float) -> None:
        """A write was answered."""
        with self._lock:
            self._sums.update(written=blocks, bytes_written=stored_bytes)
            self._write = self._write.plus(seconds)

    def snapshot(
        self, queue_bytes: int, breaker: BreakerState, transitions: Mapping[BreakerState, int]
    ) -> CacheStats:
        """All of it at one moment."""
        with self._lock:
            return CacheStats(
                hits=self._sums["hits"],
                misses=self._sums["misses"],
                rejected=dict(self._rejected),
                unanswered=self._sums["unanswered"],
                written=self._sums["written"],
                dropped=self._sums["dropped"],
                errors=dict(self._errors),
                bytes_read=self._sums["bytes_read"],
                bytes_written=self._sums["bytes_written"],
                read=self._read,
                write=self._write,
                queue_bytes=queue_bytes,
                breaker=breaker,
                transitions=transitions,
            )
