"""Budgets for tests. Holds no torch."""

from __future__ import annotations

import random
from collections.abc import Sequence

from specdec.policy.budget import UnlimitedBudget


class AnyBudget(UnlimitedBudget):
    """Decides at random: whatever a budget says, it may not change a text.

    Args:
        rng: of the decisions.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random(7)

    def candidates(self, chances: Sequence[float], decodes: int, keys: int, limit: int) -> int:
        """Any number that fits."""
        assert decodes >= 1
        assert list(chances) == sorted(chances, reverse=True)
        return self._rng.randint(0, min(len(chances), limit))

    def prefill_rows(self, rows: int, keys: int, start: int, limit: int) -> int:
        """Any number that is allowed."""
        assert limit >= 1
        return self._rng.randint(1, limit)

    def worth_drafting(self, decodes: int, keys: int) -> bool:
        """Mostly."""
        assert decodes >= 1
        return self._rng.random() < 0.8
