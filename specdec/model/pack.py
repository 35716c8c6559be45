"""Which packed layer a CPU gets: our own kernel where it compiles, else FBGEMM's."""

from __future__ import annotations

import ctypes

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from specdec.model.linear import HalfLinear, PackedLinear
from specdec.model.native.linear import BrainLinear


def pack_linear(
    weight: Tensor, bias: Tensor | None = None, kernels: ctypes.CDLL | None = None
) -> PackedLinear:
    """A packed layer with these weights.

    Args:
        weight: ``[out, in]``; rounded to 16 bits.
        bias: ``[out]`` or None.
        kernels: our own, or None for FBGEMM's.
    """
    return HalfLinear(weight, bias) if kernels is None else BrainLinear(weight, bias, kernels)


def pack_linears(module: nn.Module, kernels: ctypes.CDLL | None = None) -> int:
    """Replace every linear layer below ``module`` by a packed one, in place.

    Returns:
        How many layers were replaced.
    """
    count = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, pack_linear(child.weight, child.bias, kernels))
            elif type(child) is Conv1D:  # GPT-2's, with transposed weights
                setattr(parent, name, pack_linear(child.weight.T, child.bias, kernels))
            else:
                continue
            count += 1
    return count
