from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.policy.rows import estimates, share_rows
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


def test_the_tokens_of_a_sampled_draft_do_not_decide_its_size() -> None:
    shape = ((-1, 0, 0, 1), (0, 1, 1, 2))
    likely = DraftTree((1, 2, 3, 4), *shape, (1.0, 0.9, 0.8, 0.7))
    unlikely = DraftTree((1, 5, 6, 7), *shape, (1.0, 0.1, 0.3, 0.01))
    assert estimates(likely, sampled=False) == likely.values
    assert estimates(likely, sampled=True) == estimates(unlikely, sampled=True)
    other = [1.0, 0.6, 0.3, 0.2]
    for rows in range(7):
        sizes = [share_rows([estimates(t, sampled=True), other], rows) for t in (likely, unlikely)]
        assert sizes[0] == sizes[1]
