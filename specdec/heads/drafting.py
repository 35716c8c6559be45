"""Trees from draft heads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from specdec.heads.base import DraftHeads
from specdec.heads.drafter import ChooseSiblings, SampledDraft
from specdec.heads.growth import GrowingTree, ShapedTree
from specdec.heads.limited import Proposal, limit_proposal
from specdec.policy.constraint import PathLimits
from specdec.policy.shapes import TreeShape, grow_dynamic, grow_static
from specdec.policy.tree import DraftTree

#: Candidates taken below one node. Ranks beyond it are never worth a row.
CANDIDATES = 8
#: Nodes of one sequence that are followed at each depth. On held-out answers two give 99.8 %
#: of the tokens per round that six give with 6 to 12 nodes, at a third of the cost.
FRONTIER = 2

#: On a CPU a node is followed only if it is this likely to be reached: a depth costs 5 % of
#: a round there. It saves a third of the depths for 1.5 % of the tokens per round.
LEAST_CPU = 0.2


class HeadsDrafter:
    """Drafts with heads, depth by depth, for all sequences at once.

    Args:
        heads: attached to their base model and laid out for its device.
        shape: of a static tree; None grows a tree from this step's probabilities.
        candidates: most children of a node.
        frontier: most nodes of one sequence that get children at each depth.
        least: value that a node must have to get children, for a grown tree.
    """

    def __init__(
        self,
        heads: DraftHeads,
        shape: TreeShape | None = None,
        *,
        candidates: int = CANDIDATES,
        frontier: int = FRONTIER,
        least: float = 0.0,
    ) -> None:
        self.heads = heads
        self._shape = shape
        self._candidates = candidates if shape is None else max(candidates, shape.width)
        self._frontier = frontier if shape is None else shape.size
        self._least = least
        self._map = None if heads.token_map is None else heads.token_map.tolist()

    @property
    def max_depth(self) -> int:
        """How many tokens ahead of the root the heads look."""
        return self.heads.depths if self._shape is None else self._shape.depth

    @torch.inference_mode()
    def draft(
        self,
        hidden: Tensor,
        contexts: Sequence[Sequence[int]],
        sizes: Sequence[int],
        least: float = 0.0,
        limits: Sequence[PathLimits | None] | None = None,
    ) -> list[DraftTree]:
        """Trees for ``hidden`` ``[B, H]``; see :class:`specdec.heads.drafter.Drafter`."""
        trees = [DraftTree.root_only(context[-1]) for context in contexts]
        rows = [row for row, size in enumerate(sizes) if size > 1]
        if not rows:
            return trees
        state = self._begin(hidden[rows], [contexts[row] for row in rows])
        roots, most = [contexts[row][-1] for row in rows], [sizes[row] for row in rows]
        if self.heads.path_dependent:
            within = [None if limits is None else limits[row] for row in rows]
            grown = self._grow_paths(state, roots, most, max(least, self._least), within)
        else:
            grown = self._grow_levels(state, roots, most)
        for row, tree in zip(rows, grown, strict=True):
            trees[row] = tree
        return trees

    @torch.inference_mode()
    def draft_sampled(
        self,
        hidden: Tensor,
        context: Sequence[int],
        branching: Sequence[int],
        choose: ChooseSiblings,
    ) -> SampledDraft:
        """A tree of sampled candidates; see :class:`specdec.heads.drafter.Drafter`."""
        tokens, parents, depths, values = [context[-1]], [-1], [0], [1.0]
        paths: list[tuple[int, ...]] = [()]
        vocab = self.heads.vocab_size
        rows: dict[int, Tensor] = {}
        state = self._begin(hidden[None], [context])
        level = [0]
        for depth, count in enumerate(branching[: self.heads.depths], 1):
            logits = self._full_logits(depth, state, vocab)
            sources: list[int] = []
            below: list[int] = []
            for source, node in enumerate(level):
                choice = choose(logits[source], paths[node], count)
                rows[node] = choice.probabilities
                for token, probability in choice.siblings:
                    below.append(len(tokens))
                    sources.append(source)
                    tokens.append(token)
                    parents.append(node)
                    depths.append(depth)
                    values.append(values[node] * probability)
                    paths.append((*paths[node], token))
            level = below
            if not level or depth == self.heads.depths:
                break
            state = self._advance(depth, state[sources], [tokens[node] for node in level])
        tree = DraftTree(tuple(tokens), tuple(parents), tuple(depths), tuple(values))
        probabilities = hidden.new_zeros(len(tokens), vocab)
        for node, row in rows.items():
            probabilities[node] = row
        return SampledDraft(tree, probabilities)

    def _grow_paths(
        self,
        state: Tensor,
        roots: Sequence[int],
        sizes: Sequence[int],
        least: float,
        limits: Sequence[PathLimits | None],
    ) -> list[DraftTree]:
        """What follows a node depends on its path: one row per node followed."""
        growing = [self._new_tree(root, size) for root, size in zip(roots, sizes, strict=True)]
        level = [(row, 0) for row in range(len(roots))]
        for depth in range(1, self.max_depth + 1):
            tokens, factors = self._best(depth, state)
            for place, (row, node) in enumerate(level):
                found = Proposal(tokens[place], factors[place])
                limit = limits[row]
                if limit is not None:
                    above = _path_to(growing[row], node)
                    found = limit_proposal(
                        found,
                        limit,
                        above,
                        partial(self._row_logits, depth, state[place : place + 1]),
                        self._candidates,
                    )
                growing[row].offer(node, found.tokens, found.factors)
            if depth == self.max_depth:
                break
            source = {place: index for index, place in enumerate(level)}
            level = [
                (row, node)
                for row, tree in enumerate(growing)
                for node in tree.frontier(self._frontier, least)
            ]
            if not level:
                break
            parents = [source[row, growing[row].parent(node)] for row, node in level]
            state = self._advance(
                depth, state[parents], [growing[row].token(node) for row, node in level]
            )
        return [tree.tree() for tree in growing]

    def _grow_levels(
        self, state: Tensor, roots: Sequence[int], sizes: Sequence[int]
    ) -> list[DraftTree]:
        """Candidates of a depth are the same below every node: one row per sequence."""
        levels = [self._best(depth, state) for depth in range(1, self.max_depth + 1)]
        trees = []
        for row, (root, size) in enumerate(zip(roots, sizes, strict=True)):
            candidates = [list(zip(t[row], f[row], strict=True)) for t, f in levels]
            if self._shape is None:
                trees.append(grow_dynamic(root, candidates, size))
            else:
                trees.append(grow_static(self._shape, root, candidates).prefix(size))
        return trees

    def _new_tree(self, root: int, size: int) -> GrowingTree | ShapedTree:
        if self._shape is None:
            return GrowingTree(root, size)
        return ShapedTree(root, self._shape, size)

    def _best(self, depth: int, state: Tensor) -> tuple[list[list[int]], list[list[float]]]:
        """Per row the likeliest tokens and their probabilities."""
        indices, probabilities = self.heads.propose(depth, state, self._candidates)
        tokens: list[list[int]] = indices.tolist()
        if self._map is not None:
            tokens = [[self._map[index] for index in row] for row in tokens]
        return tokens, probabilities.tolist()

    def _begin(self, hidden: Tensor, contexts: Sequence[Sequence[int]]) -> Tensor:
        wanted = self.heads.recent + 1
        known = [
            [-1] * (wanted - len(tail)) + tail for tail in (list(c[-wanted:]) for c in contexts)
        ]
        return self.heads.begin(hidden, torch.tensor(known, device=hidden.device))

    def _advance(self, depth: int, state: Tensor, tokens: Sequence[int]) -> Tensor:
        return self.heads.advance(depth, state, torch.tensor(tokens, device=state.device))

    def _row_logits(self, depth: int, state: Tensor) -> Tensor:
        """``[V]`` of the one state ``[1, S]``."""
        return self._full_logits(depth, state, self.heads.vocab_size)[0]

    def _full_logits(self, depth: int, state: Tensor, vocab: int) -> Tensor:
        """``[R, V]`` logits over the target's vocabulary."""
        logits = self.heads.logits(depth, state).float()
        if self.heads.token_map is None:
            return logits
        full = logits.new_full((len(logits), vocab), float("-inf"))
        full[:, self.heads.token_map] = logits
        return full


def _path_to(tree: GrowingTree | ShapedTree, node: int) -> list[int]:
    """Tokens from depth 1 down to a node, its own included."""
    path = []
    while node > 0:
        path.append(tree.token(node))
        node = tree.parent(node)
    return path[::-1]
