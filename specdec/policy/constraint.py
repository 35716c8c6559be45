"""What may come next in one sequence, as scheduling and drafting see it. Holds no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Constraint(Protocol):
    """Says which tokens may follow an output. A function of that output alone: where it is
    asked again after a preemption, or elsewhere after a crash, it says the same.

    ``output`` is always what was emitted, or is to be emitted by a path of a draft tree.
    """

    def allowed(self, output: Sequence[int]) -> NDArray[np.bool_] | None:
        """Per token of the vocabulary whether it may come next; None where all may.

        Raises:
            GrammarError: it cannot be told, within the limits set for grammars.
        """

    def accepted(self, output: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of ``tokens``, one after the other, may follow as far as a grammar says."""

    def forced(self, output: Sequence[int]) -> list[int]:
        """The likely tokens of the only text that may follow, as far as there is only one."""

    def is_complete(self, output: Sequence[int]) -> bool:
        """Whether a grammar lets nothing follow, so that the request ends."""


@dataclass(frozen=True)
class PathLimits:
    """The constraint on the nodes of one draft tree.

    Attributes:
        constraint: of the sequence.
        output: emitted by it so far, the root included.
    """

    constraint: Constraint
    output: Sequence[int]

    def keeps(self, path: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        """Per candidate below ``path`` (tokens from depth 1 down) whether it may stand there."""
        output = [*self.output, *path]
        return [self.constraint.accepted(output, [token]) == 1 for token in tokens]

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_] | None:
        """What may stand below ``path``; see :meth:`Constraint.allowed`."""
        return self.constraint.allowed([*self.output, *path])
