"""How much each caller has asked for lately, and whether it may ask for more. Knows no HTTP.

Nothing here awaits, so that on one event loop a check and what follows from it are one: no number
of requests at once gets past a limit.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

WINDOW_S = 60.0
#: When a caller that has too many requests open may try again: nobody knows when one will end.
_CONCURRENCY_RETRY_S = 1.0


class OverLimit(Exception):
    """A limit is reached.

    Attributes:
        what: the limit, in words.
        retry_s: seconds after which the same request may pass; None is never.
    """

    def __init__(self, what: str, retry_s: float | None) -> None:
        super().__init__(what)
        self.what = what
        self.retry_s = retry_s


@dataclass(frozen=True)
class Rates:
    """Limits of one caller; None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None


@dataclass(eq=False)
class Entry:
    """Something that counts in a window until it leaves it."""

    until: float
    cost: int


@dataclass(frozen=True)
class Standing:
    """What is left in a window.

    Attributes:
        limit: of the window.
        remaining: that may still be asked for now.
        reset_s: seconds until all of it may be, if nothing is asked for.
    """

    limit: int
    remaining: int
    reset_s: float


class SlidingWindow:
    """At most ``limit`` in any ``WINDOW_S`` seconds, wherever they begin."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        self._entries: deque[Entry] = deque()
        self._used = 0

    def wait_s(self, cost: int) -> float | None:
        """Seconds until ``cost`` more would fit: 0 is now, None never."""
        now = self._forget()
        free = self._limit - self._used
        if cost <= free:
            return 0.0
        for entry in self._entries:
            free += entry.cost
            if cost <= free:
                return entry.until - now
        return None

    def take(self, cost: int) -> Entry:
        """Count ``cost``; see ``wait_s`` first."""
        entry = Entry(self._forget() + WINDOW_S, cost)
        self._entries.append(entry)
        self._used += cost
        return entry

    def correct(self, entry: Entry, cost: int) -> None:
        """Let an entry count with another cost, if it still counts."""
        now = self._forget()
        if entry.until > now:
            self._used += cost - entry.cost
        entry.cost = cost

    def standing(self) -> Standing:
        """What is left now."""
        now = self._forget()
        last = self._entries[-1].until - now if self._entries else 0.0
        return Standing(self._limit, max(self._limit - self._used, 0), last)

    def _forget(self) -> float:
        now = self._clock()
        while self._entries and self._entries[0].until <= now:
            self._used -= self._entries.popleft().cost
        return now


class Account:
    """What one caller has under way and has asked for."""

    def __init__(self, rates: Rates, clock: Callable[[], float]) -> None:
        self._most = rates.concurrent_requests
        self.requests = _window(rates.requests_per_minute, clock)
        self.tokens = _window(rates.tokens_per_minute, clock)
        self.open = 0

    def enter(self) -> Lease:
        """Count a request that begins.

        Raises:
            OverLimit: it may not.
        """
        if self._most is not None and self.open >= self._most:
            raise OverLimit(f"{self._most} requests at once", _CONCURRENCY_RETRY_S)
        if self.requests is not None:
            wait = self.requests.wait_s(1)
            if wait != 0:
                raise OverLimit(f"{self.requests.standing().limit} requests per minute", wait)
            self.requests.take(1)
        self.open += 1
        return Lease(self)

    def standings(self) -> dict[str, Standing]:
        """What the caller has left, by ``requests`` and ``tokens``, where there is a limit."""
        windows = {"requests": self.requests, "tokens": self.tokens}
        return {name: w.standing() for name, w in windows.items() if w is not None}

    @property
    def idle(self) -> bool:
        """Whether nothing of it needs to be remembered."""
        windows = (self.requests, self.tokens)
        return self.open == 0 and all(w is None or w.standing().reset_s == 0 for w in windows)


@dataclass(eq=False)
class Lease:
    """One request's part in its caller's account. ``release`` it, whatever becomes of it."""

    _account: Account
    _entry: Entry | None = None
    _spent: int | None = field(default=None)
    _released: bool = False

    def reserve(self, tokens: int) -> None:
        """Count the tokens that the request may use at most.

        Raises:
            OverLimit: they are too many.
        """
        window = self._account.tokens
        if window is None:
            return
        wait = window.wait_s(tokens)
        if wait != 0:
            limit = window.standing().limit
            raise OverLimit(
                f"{limit} tokens per minute, of which this request may need {tokens}", wait
            )
        self._entry = window.take(tokens)
        self._spent = 0

    def spent(self, tokens: int) -> None:
        """Tell how many tokens the request has used up to now."""
        self._spent = tokens

    def release(self) -> None:
        """The request has ended: what it reserved and did not use is free again."""
        if self._released:
            return
        self._released = True
        self._account.open -= 1
        if self._entry is not None and self._account.tokens is not None:
            self._account.tokens.correct(self._entry, self._spent or 0)


class Accounts:
    """The accounts of all callers, made when first needed and dropped when idle."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, kept: int = 1024) -> None:
        """Args:
        clock: seconds.
        kept: accounts above which idle ones are dropped.
        """
        self._clock = clock
        self._kept = kept
        self._accounts: dict[str, tuple[Rates, Account]] = {}

    def of(self, caller: str, rates: Rates) -> Account:
        """The account of a caller; a new one where its limits have changed."""
        found = self._accounts.get(caller)
        if found is not None and found[0] == rates:
            return found[1]
        if len(self._accounts) >= self._kept:
            busy = ((name, pair) for name, pair in self._accounts.items() if not pair[1].idle)
            self._accounts = dict(busy)
        account = Account(rates, self._clock)
        self._accounts[caller] = rates, account
        return account


def _window(limit: int | None, clock: Callable[[], float]) -> SlidingWindow | None:
    return None if limit is None else SlidingWindow(limit, clock)
