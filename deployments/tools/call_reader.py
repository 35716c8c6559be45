"""Reads ``{"name": …, "arguments": {…}}`` character by character, and passes arguments on."""

from __future__ import annotations

import json
from typing import Literal

_SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")

_State = Literal["start", "key or end", "key", "colon", "value", "next"]


class _Value:
    """Finds the end of a JSON value."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self._depth = 0
        self._string = False
        self._escaped = False

    def add(self, char: str) -> bool:
        """Whether the value is complete with ``char``. A number or a word ends before its end:
        see ``ends_before``.
        """
        self.text.append(char)
        if self._string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._string = False
                return self._depth == 0
        elif char == '"':
            self._string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth == 0
        return False

    def ends_before(self, char: str) -> bool:
        """Whether a number or a word is complete as ``char`` follows it."""
        return bool(self.text) and not self._string and self._depth == 0 and char in ",}" + _SPACE


class CallReader:
    """One call.

    Attributes:
        name: once known.
        done: the object is complete.
        failed: this is no call.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = False
        self.failed = False
        self._state: _State = "start"
        self._key: str | None = None
        self._value = _Value()
        self._streams = False
        self._has_arguments = False
        self._pending: list[str] = []

    def add(self, char: str) -> None:
        """Take a character, unless the call is done or has failed."""
        if self._state == "value":
            self._in_value(char)
        elif self._state == "key" or (self._state == "key or end" and char == '"'):
            self._in_key(char)
        elif char in _SPACE:
            pass
        elif char == "{" and self._state == "start":
            self._state = "key or end"
        elif char == ":" and self._state == "colon":
            self._state, self._value = "value", _Value()
        elif char == "," and self._state == "next":
            self._state, self._value = "key", _Value()
        elif char == "}" and self._state in ("next", "key or end"):
            self._end()
        else:
            self.failed = True

    def take(self) -> str:
        """Arguments that came since the last time; none before the name is known."""
        if self.name is None:
            return ""
        taken = "".join(self._pending)
        self._pending.clear()
        return taken

    def _in_key(self, char: str) -> None:
        self._state = "key"
        if not self._value.text and char in _SPACE:
            return
        if not self._value.text and char != '"':
            self.failed = True
        elif self._value.add(char):
            key = self._loads()
            self._key = key if isinstance(key, str) else None
            self._state = "colon"

    def _in_value(self, char: str) -> None:
        if not self._value.text:
            if char in _SPACE:
                return
            if char in "}],:":
                self.failed = True
                return
            self._streams = char == "{" and self._key in _ARGUMENTS and not self._has_arguments
        if self._value.ends_before(char):
            self._close_value()
            self.add(char)
            return
        complete = self._value.add(char)
        if self._streams:
            self._pending.append(char)
        if complete:
            self._close_value()

    def _close_value(self) -> None:
        self._state = "next"
        if self._streams:
            self._has_arguments = True
            self._streams = False
            return
        value = self._loads()
        if self._key == "name" and self.name is None:
            self.name = value if isinstance(value, str) and value else None
            self.failed |= self.name is None
        elif self._key in _ARGUMENTS and not self._has_arguments and value is not None:
            self._has_arguments = True
            self._pending.append(value if isinstance(value, str) else "")
            self.failed |= not isinstance(value, str)

    def _loads(self) -> object:
        try:
            return json.loads("".join(self._value.text))
        except (ValueError, RecursionError):
            self.failed = True
            return None
        finally:
            self._value = _Value()

    def _end(self) -> None:
        if self.name is None:
            self.failed = True
            return
        if not self._has_arguments:
            self._pending.append("{}")
        self.done = True
