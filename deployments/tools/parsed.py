"""What a parser finds."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class CallDelta:
    """What becomes known of a call.

    Attributes:
        index: of the call in its choice.
        name: of the function, with the first delta of a call; else None.
        arguments: the next part of their JSON.
    """

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass
class Parsed:
    """Text and calls that became certain.

    Attributes:
        content: text beside the calls.
        deltas: of calls, at most one for each.
    """

    content: str = ""
    deltas: dict[int, CallDelta] = field(default_factory=dict)

    def call(self, index: int, name: str | None, arguments: str) -> None:
        """Add to what is known of a call."""
        found = self.deltas.get(index)
        if found is not None:
            name, arguments = found.name or name, found.arguments + arguments
        if name is not None or arguments:
            self.deltas[index] = CallDelta(index, name, arguments)
