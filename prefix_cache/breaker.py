"""A circuit breaker: an outage costs a few failed calls, then one probe now and then."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from enum import StrEnum


class BreakerState(StrEnum):
    """Closed lets all calls through, open none, half-open a single probe."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """Asked before each call, told of its outcome. Thread-safe.

    After ``threshold`` failures in a row it opens. After a back-off, doubled with each probe
    that fails up to a cap, one call may try again: its success closes, its failure opens.
    """

    def __init__(
        self,
        threshold: int = 5,
        backoff_s: float = 1.0,
        backoff_cap_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if threshold < 1 or not 0 < backoff_s <= backoff_cap_s:
            raise ValueError("threshold of at least 1 and 0 < backoff_s <= backoff_cap_s wanted")
        self._threshold = threshold
        self._first_backoff = self._backoff = backoff_s
        self._cap = backoff_cap_s
        self._clock = clock
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._retry_at = 0.0
        self._transitions: Counter[BreakerState] = Counter()

    @property
    def state(self) -> BreakerState:
        """The state as the last call left it."""
        return self._state

    @property
    def transitions(self) -> Mapping[BreakerState, int]:
        """How often each state was entered, the first one aside."""
        with self._lock:
            return dict(self._transitions)

    def allow(self) -> bool:
        """Whether a call may be made now. Who is allowed reports ``success`` or ``failure``.

        A probe that never reports is given up after one more back-off.
        """
        with self._lock:
            if self._state is BreakerState.CLOSED:
                return True
            now = self._clock()
            if now < self._retry_at:
                return False
            self._retry_at = now + self._backoff
            self._enter(BreakerState.HALF_OPEN)
            return True

    def success(self) -> None:
        """The store answered. While open, a late answer changes nothing."""
        with self._lock:
            self._failures = 0
            if self._state is BreakerState.HALF_OPEN:
                self._backoff = self._first_backoff
                self._enter(BreakerState.CLOSED)

    def failure(self) -> None:
        """The store did not answer, or not in time."""
        with self._lock:
            if self._state is BreakerState.OPEN:
                return
            self._failures += 1
            if self._state is BreakerState.HALF_OPEN:
                self._backoff = min(self._cap, self._backoff * 2)
            elif self._failures < self._threshold:
                return
            self._retry_at = self._clock() + self._backoff
            self._enter(BreakerState.OPEN)

    def _enter(self, state: BreakerState) -> None:
        if state is not self._state:
            self._state = state
            self._transitions[state] += 1
