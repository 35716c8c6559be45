"""The interface that every kind of draft head meets."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from specdec.heads.target import Target
from specdec.model.linear import has_native_bfloat16
from specdec.model.pack import pack_linears


class LmHead(nn.Module):
    """Rows of an output head: logits over the draft vocabulary.

    Args:
        weight: ``[V', H]``; kept as it is for training, packed by :meth:`pack` for the CPU.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.linear: nn.Module = nn.Linear(
            weight.shape[1], weight.shape[0], bias=False, device="meta"
        )
        self.linear.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H]`` to ``[..., V']``."""
        out: Tensor = self.linear(x)
        return out


class DraftHeads(nn.Module, ABC):
    """Proposes the tokens that follow the root, depth by depth.

    A state ``[R, S]`` stands for a node: all that the heads need to know to propose what
    follows it. Depth 1 follows the root.

    Attributes:
        depths: how many tokens ahead of the root the heads look.
        recent: how many committed tokens before the root :meth:`begin` wants to see.
        hidden_size: H, of the base model.
        vocab_size: V, of the base model.
        path_dependent: whether proposals depend on the tokens drafted above.
        token_map: ``[V']`` target token of each row of the logits, or None where the
            draft vocabulary is the target's.
    """

    depths: int
    hidden_size: int
    vocab_size: int
    recent: int = 0
    path_dependent: bool
    token_map: Tensor | None

    @property
    @abstractmethod
    def width(self) -> int:
        """V', the size of the draft vocabulary."""

    @abstractmethod
    def attach(self, target: Target) -> None:
        """Take the base model's tables. To be called once, before any other use.

        Raises:
            HeadsError: the heads were made for a model of other sizes.
        """

    @abstractmethod
    def begin(self, hidden: Tensor, known: Tensor) -> Tensor:
        """States of roots, from which depth 1 is proposed.

        Args:
            hidden: ``[B, H]`` final-norm hidden states from which the roots were drawn.
            known: ``[B, recent + 1]`` committed tokens, the root last; -1 where there is none.
        """

    @abstractmethod
    def advance(self, depth: int, state: Tensor, tokens: Tensor) -> Tensor:
        """States of nodes at ``depth`` ≥ 1 that hold ``tokens`` ``[R]``, from their parents'."""

    @abstractmethod
    def features(self, depth: int, state: Tensor) -> Tensor:
        """``[R, H]``, what the output rows are applied to; arguments as of :meth:`logits`."""

    @abstractmethod
    def lm_head(self, depth: int) -> LmHead:
        """The output rows for ``depth`` ≥ 1."""

    def logits(self, depth: int, state: Tensor) -> Tensor:
        """``[R, V']`` logits of the tokens at ``depth`` ≥ 1, from the states of their parents."""
        out: Tensor = self.lm_head(depth)(self.features(depth, state))
        return out

    def propose(self, depth: int, state: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The likeliest tokens at ``depth`` ≥ 1, from the states ``[R, S]`` of their parents.

        Returns:
            Rows of the draft vocabulary and their probabilities, ``[R, C]`` both, by falling
            probability; C is ``count`` or V', whichever is less.
        """
        probabilities = self.logits(depth, state).float().softmax(-1)
        top = probabilities.topk(min(count, self.width), -1)
        return top.indices, top.values

    def rows(self, depth: int) -> Tensor:
        """``[V', H]`` output rows for ``depth``; not after packing."""
        weight = self.lm_head(depth).linear.weight
        assert isinstance(weight, Tensor)
        return weight


def pack_for_inference(
    heads: DraftHeads, device: torch.device, kernels: ctypes.CDLL | None = None
) -> DraftHeads:
    """Freeze heads and lay out their weights for ``device``, in place.

    A CPU with our own kernels or without bfloat16 units computes with packed 16-bit weights,
    others as they are.

    Args:
        kernels: our own, where the base model runs on them.
    """
    heads.eval().requires_grad_(False).to(device)
    if device.type == "cpu" and (kernels is not None or not has_native_bfloat16()):
        pack_linears(heads, kernels)
    return heads
