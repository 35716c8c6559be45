"""Who says how much of a step goes where. Holds no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from specdec.policy.tree import DraftTree


class Source(Enum):
    """What the trees of a step came from, as far as that is to be compared."""

    HEADS = "heads"
    LOOKUP = "lookup"  # the heads were left out because they would not pay
    NEITHER = "neither"  # lookup was sure, or nothing is drafted: says nothing of the heads


@dataclass(frozen=True)
class StepSeen:
    """A step that was run, for learning.

    Attributes:
        rows: of its trees.
        decodes: trees, each with its root.
        keys: that the trees' rows attend to.
        prefill: rows of its prefill chunks.
        prefill_keys: that these attend to.
        committed: tokens that the trees gave.
        seconds: it took, drafting left out.
    """

    rows: int
    decodes: int
    keys: int
    prefill: int
    prefill_keys: int
    committed: int
    seconds: float


class Budget(Protocol):
    """Decides how much of a step goes where."""

    def estimates(self, tree: DraftTree, greedy: bool) -> Sequence[float]:
        """Per node the chance that the walk reaches it, falling; the root's is 1."""

    def candidates(self, chances: Sequence[float], decodes: int, keys: int, limit: int) -> int:
        """How many of the likeliest candidates to verify.

        Args:
            chances: of all candidates of the step, falling.
            decodes: roots that the step verifies in any case, 1 or more.
            keys: committed tokens of these sequences.
            limit: most candidates that fit.
        """

    def prefill_rows(self, rows: int, keys: int, start: int, limit: int) -> int:
        """How many prefill rows go with a step, at least 1 and at most ``limit``.

        Args:
            rows: of the trees; 0 if the step has nothing but prefill.
            keys: that these attend to.
            start: tokens before the first prefill row.
            limit: most that fit or are wanted, 1 or more.
        """

    def worth_drafting(self, decodes: int, keys: int) -> bool:
        """Whether the heads should draft for a step of that many sequences.

        Args:
            decodes: roots of the coming step, those that take no drafts included.
            keys: committed tokens of these sequences.
        """

    def drafted(self, source: Source, sequences: int, seconds: float) -> None:
        """What drafted for the coming step, told once per step.

        Args:
            source: of the trees.
            sequences: for which the heads drafted.
            seconds: that took.
        """

    def least(self, decodes: int) -> float:
        """Chance below which a candidate will hardly be verified at this load."""

    def learn(self, seen: StepSeen) -> None:
        """Enter a step."""

    def learn_verdict(self, tree: DraftTree, walked: Sequence[int], greedy: bool) -> None:
        """Enter which nodes of a verified tree the walk reached."""

    def describe(self) -> dict[str, object]:
        """For statistics: costs, chances and what followed from them."""


class UnlimitedBudget:
    """Takes all that fits and learns nothing: where a row costs nothing, and for tests."""

    def estimates(self, tree: DraftTree, greedy: bool) -> Sequence[float]:
        """As the drafter said."""
        return tree.values

    def candidates(self, chances: Sequence[float], decodes: int, keys: int, limit: int) -> int:
        """All that fit."""
        return min(len(chances), limit)

    def prefill_rows(self, rows: int, keys: int, start: int, limit: int) -> int:
        """All that fit."""
        return limit

    def worth_drafting(self, decodes: int, keys: int) -> bool:
        """Always."""
        return True

    def drafted(self, source: Source, sequences: int, seconds: float) -> None:
        """Nothing."""

    def least(self, decodes: int) -> float:
        """All may be."""
        return 0.0

    def learn(self, seen: StepSeen) -> None:
        """Nothing."""

    def learn_verdict(self, tree: DraftTree, walked: Sequence[int], greedy: bool) -> None:
        """Nothing."""

    def describe(self) -> dict[str, object]:
        """Nothing."""
        return {}
