"""What a checkpoint holds. Knows tokens as numbers and the rest as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

#: Fences from one claim to the next; between them whoever has claimed may count on his own.
FENCES_PER_CLAIM = 2**16
#: Of a request that nobody has claimed yet.
FIRST_FENCE = FENCES_PER_CLAIM


class State(IntEnum):
    """Where a request stands. Of a removed one only the fence is left, against latecomers."""

    UNFINISHED = 0
    FINISHED = 1
    REMOVED = 2


@dataclass(frozen=True)
class Checkpoint:
    """The whole state of a request.

    Attributes:
        request_id: unique among all requests; ASCII.
        prompt: token ids.
        emitted: token ids generated so far.
        request: parameters with the seed, as whoever runs requests wants them.
        answer: what whoever answers the client needs to go on.
        progress: how it goes: counts, and how it ended if it has.
        finished: whether it has.
        draft: tokens of the draft tree in flight, its root first; may be empty.
        draft_parents: per node of it the index of its parent; -1 for the root.
        owner: who wrote this.
        fence: of the owner.
        written_at: seconds since 1970.
    """

    request_id: str
    prompt: Sequence[int]
    emitted: Sequence[int]
    request: bytes
    answer: bytes
    progress: bytes = b""
    finished: bool = False
    draft: Sequence[int] = ()
    draft_parents: Sequence[int] = ()
    owner: str = ""
    fence: int = FIRST_FENCE
    written_at: float = 0.0

    @property
    def position(self) -> int:
        """Of the next token."""
        return len(self.prompt) + len(self.emitted)

    @property
    def state(self) -> State:
        """As the header has it."""
        return State.FINISHED if self.finished else State.UNFINISHED


@dataclass(frozen=True)
class Header:
    """What the store itself needs to know of a checkpoint.

    Attributes:
        state: see State.
        fence: what is written with a lower one is refused.
        lease_until_ms: since 1970; until then its owner is taken to live.
        owner: digest of the owner's name, 16 bytes.
        nonce: differs with every write, 8 bytes.
    """

    state: State
    fence: int
    lease_until_ms: int
    owner: bytes
    nonce: bytes


@dataclass(frozen=True)
class Listed:
    """A checkpoint as a list shows it.

    Attributes:
        request_id: see Checkpoint.
        state: unfinished or finished.
        fence: of its owner.
        leased: whether the owner is taken to live.
        owner: digest of the owner's name.
    """

    request_id: str
    state: State
    fence: int
    leased: bool
    owner: bytes
