"""How work on a model reports itself, and the display of it on stderr."""

from __future__ import annotations

import sys
from typing import Never, Protocol

from tqdm import tqdm


class Progress(Protocol):
    """Hears of slow work on a model. Calls come from one thread."""

    def note(self, text: str) -> None:
        """A stage begins that cannot be measured; one line."""

    def advance(self, stage: str, done: int, total: int) -> None:
        """``done`` of the ``total`` bytes of ``stage`` are there. The last call has them equal."""


class NoProgress:
    """Shows nothing."""

    def note(self, text: str) -> None:
        """Ignore it."""

    def advance(self, stage: str, done: int, total: int) -> None:
        """Ignore it."""


class StderrProgress:
    """Lines and bars on stderr; where that is no terminal, a bar prints now and then only."""

    _LOG_INTERVAL_S = 10.0

    def __init__(self) -> None:
        self._bar: tqdm[Never] | None = None

    def note(self, text: str) -> None:
        """Print one line."""
        self._end_bar()
        print(text, file=sys.stderr, flush=True)

    def advance(self, stage: str, done: int, total: int) -> None:
        """Move the bar of ``stage``; the first call makes it."""
        if self._bar is None or self._bar.desc != stage:
            self._end_bar()
            self._bar = tqdm(
                desc=stage,
                total=total,
                unit="B",
                unit_scale=True,
                file=sys.stderr,
                mininterval=0.1 if sys.stderr.isatty() else self._LOG_INTERVAL_S,
            )
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._end_bar()

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
