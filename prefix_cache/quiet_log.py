"""Warnings that may come by the thousand, said now and then."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable


class QuietLog:
    """Logs at most one warning of each kind in ``every_s`` seconds, with how many it left out."""

    def __init__(
        self,
        logger: logging.Logger,
        every_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._every_s = every_s
        self._clock = clock
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warn(self, kind: str, message: str) -> None:
        """Say ``message``, or count it. There should be few kinds."""
        with self._lock:
            now = self._clock()
            if now - self._last.get(kind, -self._every_s) < self._every_s:
                self._left_out[kind] = self._left_out.get(kind, 0) + 1
                return
            self._last[kind] = now
            left_out = self._left_out.pop(kind, 0)
        more = f" ({left_out} more of this kind before)" if left_out else ""
        self._logger.warning("%s%s", message, more)
