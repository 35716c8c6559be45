"""Growing trees against exhaustive enumeration."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.heads.growth import GrowingTree, ShapedTree
from specdec.policy.shapes import static_tree
from specdec.policy.tree import DraftTree

Path = tuple[int, ...]


def factors_below(path: Path, seed: int, width: int) -> list[float]:
    """The same for the same path: a model of heads whose proposals depend on the path."""
    rng = random.Random(hash((seed, *path)))
    raw = [rng.random() ** 3 for _ in range(width)]
    return sorted((x / (sum(raw) + 0.1) for x in raw), reverse=True)


def grow(tree: GrowingTree | ShapedTree, depths: int, seed: int, width: int) -> DraftTree:
    paths: dict[int, Path] = {0: ()}
    level = [0]
    for depth in range(1, depths + 1):
        for node in level:
            factors = factors_below(paths[node], seed, width)
            tree.offer(node, list(range(width)), factors)
        level = tree.frontier(1000) if depth < depths else []
        for node in level:
            paths[node] = (*paths[tree.parent(node)], tree.token(node))
    return tree.tree()


def path_values(tree: DraftTree) -> dict[Path, float]:
    return {
        tuple(tree.tokens[n] for n in tree.path_to(node)[1:]): tree.values[node]
        for node in range(1, len(tree))
    }


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    depths=st.integers(1, 4),
    width=st.integers(1, 4),
    size=st.integers(1, 40),
)
def test_the_best_nodes_of_all_are_found(seed: int, depths: int, width: int, size: int) -> None:
    tree = grow(GrowingTree(99, size), depths, seed, width)
    every: dict[Path, float] = {(): 1.0}
    for depth in range(1, depths + 1):
        for path in itertools.product(range(width), repeat=depth):
            factor = factors_below(path[:-1], seed, width)[path[-1]]
            every[path] = every[path[:-1]] * factor
    del every[()]
    best = sorted(every.values(), reverse=True)[: size - 1]
    found = path_values(tree)
    assert sorted(found.values(), reverse=True) == pytest.approx(best)
    assert all(every[path] == pytest.approx(value) for path, value in found.items())
    assert tree.tokens[0] == 99
    assert list(tree.values) == sorted(tree.values, reverse=True)
    assert all(parent < node for node, parent in enumerate(tree.parents))


def test_certain_candidates_keep_parents_before_children() -> None:
    tree = GrowingTree(5, 4)
    tree.offer(0, [1], [1.0])
    (node,) = tree.frontier(9)
    tree.offer(node, [2], [1.0])
    (node,) = tree.frontier(9)
    tree.offer(node, [3, 4], [1.0, 0.0])
    assert tree.tree() == DraftTree((5, 1, 2, 3), (-1, 0, 1, 2), (0, 1, 2, 3), (1.0,) * 4)


def test_nothing_below_a_node_that_fell_out_is_followed() -> None:
    tree = GrowingTree(5, 2)
    tree.offer(0, [1, 2], [0.5, 0.3])
    assert [tree.token(node) for node in tree.frontier(9)] == [1]


@pytest.mark.parametrize("size", [1, 2, 5, 12])
def test_a_shaped_tree_has_the_shapes_paths_and_values(size: int) -> None:
    shape = static_tree([[0.6, 0.2, 0.1], [0.5, 0.2], [0.4, 0.3]], 12)
    tree = grow(ShapedTree(99, shape, size), 3, 0, 3)
    assert path_values(tree) == dict(list(zip(shape.paths, shape.values, strict=True))[: size - 1])
    assert tree.tokens[0] == 99
    assert len(tree) == size


def test_a_shaped_tree_leaves_out_what_has_no_candidate() -> None:
    shape = static_tree([[0.6, 0.2], [0.5]], 4)
    tree = ShapedTree(9, shape, 4)
    tree.offer(0, [3], [1.0])
    for node in tree.frontier(9):
        tree.offer(node, [4], [1.0])
    assert tree.tree().tokens == (9, 3, 4)
