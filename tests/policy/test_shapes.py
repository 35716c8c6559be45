from __future__ import annotations

from itertools import combinations, product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.policy.shapes import Candidate, TreeShape, grow_dynamic, grow_static, static_tree

share = st.sampled_from([0.0, 0.05, 0.1, 0.3, 0.3, 0.6, 0.9, 1.0])
#: At most 2 + 4 + 8 possible nodes, few enough to try all trees.
small = st.lists(st.lists(share, min_size=1, max_size=2), min_size=1, max_size=3)
wide = st.lists(st.lists(share, min_size=1, max_size=5), min_size=1, max_size=4)


def all_paths(widths: list[int]) -> list[tuple[int, ...]]:
    depths = range(1, len(widths) + 1)
    return [path for d in depths for path in product(*map(range, widths[:d]))]


def worth(path: tuple[int, ...], accuracies: list[list[float]]) -> float:
    return prod(accuracies[depth][rank] for depth, rank in enumerate(path))


def best_by_force(accuracies: list[list[float]], size: int) -> float:
    """The most that any tree of ``size`` nodes is worth: expected accepted tokens."""
    paths = all_paths([len(row) for row in accuracies])
    best = 0.0
    for chosen in combinations(paths, min(size - 1, len(paths))):
        held = {(), *chosen}
        if all(path[:-1] in held for path in chosen):
            best = max(best, sum(worth(path, accuracies) for path in chosen))
    return best


@settings(max_examples=60, deadline=None)
@given(small, st.integers(1, 7))
def test_the_static_tree_is_the_best_of_all(accuracies: list[list[float]], size: int) -> None:
    shape = static_tree(accuracies, size)
    assert shape.size <= size
    assert sum(shape.values) == pytest.approx(best_by_force(accuracies, size))


@given(wide, st.integers(1, 40))
def test_a_static_tree_is_well_formed(accuracies: list[list[float]], size: int) -> None:
    shape = static_tree(accuracies, size)
    paths = all_paths([len(row) for row in accuracies])
    useful = sum(worth(path, accuracies) > 0 for path in paths)
    assert shape.size == min(size, useful + 1)
    assert len(set(shape.paths)) == len(shape.paths)
    assert list(shape.values) == sorted(shape.values, reverse=True)
    for i, (path, value) in enumerate(zip(shape.paths, shape.values, strict=True)):
        assert path[:-1] in ((), *shape.paths[:i])
        assert value == pytest.approx(worth(path, accuracies))
    assert shape.depth == max((len(p) for p in shape.paths), default=0)
    assert shape.width == max((max(p) for p in shape.paths), default=-1) + 1


@pytest.mark.parametrize("bad", [1.5, -0.1, float("nan")])
def test_an_accuracy_must_be_a_share(bad: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        static_tree([[0.5], [bad]], 4)


def candidates_of(accuracies: list[list[float]]) -> list[list[Candidate]]:
    """Tokens 100, 101, ... at depth 1, 200, ... at depth 2, by falling probability."""
    return [
        [(100 * depth + rank, p) for rank, p in enumerate(sorted(row, reverse=True))]
        for depth, row in enumerate(accuracies, 1)
    ]


@given(wide, st.integers(1, 40))
def test_a_dynamic_tree_is_the_static_one_of_its_probabilities(
    accuracies: list[list[float]], size: int
) -> None:
    falling = [sorted(row, reverse=True) for row in accuracies]
    shape = static_tree(falling, size)
    tree = grow_dynamic(7, candidates_of(falling), size)
    assert tree == grow_static(shape, 7, candidates_of(falling))
    assert tree.tokens[0] == 7
    assert tree.values == (1.0, *shape.values)
    for node, path in enumerate(shape.paths, 1):
        expected = tuple(100 * depth + rank for depth, rank in enumerate(path, 1))
        assert tuple(tree.tokens[i] for i in tree.path_to(node)[1:]) == expected
        assert tree.depths[node] == len(path)


def test_a_static_tree_leaves_out_what_has_no_candidate() -> None:
    shape = TreeShape(
        ((0,), (1,), (0, 0), (1, 0), (0, 1), (0, 0, 0)), (0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
    )
    tree = grow_static(shape, 5, [[(11, 0.9)], [(21, 0.9), (22, 0.1)]])
    assert tree.tokens == (5, 11, 21, 22)
    assert tree.parents == (-1, 0, 1, 1)
    assert tree.depths == (0, 1, 2, 2)
    assert tree.values == (1.0, 0.6, 0.4, 0.2)


def test_without_candidates_the_root_is_left() -> None:
    assert len(grow_dynamic(5, [], 16)) == 1
    assert len(grow_dynamic(5, [[(1, 0.5)]], 1)) == 1
