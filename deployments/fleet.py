"""What a gateway's process knows of the workers: which run, which are on their way out, which
are of no use. Holds no Ray.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

#: A worker that stood still or failed is passed by for so long, unless it serves before. Seconds.
_PASSED_BY_S = 15.0
#: Workers and attempts that are remembered.
_MOST = 1024


class Fleet:
    """Told by the router, asked by the streams; both in threads of their own.

    Workers go by the unique part of their replica's id.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._running: frozenset[str] = frozenset()
        self._left: OrderedDict[str, float] = OrderedDict()
        self._avoided: dict[str, float] = {}
        self._chosen: OrderedDict[str, str] = OrderedDict()

    def update(self, running: Iterable[str]) -> None:
        """Enter which workers take requests; all others known have left."""
        with self._lock:
            before, self._running = self._running, frozenset(running)
            for worker in before - self._running:
                self._left[worker] = self._clock()
            for worker in self._running:  # one may come back
                self._left.pop(worker, None)
            self._trim(self._left)

    def chose(self, attempt_id: str, worker: str) -> None:
        """An attempt goes to a worker, which may yet turn it away."""
        with self._lock:
            self._chosen[attempt_id] = worker
            self._trim(self._chosen)

    def choice(self, attempt_id: str) -> str | None:
        """Where an attempt was sent last."""
        with self._lock:
            return self._chosen.get(attempt_id)

    def left(self, worker: str) -> float | None:
        """When a worker was taken out of service, on the clock; None while it serves."""
        with self._lock:
            return self._left.get(worker)

    def avoid(self, worker: str) -> None:
        """A worker stands still, or has failed: requests pass it by for a while."""
        with self._lock:
            self._avoided[worker] = self._clock() + _PASSED_BY_S

    def serves(self, worker: str) -> None:
        """A worker works on a request."""
        if worker in self._avoided:
            with self._lock:
                self._avoided.pop(worker, None)

    def usable(self) -> frozenset[str]:
        """Workers that take requests and are not avoided."""
        with self._lock:
            now = self._clock()
            avoided = {worker: until for worker, until in self._avoided.items() if until > now}
            self._avoided = avoided
            return self._running - avoided.keys()

    def others(self, worker: str) -> bool:
        """Whether another worker could take over."""
        return bool(self.usable() - {worker})

    def _trim(self, known: OrderedDict[str, float] | OrderedDict[str, str]) -> None:
        while len(known) > _MOST:
            known.popitem(last=False)


_FLEET = Fleet()


def fleet() -> Fleet:
    """This process's view.

    One per process, as Ray makes the router itself and gives nobody a way to it: the router and
    the gateway have nothing in common but the process.
    """
    return _FLEET
