from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specdec.policy.tree import DraftTree, walk


@st.composite
def trees(draw: st.DrawFn, vocabulary: int = 4) -> DraftTree:
    """Any tree whose siblings hold different tokens."""
    tokens, parents, depths = [draw(st.integers(0, vocabulary - 1))], [-1], [0]
    held: set[tuple[int, int]] = set()
    for _ in range(draw(st.integers(0, 12))):
        parent = draw(st.integers(0, len(tokens) - 1))
        token = draw(st.integers(0, vocabulary - 1))
        if (parent, token) not in held:
            held.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
    values = [1.0, *sorted((draw(st.floats(0, 1)) for _ in tokens[1:]), reverse=True)]
    return DraftTree(tuple(tokens), tuple(parents), tuple(depths), tuple(values))


def paths(tree: DraftTree) -> list[tuple[tuple[int, ...], float]]:
    """Per node its tokens from the root down, and its value: says all there is of a tree."""
    return [
        (tuple(tree.tokens[i] for i in tree.path_to(node)), tree.values[node])
        for node in range(len(tree))
    ]


@given(trees(), st.integers(0, 6))
def test_limit_depth_drops_the_deeper_nodes_alone(tree: DraftTree, depth: int) -> None:
    limited = tree.limit_depth(depth)
    assert paths(limited) == [
        (path, value) for path, value in paths(tree) if len(path) <= depth + 1
    ]
    assert [len(path) - 1 for path, _ in paths(limited)] == list(limited.depths)


@given(trees(), st.integers(-1, 14))
def test_a_prefix_is_a_tree(tree: DraftTree, size: int) -> None:
    assert paths(tree.prefix(size)) == paths(tree)[: max(size, 1)]


@given(trees(), st.lists(st.integers(0, 3), min_size=13, max_size=13))
def test_walk_goes_as_far_as_the_target_agrees(tree: DraftTree, drawn: list[int]) -> None:
    nodes, tokens = walk(tree, drawn)
    assert nodes == tree.path_to(nodes[-1])
    assert tokens == [drawn[node] for node in nodes]
    assert [tree.tokens[node] for node in nodes[1:]] == tokens[:-1]
    last = [tree.tokens[c] for c in range(len(tree)) if tree.parents[c] == nodes[-1]]
    assert tokens[-1] not in last


def test_root_only() -> None:
    tree = DraftTree.root_only(9)
    assert len(tree) == 1
    assert tree.limit_depth(0) is tree
    assert walk(tree, [3]) == ([0], [3])
