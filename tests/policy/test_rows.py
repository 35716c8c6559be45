from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.params import SamplingParams
from specdec.policy.budget import UnlimitedBudget
from specdec.policy.rows import node_chances, share_rows, tree_sizes
from specdec.policy.tree import DraftTree

falling = st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0]), max_size=4).map(
    lambda values: sorted(values, reverse=True)
)


@settings(max_examples=200)
@given(st.lists(falling, max_size=4), st.integers(0, 12))
def test_no_other_prefixes_are_worth_more(values: list[list[float]], rows: int) -> None:
    sizes = share_rows([[1.0, *v] for v in values], rows)
    total = sum(map(len, values))
    assert all(1 <= size <= len(v) + 1 for size, v in zip(sizes, values, strict=True))
    assert sum(sizes) - len(sizes) == min(rows, total)
    worth = sum(sum(v[: size - 1]) for size, v in zip(sizes, values, strict=True))
    best = max(
        sum(sum(v[:k]) for k, v in zip(counts, values, strict=True))
        for counts in product(*(range(len(v) + 1) for v in values))
        if sum(counts) <= rows
    )
    assert abs(worth - best) < 1e-9


def test_ties_go_to_the_older() -> None:
    assert share_rows([[1.0, 0.5, 0.5], [1.0, 0.5, 0.5]], 3) == [3, 2]


def sizes_of(
    trees: list[DraftTree], params: list[SamplingParams], rows: int, budget: UnlimitedBudget
) -> list[int]:
    return tree_sizes(node_chances(trees, params, budget), params, 20, rows, budget)


def test_the_tokens_of_a_sampled_draft_do_not_decide_its_size() -> None:
    shape = ((-1, 0, 0, 1), (0, 1, 1, 2))
    likely = DraftTree((1, 2, 3, 4), *shape, (1.0, 0.9, 0.8, 0.7))
    unlikely = DraftTree((1, 5, 6, 7), *shape, (1.0, 0.1, 0.3, 0.01))
    match, rejection = (
        SamplingParams(temperature=1.0, acceptance=rule) for rule in ("match", "rejection")
    )
    budget = UnlimitedBudget()
    other = DraftTree((9, 9, 9, 9), (-1, 0, 1, 2), (0, 1, 2, 3), (1.0, 0.6, 0.3, 0.2))
    for rows in range(7):
        sizes = [
            sizes_of([tree, other], [rejection, match], rows, budget) for tree in (likely, unlikely)
        ]
        assert sizes[0] == sizes[1]
        assert sum(sizes[0]) == 2 + min(6, rows)


class Nothing(UnlimitedBudget):
    """Says that no candidate pays."""

    def candidates(self, chances: Sequence[float], decodes: int, keys: int, limit: int) -> int:
        assert len(chances) == 3
        assert limit == 7
        return 0


def test_no_measured_time_decides_the_size_of_a_sampled_draft() -> None:
    tree = DraftTree((9, 9, 9, 9), (-1, 0, 1, 2), (0, 1, 2, 3), (1.0, 0.6, 0.3, 0.2))
    match, rejection = (
        SamplingParams(temperature=1.0, acceptance=rule) for rule in ("match", "rejection")
    )
    assert sizes_of([tree, tree], [rejection, match], 10, Nothing()) == [4, 1]
    assert sizes_of([], [], 10, Nothing()) == []
