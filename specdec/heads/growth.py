"""Growing a tree depth by depth where what follows a node depends on its path. Holds no torch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.policy.shapes import TreeShape
from specdec.policy.tree import DraftTree


@dataclass
class _Node:
    token: int
    parent: int
    depth: int
    value: float


class GrowingTree:
    """The likeliest nodes found so far, for one sequence.

    Args:
        root: the last committed token.
        size: most nodes, root included.
    """

    def __init__(self, root: int, size: int) -> None:
        self.size = max(1, size)
        self._nodes = [_Node(root, -1, 0, 1.0)]
        self._fresh: range = range(1)

    def offer(self, parent: int, tokens: Sequence[int], factors: Sequence[float]) -> None:
        """Candidates below ``parent``; ``factors`` estimate their chance given the parent.

        Factors are at most 1; candidates without a chance are left out.
        """
        above = self._nodes[parent]
        self._nodes.extend(
            _Node(token, parent, above.depth + 1, above.value * factor)
            for token, factor in zip(tokens, factors, strict=True)
            if factor > 0
        )

    def frontier(self, width: int, least: float = 0.0) -> list[int]:
        """Nodes offered since the last call that are worth following.

        Only nodes that would be in the tree now: a child's value is never above its
        parent's, so nothing below the others can get into it.

        Args:
            width: most nodes to follow.
            least: value that a node must have.
        """
        fresh = range(self._fresh.stop, len(self._nodes))
        self._fresh = fresh
        kept = set(self._best())
        chosen = [node for node in fresh if node in kept and self._nodes[node].value >= least]
        return heapq.nsmallest(width, chosen, key=self._rank)

    def token(self, node: int) -> int:
        """The token of a node."""
        return self._nodes[node].token

    def parent(self, node: int) -> int:
        """The node above a node."""
        return self._nodes[node].parent

    def tree(self) -> DraftTree:
        """The best nodes, in order of falling value."""
        best = self._best()
        place = {node: index for index, node in enumerate(best)}
        nodes = [self._nodes[node] for node in best]
        return DraftTree(
            tuple(node.token for node in nodes),
            tuple(place.get(node.parent, -1) for node in nodes),
            tuple(node.depth for node in nodes),
            tuple(node.value for node in nodes),
        )

    def _best(self) -> list[int]:
        # ties go to the node found first, so parents stand before their children
        return heapq.nsmallest(self.size, range(len(self._nodes)), key=self._rank)

    def _rank(self, node: int) -> tuple[float, int]:
        return -self._nodes[node].value, node


class ShapedTree:
    """A tree of a fixed shape, for one sequence; the same methods as :class:`GrowingTree`.

    Args:
        root: the last committed token.
        shape: ranks to take.
        size: most nodes, root included; the shape's first ones are taken.
    """

    def __init__(self, root: int, shape: TreeShape, size: int) -> None:
        self._paths = shape.paths[: max(0, size - 1)]
        self._values = dict(zip(shape.paths, shape.values, strict=True))
        self._wanted = set(self._paths)
        self._inner = {path[:-1] for path in self._paths}
        self._root = root
        self._tokens: dict[tuple[int, ...], int] = {}
        self._found: list[tuple[int, ...]] = [()]
        self._fresh = 1

    def offer(self, parent: int, tokens: Sequence[int], factors: Sequence[float]) -> None:
        """Candidates below ``parent`` by rank; the shape's values are used, not the factors."""
        above = self._found[parent]
        for rank, token in enumerate(tokens):
            path = (*above, rank)
            if path in self._wanted:
                self._tokens[path] = token
                self._found.append(path)

    def frontier(self, width: int, least: float = 0.0) -> list[int]:
        """Nodes offered since the last call that have children in the shape.

        Args:
            width: most nodes to follow; those of the highest value are.
            least: not used: the shape says how far to go.
        """
        start, self._fresh = self._fresh, len(self._found)
        inner = [i for i in range(start, self._fresh) if self._found[i] in self._inner]
        return heapq.nsmallest(width, inner, key=lambda i: (-self._values[self._found[i]], i))

    def token(self, node: int) -> int:
        """The token of a node."""
        return self._tokens[self._found[node]] if node else self._root

    def parent(self, node: int) -> int:
        """The node above a node."""
        return self._found.index(self._found[node][:-1])

    def tree(self) -> DraftTree:
        """The nodes found, in the shape's order."""
        present = [path for path in self._paths if path in self._tokens]
        place = {(): 0} | {path: index for index, path in enumerate(present, 1)}
        return DraftTree(
            (self._root, *(self._tokens[path] for path in present)),
            (-1, *(place[path[:-1]] for path in present)),
            (0, *(len(path) for path in present)),
            (1.0, *(self._values[path] for path in present)),
        )
