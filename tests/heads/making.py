"""Small heads and targets, from seeds."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.heads.sequential import SequentialHeads, SequentialShape
from specdec.heads.target import Target

HIDDEN, VOCAB = 16, 30


def small_target(seed: int = 0, tied: bool = True) -> Target:
    """A target of ``VOCAB`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    return Target(embedding, embedding if tied else torch.randn(VOCAB, HIDDEN, generator=generator))


def small_sequential(
    depths: int = 3, recent: int = 0, token_map: Tensor | None = None, seed: int = 0
) -> SequentialHeads:
    """Random sequential heads, attached."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        heads = SequentialHeads(
            SequentialShape(HIDDEN, VOCAB, depths, width=16, inner=8, recent=recent), token_map
        )
        for parameter in heads.parameters():
            parameter.data = torch.randn(parameter.shape) * 0.5
    heads.attach(small_target(seed))
    heads.eval().requires_grad_(False)
    return heads


def original_tensors(heads: int = 3, layers: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """Tensors as upstream names them, each head with its own output rows."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for i in range(heads):
        for j in range(layers):
            tensors[f"{i}.{j}.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=generator)
            tensors[f"{i}.{j}.linear.bias"] = torch.randn(HIDDEN, generator=generator)
        tensors[f"{i}.{layers}.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator)
    return tensors
