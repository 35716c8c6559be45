"""The drafter's interface: candidates for the tokens that follow, as trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdec.policy.constraint import PathLimits
from specdec.policy.tree import DraftTree


@dataclass(frozen=True)
class SiblingChoice:
    """What the rejection rule's side chose below one node.

    Attributes:
        probabilities: ``[V]`` processed distribution the siblings were drawn from.
        siblings: tokens drawn without replacement, with their probabilities, in order.
    """

    probabilities: Tensor
    siblings: list[tuple[int, float]]


#: From logits ``[V]`` (float32, -inf outside the draft vocabulary), the tokens drafted above
#: (root excluded) and how many siblings are wanted, to the siblings.
ChooseSiblings = Callable[[Tensor, tuple[int, ...], int], SiblingChoice]


@dataclass(frozen=True)
class SampledDraft:
    """A tree of sampled candidates.

    Attributes:
        tree: siblings stand in the order in which they were drawn.
        probabilities: ``[N, V]``; row ``i`` is the distribution that node ``i``'s children
            were drawn from, zeros where it has none.
    """

    tree: DraftTree
    probabilities: Tensor


class Drafter(Protocol):
    """A source of draft trees. Keeps no state between calls.

    Verification makes any drafter lossless, so nothing here can change a text.
    """

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node it may draft; 0 if it never drafts."""

    def draft(
        self,
        hidden: Tensor,
        contexts: Sequence[Sequence[int]],
        sizes: Sequence[int],
        least: float = 0.0,
        limits: Sequence[PathLimits | None] | None = None,
    ) -> list[DraftTree]:
        """Trees for the match and typical rules.

        Args:
            hidden: ``[B, H]`` float32, final-norm state that each root was drawn from.
            contexts: per sequence its committed tokens; the last is the root.
            sizes: per sequence the most nodes, root included.
            least: nothing below a node less likely than this is of use.
            limits: per sequence what may stand in its tree; other nodes are of no use.

        Returns:
            Per sequence a tree of at most its size; values estimate the acceptance.
        """

    def draft_sampled(
        self,
        hidden: Tensor,
        context: Sequence[int],
        branching: Sequence[int],
        choose: ChooseSiblings,
    ) -> SampledDraft:
        """A tree of candidates sampled from the processed draft distribution.

        Args:
            hidden: ``[H]`` float32.
            context: committed tokens; the last is the root.
            branching: how many siblings stand at depth 1, 2, … below each node above.
            choose: draws siblings.
        """


class NullDrafter:
    """Drafts nothing: plain decoding, but for other sources.

    Args:
        vocab_size: V, of the empty distribution.
    """

    max_depth = 0

    def __init__(self, vocab_size: int = 1) -> None:
        self._vocab_size = vocab_size

    def draft(
        self,
        hidden: Tensor,
        contexts: Sequence[Sequence[int]],
        sizes: Sequence[int],
        least: float = 0.0,
        limits: Sequence[PathLimits | None] | None = None,
    ) -> list[DraftTree]:
        """Roots alone."""
        return [DraftTree.root_only(context[-1]) for context in contexts]

    def draft_sampled(
        self,
        hidden: Tensor,
        context: Sequence[int],
        branching: Sequence[int],
        choose: ChooseSiblings,
    ) -> SampledDraft:
        """The root alone."""
        return SampledDraft(DraftTree.root_only(context[-1]), torch.zeros(1, self._vocab_size))
