"""Draft trees: which candidate continuations are verified together. Holds no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class DraftTree:
    """A root and candidate nodes below it; index 0 is the root.

    Parents stand before their children and nodes stand in order of falling estimated
    acceptance, so that any prefix is itself a tree.

    Attributes:
        tokens: per node its token; ``tokens[0]`` is the last committed token.
        parents: per node the index of its parent; ``parents[0] == -1``.
        depths: per node its distance from the root; ``depths[0] == 0``.
        values: per node the estimated probability that the walk reaches it; root 1.0.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    values: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def root_only(token: int) -> DraftTree:
        """A tree without candidates: plain decoding."""
        return DraftTree((token,), (-1,), (0,), (1.0,))

    def prefix(self, size: int) -> DraftTree:
        """The first ``size`` nodes (at least the root)."""
        size = max(1, size)
        return DraftTree(
            self.tokens[:size], self.parents[:size], self.depths[:size], self.values[:size]
        )

    def limit_depth(self, depth: int) -> DraftTree:
        """Without the nodes deeper than ``depth`` (0 leaves the root)."""
        if max(self.depths) <= depth:
            return self
        kept = [i for i, d in enumerate(self.depths) if d <= depth]
        place = {node: i for i, node in enumerate(kept)} | {-1: -1}
        return DraftTree(
            tuple(self.tokens[i] for i in kept),
            tuple(place[self.parents[i]] for i in kept),
            tuple(self.depths[i] for i in kept),
            tuple(self.values[i] for i in kept),
        )

    def children(self) -> list[list[int]]:
        """Per node the indices of its children, in order of falling value."""
        below: list[list[int]] = [[] for _ in self.tokens]
        for node in range(1, len(self.tokens)):
            below[self.parents[node]].append(node)
        return below

    def path_to(self, node: int) -> list[int]:
        """Indices from the root (included) down to ``node`` (included)."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]


def walk(tree: DraftTree, drawn: Sequence[int]) -> tuple[list[int], list[int]]:
    """Follow the tokens that the target drew from the root downwards.

    Args:
        drawn: per node the token that the target emits after it.

    Returns:
        The nodes walked (root first), and the tokens committed: one per walked node, the
        last of which no child held (the bonus token).
    """
    below = tree.children()
    node, nodes, tokens = 0, [0], [drawn[0]]
    while True:
        follower = next((c for c in below[node] if tree.tokens[c] == tokens[-1]), None)
        if follower is None:
            return nodes, tokens
        node = follower
        nodes.append(node)
        tokens.append(drawn[node])
