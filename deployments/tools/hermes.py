"""Calls as ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``.

The format of Nous Research's Hermes, of Qwen and of SmolLM2, and what models are asked for whose
chat template knows no functions.
https://github.com/NousResearch/Hermes-Function-Calling
"""

from __future__ import annotations

from typing import Literal

from deployments.tools.call_reader import CallReader
from deployments.tools.parsed import Parsed

OPEN = "<tool_call>"
CLOSE = "</tool_call>"

_State = Literal["text", "call", "after", "skip", "over"]


class HermesParser:
    """See ToolParser. Text within a call that turns out to be none is text after all."""

    def __init__(self, several: bool = True) -> None:
        """Args:
        several: whether there may be more than one call. Nothing counts after the last.
        """
        self._several = several
        self._state: _State = "text"
        self._held = ""  # could be the beginning of a mark
        self._space = ""  # at the end of the text: not shown before a call
        self._raw: list[str] = []  # of the call
        self._reader = CallReader()
        self._named = False
        self.calls = 0

    def add(self, text: str) -> Parsed:
        """See ToolParser."""
        parsed = Parsed()
        for char in text:
            self._add(char, parsed)
        return parsed

    def finish(self, cut: bool) -> Parsed:
        """See ToolParser."""
        parsed = Parsed()
        if self._state == "text":
            if not (cut and len(self._held) > 1):
                self._show(self._held, parsed)
            if self.calls == 0:
                parsed.content += self._space
        elif self._state == "call" and not self._named and not cut:
            self._show(OPEN + "".join(self._raw), parsed)
            parsed.content += self._space
        self._state = "over"
        return parsed

    def _add(self, char: str, parsed: Parsed) -> None:
        if self._state == "text":
            self._match(OPEN, char, parsed)
        elif self._state == "call":
            self._in_call(char, parsed)
        elif self._state == "skip":
            self._skip(char)
        elif self._state == "after" and not (self._held == "" and char.isspace()):
            self._match(CLOSE, char, parsed)

    def _match(self, mark: str, char: str, parsed: Parsed) -> None:
        """Hold what may become the mark, and show what cannot."""
        self._held += char
        while self._held and not mark.startswith(self._held):
            if self._state == "after":  # the closing mark was left out
                self._state, mark = "text", OPEN
                continue
            self._show(self._held[0], parsed)
            self._held = self._held[1:]
        if self._held == mark:
            self._held = ""
            if mark == OPEN:
                self._state, self._named, self._reader = "call", False, CallReader()
                self._raw.clear()
            else:
                self._state = "text"

    def _in_call(self, char: str, parsed: Parsed) -> None:
        self._reader.add(char)
        if self._reader.failed:
            self._fail(char, parsed)
            return
        self._raw.append(char)
        if not self._named and self._reader.name is not None:
            self._named = True
            self._space = ""
            parsed.call(self.calls, self._reader.name, "")
            self.calls += 1
        if self._named:
            parsed.call(self.calls - 1, None, self._reader.take())
        if self._reader.done:
            self._state = "after" if self._several else "over"

    def _fail(self, char: str, parsed: Parsed) -> None:
        """It was no call. Once a client has its name, the rest of it is passed over instead."""
        if self._named:
            self._state = "skip" if self._several else "over"
        else:
            self._state = "text"
            self._show(OPEN + "".join(self._raw), parsed)
        self._add(char, parsed)

    def _skip(self, char: str) -> None:
        self._held = (self._held + char)[-len(CLOSE) :]
        if self._held == CLOSE:
            self._state, self._held = "text", ""

    def _show(self, text: str, parsed: Parsed) -> None:
        shown = self._space + text
        kept = shown.rstrip()
        self._space = shown[len(kept) :]
        parsed.content += kept
