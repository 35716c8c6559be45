"""How long a call may still take."""

from __future__ import annotations

import time

from prefix_cache.errors import StoreError, StoreFault


class Deadline:
    """A point in time by which a call must have returned."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds that are left, above 0.

        Raises:
            StoreError: TIMEOUT, where none is.
        """
        left = self._at - time.monotonic()
        if left <= 0:
            raise StoreError(StoreFault.TIMEOUT, "the deadline has passed")
        return left
