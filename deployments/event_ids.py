"""Ids of a stream's events: from any of them on, the stream can be continued exactly.

    chatcmpl-<32 hex digits>:<choice>,<choice>...[:u]

The first part is the answer's own id. Then, for each choice, what of it has been sent up to this
event::

    (nothing)      not even its opening
    57-9a8b7c6d    the text of its first 57 tokens; and a CRC-32 over these
    57-9a8b7c6de   that was all of it, its finish_reason included

``:u`` stands behind the chunk with the usage. Text is a function of the tokens alone, so a number
of tokens says exactly which characters have been sent, also where a part of a stop string or of a
character is held back. The CRC is compared when the answer goes on: where a model cannot compute
the same tokens again (see docs/recovery.md), the client gets an error and never a patchwork.
"""

from __future__ import annotations

import re
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from deployments.errors import invalid

_FORM = re.compile(r"((?:chatcmpl|cmpl)-[0-9a-f]{32}):([0-9a-f,e-]*)(:u)?")
_CURSOR = re.compile(r"([0-9]{1,9})-([0-9a-f]{8})(e?)")


@dataclass(frozen=True)
class Cursor:
    """How much of a choice has been sent.

    Attributes:
        opened: whether anything has.
        tokens: whose text has been.
        check: CRC-32 over these tokens.
        ended: whether its finish_reason has been.
    """

    opened: bool = False
    tokens: int = 0
    check: int = 0
    ended: bool = False

    def after(self, tokens: Sequence[int]) -> Cursor:
        """With more tokens."""
        data = array("I", tokens).tobytes()
        return replace(
            self,
            opened=True,
            tokens=self.tokens + len(tokens),
            check=zlib.crc32(data, self.check),
        )


@dataclass(frozen=True)
class Position:
    """A place in a stream.

    Attributes:
        answer_id: whose.
        cursors: of its choices.
        usage_sent: whether the chunk with the usage has been sent.
    """

    answer_id: str
    cursors: tuple[Cursor, ...]
    usage_sent: bool = False

    @classmethod
    def start(cls, answer_id: str, choices: int) -> Position:
        """Before the first event."""
        return cls(answer_id, (Cursor(),) * choices)

    def moved(self, index: int, cursor: Cursor) -> Position:
        """With one choice further on."""
        cursors = (*self.cursors[:index], cursor, *self.cursors[index + 1 :])
        return replace(self, cursors=cursors)

    def encode(self) -> str:
        """As an event's id."""
        cursors = ",".join(
            f"{one.tokens}-{one.check:08x}{'e' if one.ended else ''}" if one.opened else ""
            for one in self.cursors
        )
        return f"{self.answer_id}:{cursors}{':u' if self.usage_sent else ''}"


def parse_event_id(text: str) -> Position:
    """The place that an event's id names.

    Raises:
        ApiError: 400, it is no id of this server.
    """
    whole = _FORM.fullmatch(text)
    cursors: list[Cursor] = []
    for part in whole[2].split(",") if whole else ():
        found = _CURSOR.fullmatch(part)
        if found:
            cursors.append(Cursor(True, int(found[1]), int(found[2], 16), bool(found[3])))
        elif part == "":
            cursors.append(Cursor())
        else:
            whole = None
            break
    if whole is None:
        raise invalid("Last-Event-ID", f"Last-Event-ID is no event of this server: {text!r:.80}.")
    return Position(whole[1], tuple(cursors), whole[3] is not None)
