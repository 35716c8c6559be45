"""What the kernels read of a transformers model, as types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from specdec.model.native.linear import BrainLinear


class Norm(Protocol):
    """An RMS norm."""

    weight: Tensor
    variance_epsilon: float


class Attention(Protocol):
    """Projections and scale; ``q_norm`` and ``k_norm`` where heads are normed (Qwen 3)."""

    q_proj: BrainLinear
    k_proj: BrainLinear
    v_proj: BrainLinear
    o_proj: BrainLinear
    scaling: float


class Mlp(Protocol):
    """SwiGLU."""

    gate_proj: BrainLinear
    up_proj: BrainLinear
    down_proj: BrainLinear


class DecoderLayer(Protocol):
    """One layer."""

    input_layernorm: Norm
    post_attention_layernorm: Norm
    self_attn: Attention
    mlp: Mlp


class Decoder(Protocol):
    """Everything between embeddings and output head."""

    layers: Sequence[DecoderLayer]
    norm: Norm
