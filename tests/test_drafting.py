"""Which source is asked, and what of it becomes the next tree.

What these catch: heads that run although lookup is sure, nodes that can never be committed,
heads that the budget left out, lookup in the tree of a sampled draft, where it would
change the distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from specdec.config import SpeculationSettings
from specdec.drafting import NODES_PACKED, SAMPLED_STREAMS, STRONG_CANDIDATES, Drafting
from specdec.heads.drafter import Drafter, NullDrafter, SampledDraft
from specdec.params import SamplingParams
from specdec.policy.budget import Budget, Source, UnlimitedBudget
from specdec.policy.constraint import PathLimits
from specdec.policy.plan import Committed
from specdec.policy.sequence import Sequence as SequenceState
from specdec.policy.stop import StopChecker
from specdec.policy.tree import DraftTree

REPEATS = [1, 2, 3, 4, 5, 6, 7, 8, 9] * 4


class OneToken:
    """Drafts token 99 at depth 1, and below it itself, down to depth 3."""

    max_depth = 4

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.branching: list[tuple[int, ...]] = []

    def draft(
        self,
        hidden: Tensor,
        contexts: Sequence[Sequence[int]],
        sizes: Sequence[int],
        least: float = 0.0,
        limits: Sequence[PathLimits | None] | None = None,
    ) -> list[DraftTree]:
        assert len(hidden) == len(contexts)
        self.asked += [int(row[0]) for row in hidden]
        return [
            DraftTree((c[-1], 99, 99, 99), (-1, 0, 1, 2), (0, 1, 2, 3), (1.0, 0.4, 0.2, 0.1))
            for c in contexts
        ]

    def draft_sampled(
        self, hidden: Tensor, context: Sequence[int], branching: Sequence[int], choose: Any
    ) -> SampledDraft:
        self.branching.append(tuple(branching))
        return SampledDraft(DraftTree((context[-1], 99), (-1, 0), (0, 1), (1.0, 0.5)), hidden)


class NoHeads(UnlimitedBudget):
    """Says that the heads do not pay, and keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Source] = []
        self.roots: list[tuple[int, int]] = []

    def worth_drafting(self, decodes: int, keys: int) -> bool:
        self.roots.append((decodes, keys))
        return False

    def drafted(self, source: Source, sequences: int, seconds: float) -> None:
        self.told.append(source)


def new_drafting(drafter: object, budget: Budget | None = None, **settings: Any) -> Drafting:
    return Drafting(
        cast(Drafter, drafter),
        SpeculationSettings(**settings),
        NODES_PACKED,
        budget or UnlimitedBudget(),
    )


def new_sequence(tokens: list[int], name: str = "a", **params: Any) -> SequenceState:
    asked = SamplingParams(max_tokens=50, **params)
    checker = StopChecker(asked, frozenset(), 1000, len(tokens), None)
    return SequenceState(name, list(tokens), len(tokens), asked, checker)


def draft(source: Drafting, *sequences: SequenceState, depth: int = 30) -> list[DraftTree | None]:
    entries = [Committed(s, (s.tokens[-1],), i, i) for i, s in enumerate(sequences)]
    hidden = torch.arange(len(sequences))[:, None].float()
    source.draft(entries, hidden, lambda s: depth if s.params.speculation else 0)
    return [sequence.draft for sequence in sequences]


def test_both_sources_are_merged() -> None:
    source = new_drafting(OneToken())
    (tree,) = draft(source, new_sequence([1, 2, 3, 1]))  # match of one token: 2, then 3
    assert tree is not None
    assert tree.tokens[:6] == (1, 99, 2, 99, 3, 99)
    assert tree.parents[:6] == (-1, 0, 0, 1, 2, 3)
    assert tree.values[:6] == pytest.approx((1.0, 0.4, 0.25, 0.2, 0.125, 0.1))


def test_heads_are_asked_only_where_lookup_is_not_sure() -> None:
    heads = OneToken()
    source = new_drafting(heads)
    sure, unsure, unknown = (
        new_sequence(REPEATS, "sure"),
        new_sequence([1, 2, 3, 1], "unsure"),
        new_sequence([1, 2, 3], "unknown"),
    )
    trees = draft(source, unsure, sure, unknown)
    assert heads.asked == [0, 2]
    assert trees[1] is not None
    assert trees[1].tokens[1 : STRONG_CANDIDATES + 1] == (1, 2, 3, 4, 5)
    assert trees[2] is not None
    assert trees[2].tokens == (3, 99, 99, 99)


def test_the_budget_may_leave_the_heads_out() -> None:
    heads, budget = OneToken(), NoHeads()
    (tree,) = draft(new_drafting(heads, budget), new_sequence([1, 2, 3, 1]))
    assert tree is not None
    assert tree.tokens[:4] == (1, 2, 3, 1)
    assert heads.asked == []
    assert budget.told == [Source.LOOKUP]
    source = new_drafting(heads, budget)
    draft(source, new_sequence(REPEATS))  # lookup is sure: nothing to decide
    draft(source, new_sequence([1, 2, 3], speculation=False), new_sequence([4, 5, 6], "b"))
    draft(source, new_sequence([1, 2, 3], acceptance="rejection", temperature=1.0))
    assert budget.told[1:] == [Source.NEITHER, Source.LOOKUP, Source.NEITHER]
    assert budget.roots == [(1, 4), (2, 6)]  # all roots of the step count, drafting or not


def test_only_few_streams_draw_candidates() -> None:
    """By their number, not by the clock: a text of the rejection rule depends on it."""
    heads = OneToken()
    for count, drawn in ((SAMPLED_STREAMS, SAMPLED_STREAMS), (SAMPLED_STREAMS + 1, 0)):
        heads.branching.clear()
        sequences = [
            new_sequence([1, 2, i], str(i), acceptance="rejection", temperature=1.0)
            for i in range(count)
        ]
        draft(new_drafting(heads, NoHeads()), *sequences)
        assert len(heads.branching) == drawn


def test_trees_have_the_size_asked_for() -> None:
    (tree,) = draft(new_drafting(NullDrafter()), new_sequence(REPEATS))
    assert tree is not None
    assert len(tree) == NODES_PACKED
    (tree,) = draft(new_drafting(NullDrafter(), max_nodes=4), new_sequence(REPEATS))
    assert tree is not None
    assert tree.tokens == (9, 1, 2, 3)


@pytest.mark.parametrize("tokens", [REPEATS, [1, 2, 3, 1]])
def test_nothing_is_deeper_than_can_be_committed(tokens: list[int]) -> None:
    (tree,) = draft(new_drafting(OneToken()), new_sequence(tokens), depth=2)
    assert tree is not None
    assert max(tree.depths) == 2
    sequence = new_sequence(tokens)
    assert draft(new_drafting(OneToken()), sequence, depth=0) == [None]


def test_sampled_drafts_are_the_heads_alone() -> None:
    heads = OneToken()
    sampled: dict[str, Any] = {"acceptance": "rejection", "temperature": 1.0}
    source = new_drafting(heads)
    (tree,) = draft(source, new_sequence(REPEATS, **sampled))
    assert tree is not None
    assert tree.tokens == (9, 99)
    assert heads.branching == [(2, 1)]
    assert len(source.lookup) == 0
    assert draft(new_drafting(NullDrafter()), new_sequence(REPEATS, **sampled)) == [None]
    (tree,) = draft(source, new_sequence(REPEATS, acceptance="rejection"))  # greedy: no draw
    assert tree is not None
    assert tree.tokens[1] == 1


def test_switches() -> None:
    source = new_drafting(OneToken(), lookup=False)
    (tree,) = draft(source, new_sequence(REPEATS))
    assert tree is not None
    assert tree.tokens == (9, 99, 99, 99)
    assert len(source.lookup) == 0
    assert draft(new_drafting(OneToken(), enabled=False), new_sequence(REPEATS)) == [None]


def test_learns_from_what_was_committed_and_forgets_the_sequence() -> None:
    source = new_drafting(NullDrafter())
    sequence = new_sequence([1, 2, 3, 1])
    first, trees = 0.25, []
    for token in (2, 3, 1):  # what lookup said each time
        trees += draft(source, sequence)
        sequence.tokens.append(token)
    draft(source, sequence)
    other = new_sequence([5, 6, 7, 5], "other")
    (tree,) = draft(source, other)
    assert tree is not None
    assert tree.values[1] == pytest.approx((20 * first + 1) / 21)
    assert len(source.lookup) == 2
    source.forget(sequence)
    source.forget(other)
    source.forget(other)
    assert len(source.lookup) == 0
