"""A lock among processes that is waited for no longer than a deadline."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefix_cache.errors import StoreError, StoreFault
from prefix_cache.stores.deadline import Deadline

_POLL_S = 0.002


class FileMutex:
    """Held by one thread of one process at a time; the kernel frees it when its holder dies."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._thread = threading.Lock()

    @contextmanager
    def held(self, deadline: Deadline) -> Iterator[None]:
        """Hold it.

        Raises:
            StoreError: TIMEOUT, where another holds it until the deadline.
        """
        if not self._thread.acquire(timeout=deadline.left()):
            raise StoreError(StoreFault.TIMEOUT, "another thread is writing")
        try:
            self._lock(deadline)
            try:
                yield
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        finally:
            self._thread.release()

    def close(self) -> None:
        """Close the file. Nobody may hold the lock."""
        os.close(self._descriptor)

    def _lock(self, deadline: Deadline) -> None:
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(min(_POLL_S, deadline.left()))
            else:
                return
