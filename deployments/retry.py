"""How often and how soon something is tried again. Holds no Ray."""

from __future__ import annotations

import random
import time
from collections.abc import Callable


class Backoff:
    """Waiting times that double, with full jitter
    (https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/).

    Args:
        first_s: longest first wait.
        most_s: longest wait at all.
        rng: of the jitter.
    """

    def __init__(
        self, first_s: float = 0.05, most_s: float = 2.0, rng: random.Random | None = None
    ) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._rng = rng or random.Random()

    def wait_s(self, failures: int) -> float:
        """Seconds to wait after that many failures in a row, the first being 1."""
        most = min(self._most_s, self._first_s * 2.0 ** min(failures - 1, 30))
        return self._rng.uniform(0, most)


class RetryBudget:
    """Retries of all requests of a gateway together: a bucket of tokens.

    Without it a fleet that fails is given several times its load.

    Args:
        burst: retries at once.
        per_s: that are added each second, up to ``burst``.
        clock: seconds.
    """

    def __init__(
        self, burst: int, per_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._burst = float(burst)
        self._per_s = per_s
        self._clock = clock
        self._tokens = self._burst
        self._at = clock()

    def take(self) -> bool:
        """Use one retry; False if there is none left."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_s)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
