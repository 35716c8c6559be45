"""Which of a dead worker's requests killed it: those are tried one after the other. Holds no Ray.

All requests of a dead worker are lost together, and nobody can ask it which one was to blame.
Sent on together, a poisonous one would kill the next worker, and again all would have been there.
So each goes on alone among the suspects, beside requests that are above suspicion, until it has
got some tokens further: then it is none any more. If the worker dies before, this request did it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

#: Tokens after which a request is above suspicion: it has passed the place where it stood when
#: its worker died, what was on its way then included.
CLEARED_AFTER = 4
#: Of so many suspects that wait, one is tried; of more, several at once. If these then kill a
#: worker, they remain suspects, and are fewer.
_WAITING_PER_TURN = 16
#: A request that a worker has had for longer than this lets the next one begin. Seconds.
_TURN_S = 15.0


@dataclass(eq=False)
class Turn:
    """One suspect's time on probation.

    Attributes:
        alone: whether no other suspect was tried at any time of it.
        began: when a worker took it, on the clock; None before.
    """

    alone: bool = True
    began: float | None = None


class Probation:
    """Gives suspects their turns, in the order of asking. For one event loop.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._inside: set[Turn] = set()
        self._waiting: deque[asyncio.Future[Turn]] = deque()

    async def enter(self) -> Turn:
        """Wait for a turn. It must be left, whatever happens."""
        future: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._fill()
        try:
            while not future.done():
                # not only when a turn is left: one may take too long
                await asyncio.wait({future}, timeout=1.0)
                self._fill()
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.leave(future.result())
            else:
                self._waiting.remove(future)
            raise
        return future.result()

    def begin(self, turn: Turn) -> None:
        """A worker has taken the request; there may have been none for long."""
        if turn.began is None:
            turn.began = self._clock()

    def leave(self, turn: Turn) -> None:
        """End a turn; nothing happens the second time."""
        self._inside.discard(turn)
        self._fill()

    def _fill(self) -> None:
        now = self._clock()
        while self._waiting:
            held = sum(t.began is None or now - t.began < _TURN_S for t in self._inside)
            if held and held >= max(1, (held + len(self._waiting)) // _WAITING_PER_TURN):
                return
            future = self._waiting.popleft()
            turn = Turn(alone=not self._inside)
            for other in self._inside:
                other.alone = False
            self._inside.add(turn)
            future.set_result(turn)
