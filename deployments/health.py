"""Whether an engine that still steps is still of use. Holds no torch."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from specdec.outputs import FinishReason

#: How far back it looks. Seconds.
_WINDOW_S = 30.0


class ErrorStorm:
    """Sees whether most requests end with numbers that are none: then it is no single request's
    fault, but the weights' or the device's.

    Args:
        limit: failed requests within half a minute that make a storm, if no more than as many
            ended well.
        clock: seconds.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._lock = threading.Lock()  # the engine's thread counts, others ask
        self._ends: deque[tuple[float, bool]] = deque()

    def count(self, reason: FinishReason) -> None:
        """Enter a request's end."""
        if reason != "abort":
            with self._lock:
                self._ends.append((self._clock(), reason == "error"))
                self._forget()

    def failed(self) -> int:
        """Failed requests, if they make a storm; else 0."""
        with self._lock:
            self._forget()
            failed = sum(error for _, error in self._ends)
            return failed if failed >= self._limit and 2 * failed >= len(self._ends) else 0

    def _forget(self) -> None:
        since = self._clock() - _WINDOW_S
        while self._ends and self._ends[0][0] < since:
            self._ends.popleft()
