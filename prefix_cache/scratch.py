"""Memory that is written again and again, so that the system needs not find pages for it anew."""

from __future__ import annotations

from collections.abc import Iterable


class Scratch:
    """Holds one value at a time."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def join(self, parts: Iterable[bytes | memoryview]) -> memoryview:
        """The parts one after the other, of whole bytes; valid until the next call."""
        parts = list(parts)
        size = sum(len(part) for part in parts)
        if len(self._buffer) < size:
            self._buffer = bytearray(size)  # a new one: the old one may still be looked at
        view = memoryview(self._buffer)[:size]
        end = 0
        for part in parts:
            start, end = end, end + len(part)
            view[start:end] = part
        return view
