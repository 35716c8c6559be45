"""Counts the calls that are under way, so that nothing is closed beneath them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from prefix_cache.errors import StoreError, StoreFault


class Gate:
    """Open until it is shut, once."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._shut = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Be inside.

        Raises:
            StoreError: UNAVAILABLE, where it is shut.
        """
        with self._changed:
            if self._shut:
                raise StoreError(StoreFault.UNAVAILABLE, "the store is closed")
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def shut(self, timeout_s: float) -> bool:
        """Let nobody in any more; whether all have left, the first time only."""
        with self._changed:
            first, self._shut = not self._shut, True
            return self._changed.wait_for(lambda: self._inside == 0, timeout_s) and first
