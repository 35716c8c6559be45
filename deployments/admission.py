"""Which requests the workers get now, which wait, and which are turned away at once.

What the engines have to do at the same time is bounded by the KV that it may need, so that a
request which is let in also gets on. Holds no Ray.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from deployments.config import AppConfig
from deployments.messages import WorkerInfo

#: Shortest time over which throughput is measured, and the weight of a new measurement.
_SAMPLE_S = 1.0
_NEW = 0.3


class NoRoomError(Exception):
    """A request is turned away.

    Attributes:
        waited: whether it had its time in the queue; else it did not get into it.
        retry_s: seconds after which it may have better luck; None where nobody can tell.
    """

    def __init__(self, message: str, waited: bool, retry_s: float | None) -> None:
        super().__init__(message)
        self.waited = waited
        self.retry_s = retry_s


@dataclass(frozen=True)
class Need:
    """What a request may need at most, or what there is.

    Attributes:
        sequences: that run at once.
        tokens: of KV.
    """

    sequences: int
    tokens: int

    def __add__(self, other: Need) -> Need:
        return Need(self.sequences + other.sequences, self.tokens + other.tokens)

    def __sub__(self, other: Need) -> Need:
        return Need(self.sequences - other.sequences, self.tokens - other.tokens)

    def within(self, other: Need) -> bool:
        """Whether it is not more than ``other``."""
        return self.sequences <= other.sequences and self.tokens <= other.tokens


NOTHING = Need(0, 0)


@dataclass(order=True)
class _Waiter:
    priority: int
    number: int
    need: Need = field(compare=False)
    admitted: asyncio.Future[None] = field(compare=False)


class Ticket:
    """Room that a request holds. ``release`` it, whatever becomes of the request."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back

    def release(self) -> None:
        """Give the room to who waits."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class Admission:
    """A queue in order of priority, then of arrival. For one event loop."""

    def __init__(
        self,
        capacity: Callable[[], Need],
        max_waiting: int,
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        capacity: let in at once, asked anew each time as workers come and go. A request that
            needs more gets in alone.
        max_waiting: requests that may wait, at least 1.
        wait_s: how long each may wait.
        clock: seconds.
        """
        self._capacity = capacity
        self._max_waiting = max_waiting
        self._wait_s = wait_s
        self._taken = NOTHING
        self._waiting: list[_Waiter] = []
        self._waiting_tokens = 0
        self._numbers = itertools.count()
        self._throughput = _Throughput(clock)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def check(self) -> None:
        """Turn a request away before anything was done for it, where it would have no chance.

        Raises:
            NoRoomError: it would not.
        """
        wait = self._throughput.seconds_for(self._waiting_tokens)
        if self._waiting and len(self._waiting) >= self._max_waiting:
            raise NoRoomError(f"{len(self._waiting)} requests wait", False, wait)
        if wait is not None and wait > self._wait_s:
            raise NoRoomError(f"the wait would be {wait:.0f} s", False, wait - self._wait_s)

    async def admit(self, need: Need, priority: int = 0) -> Ticket:
        """Wait for room.

        Args:
            need: of the request.
            priority: lower numbers come first.

        Raises:
            NoRoomError: the queue is full, or there was no room in time.
        """
        if not self._waiting and self._fits(need):
            return self._take(need)
        self.check()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(priority, next(self._numbers), need, future)
        bisect.insort(self._waiting, waiter)
        self._waiting_tokens += need.tokens
        self._throughput.busy(True)
        try:
            async with asyncio.timeout(self._wait_s):
                await future
        except BaseException as error:
            if future.done() and not future.cancelled():
                self._release(need)  # it was let in at the very moment
            else:
                self._leave(waiter)
            if isinstance(error, TimeoutError):
                retry = self._throughput.seconds_for(self._waiting_tokens)
                message = f"no room within {self._wait_s:g} s"
                raise NoRoomError(message, True, retry) from error
            raise
        return Ticket(lambda: self._release(need))

    def _fits(self, need: Need) -> bool:
        return self._taken == NOTHING or (self._taken + need).within(self._capacity())

    def _take(self, need: Need) -> Ticket:
        self._taken += need
        return Ticket(lambda: self._release(need))

    def _release(self, need: Need) -> None:
        self._taken -= need
        self._throughput.done(need.tokens)
        self._let_in()

    def _leave(self, waiter: _Waiter) -> None:
        """Take a waiter out of the queue; whoever stood behind it may fit."""
        if waiter in self._waiting:
            self._waiting.remove(waiter)
            self._waiting_tokens -= waiter.need.tokens
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting:
            waiter = self._waiting[0]
            gone = waiter.admitted.done()  # cancelled, and its task has not run since
            if not gone and not self._fits(waiter.need):
                break
            self._waiting.pop(0)
            self._waiting_tokens -= waiter.need.tokens
            if not gone:
                self._taken += waiter.need
                waiter.admitted.set_result(None)
        self._throughput.busy(bool(self._waiting))


class _Throughput:
    """Tokens of need that are worked off per second while others wait."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: float | None = None
        self._done = 0
        self._rate: float | None = None

    def busy(self, busy: bool) -> None:
        """Whether anybody waits; only then does what ends tell what is possible."""
        if not busy:
            self._since = None
        elif self._since is None:
            self._since, self._done = self._clock(), 0

    def done(self, tokens: int) -> None:
        """A request that needed so many has ended."""
        if self._since is None:
            return
        self._done += tokens
        seconds = self._clock() - self._since
        if seconds >= _SAMPLE_S:
            sample = self._done / seconds
            self._rate = sample if self._rate is None else (1 - _NEW) * self._rate + _NEW * sample
            self._since, self._done = self._clock(), 0

    def seconds_for(self, tokens: int) -> float | None:
        """How long so many take; None before anything was measured."""
        return None if not self._rate else tokens / self._rate


def capacity(config: AppConfig, info: WorkerInfo) -> Need:
    """What one gateway lets in: its share of what all workers hold, and a little more.

    A little more, so that the engines always have somebody to choose from: as many sequences again
    as run, and KV times ``gateway.queue.kv_overcommit``, since few answers get as long as they may.
    Where the number of workers follows the load, what the most of them hold: requests that wait for
    more workers have to wait in those that there are, where the load is measured.

    Args:
        config: of the application.
        info: of each worker.
    """
    scale = config.worker.autoscaling
    workers = config.worker.replicas if scale is None else scale.max_replicas
    share = workers / config.gateway.replicas
    sequences = 2 * config.engine.batch.max_sequences * share
    tokens = config.gateway.queue.kv_overcommit * info.kv_tokens * share
    return Need(max(1, round(sequences)), max(1, round(tokens)))
