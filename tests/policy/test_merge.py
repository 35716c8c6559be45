"""A merged tree against one built from sets of paths.

What these catch: a duplicate kept twice, a node in front of its parent, a parent cut away, a
wrong parent after the reordering, the lower of two values taken.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specdec.policy.merge import merge_path
from specdec.policy.tree import DraftTree
from tests.policy.test_tree import paths, trees


@st.composite
def falling(draw: st.DrawFn) -> DraftTree:
    """A tree in which ties are frequent."""
    tree = draw(trees())
    values = sorted(draw(st.sampled_from((0.0, 0.25, 0.5, 1.0))) for _ in range(len(tree) - 1))
    return DraftTree(tree.tokens, tree.parents, tree.depths, (1.0, *values[::-1]))


candidates = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from((0.0, 0.1, 0.25, 0.5, 0.8, 1.0))), max_size=8
)


@given(trees() | falling(), candidates, st.integers(1, 16))
def test_best_nodes_of_both(tree: DraftTree, path: list[tuple[int, float]], size: int) -> None:
    merged = merge_path(tree, [t for t, _ in path], [v for _, v in path], size)

    best = dict(paths(tree))
    above: tuple[int, ...] = tree.tokens[:1]
    for token, value in path:
        value, above = min(value, best[above]), (*above, token)
        best[above] = max(best.get(above, 0.0), value)

    found = paths(merged)
    assert len({nodes for nodes, _ in found}) == len(found) == min(size, len(best))
    assert all(best[nodes] == value for nodes, value in found)
    kept = [value for _, value in found]
    assert kept == sorted(best.values(), reverse=True)[: len(kept)]
    assert all(merged.parents[i] < i for i in range(1, len(merged)))
    assert merged.parents[0] == -1
    assert list(merged.depths) == [len(nodes) - 1 for nodes, _ in found]


def test_no_path_leaves_the_tree() -> None:
    tree = DraftTree((1, 2, 3), (-1, 0, 1), (0, 1, 2), (1.0, 0.5, 0.2))
    assert merge_path(tree, [], [], 3) is tree
    assert merge_path(tree, [], [], 2) == tree.prefix(2)


def test_a_path_leaves_and_joins() -> None:
    tree = DraftTree((1, 2, 3, 4), (-1, 0, 0, 1), (0, 1, 1, 2), (1.0, 0.6, 0.3, 0.2))
    merged = merge_path(tree, [3, 5], [0.7, 0.4], 4)
    assert merged == DraftTree((1, 3, 2, 5), (-1, 0, 0, 1), (0, 1, 1, 2), (1.0, 0.7, 0.6, 0.4))
