"""Which candidates a draft tree holds. Holds no torch.

Heads propose per depth a list of candidate tokens, whatever stands above them. The chance that
the walk reaches a node is estimated by the product along its path, of measured accuracies for
a static tree (Cai et al. 2024, Medusa, section 3.3) or of this step's probabilities for a
dynamic one. Both are grown best-first: as no factor is above 1, the best nodes form a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from specdec.policy.tree import DraftTree

#: A token and the probability that the drafter gives it.
Candidate = tuple[int, float]


@dataclass(frozen=True)
class TreeShape:
    """A tree of candidate ranks, the same for every step.

    Attributes:
        paths: per node but the root its ranks from depth 1 down to its own, in order of
            falling value; a path stands behind its own beginnings.
        values: per path the estimated probability that the walk reaches its node.
    """

    paths: tuple[tuple[int, ...], ...]
    values: tuple[float, ...]

    @property
    def size(self) -> int:
        """Nodes, root included."""
        return len(self.paths) + 1

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return max(map(len, self.paths), default=0)

    @property
    def width(self) -> int:
        """Candidates needed at each depth."""
        return max((path[-1] for path in self.paths), default=-1) + 1


def static_tree(accuracies: Sequence[Sequence[float]], size: int) -> TreeShape:
    """The tree of ``size`` nodes that reaches furthest on average.

    Args:
        accuracies: per depth and rank the share of steps in which that candidate was right.
        size: nodes, root included; fewer come back where no other candidate was ever right.

    Raises:
        ValueError: an accuracy is not within 0 and 1.
    """
    ranked = []
    for row in accuracies:
        if not all(0 <= accuracy <= 1 for accuracy in row):
            raise ValueError(f"accuracies must be between 0 and 1, not {list(row)}")
        ranks = sorted((r for r, accuracy in enumerate(row) if accuracy > 0), key=lambda r: -row[r])
        ranked.append([(rank, row[rank]) for rank in ranks])
    parents, picks, _, values = _best_first(ranked, size)
    paths: list[tuple[int, ...]] = [()]
    for parent, pick in zip(parents[1:], picks[1:], strict=True):
        paths.append((*paths[parent], pick))
    return TreeShape(tuple(paths[1:]), tuple(values[1:]))


def grow_static(
    shape: TreeShape, root_token: int, candidates: Sequence[Sequence[Candidate]]
) -> DraftTree:
    """Fill a shape with this step's candidates.

    Values stay those of the shape, whatever the probabilities: the form of the tree, and how
    far it is cut, then do not depend on which tokens were drafted.

    Args:
        shape: which ranks to take.
        root_token: the last committed token.
        candidates: per depth, by rank. Nodes without a candidate are left out, with all
            below them.
    """
    nodes: dict[tuple[int, ...], int] = {(): 0}
    tokens, parents, depths, values = [root_token], [-1], [0], [1.0]
    for path, value in zip(shape.paths, shape.values, strict=True):
        parent, depth, rank = nodes.get(path[:-1]), len(path), path[-1]
        if parent is None or depth > len(candidates) or rank >= len(candidates[depth - 1]):
            continue
        nodes[path] = len(tokens)
        tokens.append(candidates[depth - 1][rank][0])
        parents.append(parent)
        depths.append(depth)
        values.append(value)
    return DraftTree(tuple(tokens), tuple(parents), tuple(depths), tuple(values))


def grow_dynamic(
    root_token: int, candidates: Sequence[Sequence[Candidate]], size: int
) -> DraftTree:
    """The ``size`` likeliest nodes by the product of this step's probabilities.

    Not for sampled candidates under the rejection rule: a tree whose form depends on which
    tokens were drawn would bias it.

    Args:
        root_token: the last committed token.
        candidates: per depth by falling probability.
        size: nodes, root included; fewer come back where candidates above 0 run out.
    """
    parents, picks, depths, values = _best_first(candidates, size)
    picks[0] = root_token
    return DraftTree(tuple(picks), tuple(parents), tuple(depths), tuple(values))


def _best_first(
    levels: Sequence[Sequence[Candidate]], size: int
) -> tuple[list[int], list[int], list[int], list[float]]:
    """The best ``size`` nodes in order of falling value; ties go to the one found first.

    Args:
        levels: per depth what may stand there and its factor, by falling factor, at most 1;
            what has the value 0 is left out.
        size: nodes, root included.

    Returns:
        Per node its parent, what stands there (0 for the root), depth and value.
    """
    parents, picks, depths, values = [-1], [0], [0], [1.0]
    # Of an offer: its value negated, its number, parent, level, rank and the parent's value.
    heap: list[tuple[float, int, int, int, int, float]] = []
    offers = [(0, 0, 0, 1.0)]
    found = 0
    while True:
        for parent, level, rank, above in offers:
            if level < len(levels) and rank < len(levels[level]):
                value = above * levels[level][rank][1]
                if value > 0:
                    found += 1
                    heappush(heap, (-value, found, parent, level, rank, above))
        if not heap or len(parents) >= size:
            return parents, picks, depths, values
        negated, _, parent, level, rank, above = heappop(heap)
        offers = [(parent, level, rank + 1, above), (len(parents), level + 1, 0, -negated)]
        parents.append(parent)
        picks.append(levels[level][rank][0])
        depths.append(level + 1)
        values.append(-negated)
