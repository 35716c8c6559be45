"""Cuts text at the first stop string and holds back what could be the start of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopCutter:
    """Lets text through up to the first stop string, none of which ever gets out.

    Feed it the text of one token at a time: where two stop strings complete in the same token
    the earlier one counts, as in the engine's own check.

    Args:
        stops: the strings.
        include: whether the one that is met is let through.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    @property
    def held(self) -> int:
        """Characters that are held back."""
        return len(self._held)

    def add(self, text: str, may_stop: bool = True) -> str:
        """Take text; returns what can be shown now.

        Args:
            text: of the next token.
            may_stop: whether a stop string that is complete with it counts.
        """
        if self.matched is not None or not text:
            return ""
        if not self._stops:
            return text
        before = len(self._held)
        self._held += text
        hits = [
            (place, stop)
            for stop in self._stops
            if (place := self._held.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        if hits and may_stop:
            place, self.matched = min(hits)
            end = place + len(self.matched) if self._include else place
            shown, self._held = self._held[:end], ""
            return shown
        return self._release(self._begun())

    def finish(self) -> str:
        """The text still held: no stop string followed."""
        return self._release(0)

    def _begun(self) -> int:
        """Length of the longest end of the held text that a stop string begins with."""
        return max(
            length
            for stop in self._stops
            for length in range(min(len(stop) - 1, len(self._held)), -1, -1)
            if stop.startswith(self._held[len(self._held) - length :])
        )

    def _release(self, keep: int) -> str:
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown
