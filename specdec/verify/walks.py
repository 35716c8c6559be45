"""What verification is asked about, and the walk down a tree that all rules share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specdec import noise
from specdec.errors import GrammarError
from specdec.params import SamplingParams
from specdec.policy.constraint import Constraint
from specdec.policy.tree import DraftTree
from specdec.policy.verdict import Verdict
from specdec.sampling import RowHistory


@dataclass(frozen=True)
class VerifyInput:
    """One sequence's tree with the target's logits.

    Attributes:
        logits: ``[N, V]`` float32, row i what the target says after node i. Views of
            consecutive rows of one tensor are best: they are then read in place.
        tree: N nodes; the root is the last committed token. For ``rejection`` siblings must
            stand in the order in which they were sampled.
        params: of the request.
        committed: all committed tokens, the root included.
        prompt_length: how many of them are the prompt.
        draft_probabilities: ``[N, V]``, row i the processed draft distribution that the
            children of node i were sampled from (it depends on the path where the heads do;
            rows of leaves mean nothing); None for candidates that were not sampled. Read
            by ``rejection`` alone.
        constraint: on the tokens, where the request has one.

    Raises:
        ValueError: the parts do not fit each other.
    """

    logits: Tensor
    tree: DraftTree
    params: SamplingParams
    committed: Sequence[int]
    prompt_length: int
    draft_probabilities: Tensor | None = None
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        if len(self.logits) != len(self.tree):
            raise ValueError(
                f"{len(self.logits)} rows of logits for a tree of {len(self.tree)} nodes"
            )
        if self.committed[-1] != self.tree.tokens[0]:
            raise ValueError(
                f"the tree's root is token {self.tree.tokens[0]}, "
                f"the last committed token {self.committed[-1]}"
            )
        draft = self.draft_probabilities
        if draft is not None and draft.shape != self.logits.shape:
            raise ValueError(
                f"draft_probabilities is {list(draft.shape)}, logits {list(self.logits.shape)}"
            )

    @property
    def position(self) -> int:
        """Position of the root's successor."""
        return len(self.committed)

    def history(self, node: int) -> RowHistory:
        """The tokens before the one that ``node``'s row decides about, and which it may be.

        Raises:
            GrammarError: that cannot be told.
        """
        output = [*self.committed[self.prompt_length :]]
        output += [self.tree.tokens[i] for i in self.tree.path_to(node)[1:]]
        allowed = None if self.constraint is None else self.constraint.allowed(output)
        return RowHistory(self.committed[: self.prompt_length], output, allowed)


@dataclass
class Walk:
    """A walk in progress: the nodes reached and the tokens decided after each but the last."""

    source: VerifyInput
    nodes: list[int] = field(default_factory=lambda: [0])
    tokens: list[int] = field(default_factory=list)
    error: str | None = None

    def __post_init__(self) -> None:
        self._below = self.source.tree.children()

    @property
    def node(self) -> int:
        """The node whose successor is to be decided."""
        return self.nodes[-1]

    @property
    def row(self) -> Tensor:
        """``[V]`` logits after that node."""
        return self.source.logits[self.node]

    @property
    def draft_row(self) -> Tensor:
        """``[V]`` the distribution that the node's children were sampled from."""
        if self.source.draft_probabilities is None:
            raise ValueError("these candidates were not sampled")
        return self.source.draft_probabilities[self.node]

    @property
    def position(self) -> int:
        """Position of that successor."""
        return self.source.position + len(self.nodes) - 1

    @property
    def children(self) -> list[int]:
        """Candidates for that successor."""
        return self._below[self.node]

    @property
    def history(self) -> RowHistory | None:
        """What that successor depends on, where the parameters make it depend on anything.

        Raises:
            GrammarError: that cannot be told.
        """
        source = self.source
        needed = source.params.has_penalties or source.constraint is not None
        return source.history(self.node) if needed else None

    def follow(self, token: int) -> bool:
        """Commit a token and go to the child that holds it; False if none does."""
        self.tokens.append(token)
        tree = self.source.tree
        child = next((c for c in self.children if tree.tokens[c] == token), None)
        if child is not None:
            self.nodes.append(child)
        return child is not None

    def branch(self, child: int) -> Walk:
        """A walk of its own, one node further, with that child's token committed."""
        token = self.source.tree.tokens[child]
        return Walk(self.source, [*self.nodes, child], [*self.tokens, token])

    def fail(self, error: str | None = None) -> None:
        """End the walk, at logits that cannot be used if no other reason is given."""
        self.error = error or non_finite(self.position).error

    def verdict(self) -> Verdict:
        """Of the finished walk."""
        if self.error is not None:
            return Verdict.failure(self.error)
        return Verdict(tuple(self.nodes), tuple(self.tokens))


def non_finite(position: int) -> Verdict:
    """The verdict on a walk that reached a row without usable numbers."""
    return Verdict.failure(f"the model produced non-finite logits at position {position}")


def with_histories(walks: Sequence[Walk]) -> tuple[list[Walk], list[RowHistory | None]]:
    """The walks that can go on, with what their next tokens depend on; the others fail."""
    able: list[Walk] = []
    histories: list[RowHistory | None] = []
    for walk in walks:
        try:
            histories.append(walk.history)
        except GrammarError as error:
            walk.fail(str(error))
        else:
            able.append(walk)
    return able, histories


def go_on(walks: Sequence[Walk], tokens: Tensor, finite: Tensor) -> list[Walk]:
    """Commit one token to each walk; returns the walks that reached another node.

    Args:
        walks: S of them.
        tokens: ``[S]``.
        finite: ``[S]`` bool, whether the token came from usable logits.
    """
    following = []
    for walk, token, usable in zip(walks, tokens.tolist(), finite.tolist(), strict=True):
        if not usable:
            walk.fail()
        elif walk.follow(token):
            following.append(walk)
    return following


def gather_rows(walks: Sequence[Walk]) -> Tensor:
    """The rows at which the walks stand, ``[len(walks), V]``."""
    return torch.stack([walk.row for walk in walks])


def walk_noise(walks: Sequence[Walk], lanes: Sequence[int] = (noise.DRAW_LANE,)) -> Tensor:
    """Uniforms ``[len(walks), len(lanes)]`` for the successors of the walks' nodes."""
    numbers = noise.uniforms(
        np.array([walk.source.params.seed for walk in walks], dtype=np.uint64)[:, None],
        np.array([walk.position for walk in walks], dtype=np.uint64)[:, None],
        np.array(lanes, dtype=np.uint64),
    )
    return torch.from_numpy(numbers).to(walks[0].source.logits.device)
