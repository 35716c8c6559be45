"""Cuts text at the first stop string and holds back what could be the start of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopCutter:
    """Lets text through up to the first stop string, none of which ever gets out.

    Feed it the text of one token at a time: where two stop strings complete in the same token
    the earlier one counts, as in the engine's own check.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def add(self, text: str) -> str:
        """Take text; returns what can be shown now."""
        if self.matched is not None or not text:
            return ""
        if not self._stops:
            return text
        self._held += text
        hits = [(place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if hits:
            place, self.matched = min(hits)
            shown, self._held = self._held[:place], ""
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
