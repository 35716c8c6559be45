"""Heads that see their ancestors.

A plain Medusa head must propose the second token without knowing the first. Here each
node carries a state that its parent's state and its own token were mixed into, as in
Hydra (Ankner et al. 2024) and the recurrent drafter (Zhang et al. 2024). One block serves
all depths, so each position of the training data teaches it several times.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.errors import HeadsError
from specdec.heads.base import DraftHeads, LmHead
from specdec.heads.target import Target


@dataclass(frozen=True)
class SequentialShape:
    """Sizes of sequential heads.

    Attributes:
        hidden_size: H, of the base model.
        vocab_size: of the base model.
        depths: how many tokens ahead of the root.
        width: S, of a node's state.
        inner: of the gated layer in a block.
        blocks: gated blocks per depth, shared by all depths.
        recent: committed tokens before the root that the first state sees.
    """

    hidden_size: int
    vocab_size: int
    depths: int = 4
    width: int = 576
    inner: int = 768
    blocks: int = 1
    recent: int = 0


class GatedBlock(nn.Module):
    """``x + down(value * SiLU(gate))`` on normalised input."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * inner)
        self.down = nn.Linear(inner, width, bias=False)
        nn.init.normal_(self.down.weight, std=0.5 * inner**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """``[R, S]`` to ``[R, S]``."""
        value, gate = self.up(_normalise(x)).chunk(2, -1)
        out: Tensor = x + self.down(value * F.silu(gate))
        return out


class SequentialHeads(DraftHeads):
    """Recurrent heads over the path, with the base model's embeddings and output rows.

    Args:
        shape: sizes.
        token_map: ``[V']`` target tokens that can be proposed; None for all.
    """

    path_dependent = True
    embedding: Tensor

    def __init__(self, shape: SequentialShape, token_map: Tensor | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.depths, self.recent = shape.depths, shape.recent
        self.hidden_size, self.vocab_size = shape.hidden_size, shape.vocab_size
        hidden, width = shape.hidden_size, shape.width
        self.first = nn.Linear(hidden * (2 + shape.recent), width)
        self.following = nn.Linear(width + hidden, width)
        self.depth_bias = nn.Parameter(torch.zeros(shape.depths, width))
        self.blocks = nn.ModuleList(GatedBlock(width, shape.inner) for _ in range(shape.blocks))
        self.out = nn.Linear(width, hidden)
        self.borrowed: nn.Module = nn.Identity()
        self.token_map: Tensor | None
        self.register_buffer("token_map", token_map)

    @property
    def width(self) -> int:
        """V'."""
        return self.shape.vocab_size if self.token_map is None else len(self.token_map)

    def attach(self, target: Target) -> None:
        """Check sizes, take embeddings and output rows."""
        made_for = (self.shape.vocab_size, self.shape.hidden_size)
        if made_for != tuple(target.output.shape):
            raise HeadsError(
                f"the heads are for [vocabulary, hidden size] {list(made_for)}, "
                f"the model has {list(target.output.shape)}"
            )
        self.borrowed = LmHead(target.rows(self.token_map))
        # neither a parameter nor saved; one scale for all rows, so that inputs have unit size
        sample = target.embedding[:: max(1, len(target.embedding) // 4096)].float()
        self.embedding_scale = float(sample.pow(2).mean().rsqrt())
        self.register_buffer("embedding", target.embedding, persistent=False)

    def begin(self, hidden: Tensor, known: Tensor) -> Tensor:
        """States ``[B, S]`` of roots."""
        parts = [
            _normalise(hidden),
            *(self.embed(known[:, -1 - i]) for i in range(self.recent + 1)),
        ]
        return self._mix(1, self.first(torch.cat(parts, -1)))

    def advance(self, depth: int, state: Tensor, tokens: Tensor) -> Tensor:
        """States ``[R, S]`` of nodes at ``depth``."""
        mixed = torch.cat([_normalise(state), self.embed(tokens)], -1)
        return self._mix(depth + 1, self.following(mixed))

    def features(self, depth: int, state: Tensor) -> Tensor:
        """``[R, H]``, the same for all depths."""
        out: Tensor = self.out(_normalise(state))
        return out

    def lm_head(self, depth: int) -> LmHead:
        """The base model's rows, for all depths."""
        assert isinstance(self.borrowed, LmHead)
        return self.borrowed

    def _mix(self, depth: int, x: Tensor) -> Tensor:
        """The shared blocks; ``depth`` is that of the tokens to be proposed."""
        x = x + self.depth_bias[depth - 1]
        for block in self.blocks:
            x = block(x)
        return x

    def embed(self, tokens: Tensor) -> Tensor:
        """``[R, H]`` embeddings of unit size; zero where a token is -1."""
        rows = self.embedding[tokens.clamp(min=0)].float() * self.embedding_scale
        return rows * (tokens >= 0)[:, None]


def _normalise(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])
