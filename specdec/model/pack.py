"""Which packed layer a CPU gets: our own kernel where it compiles, else FBGEMM's."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from specdec.model.linear import HalfLinear, PackedLinear, has_fp16_packing
from specdec.model.native.build import load_kernels
from specdec.model.native.linear import BrainLinear


def can_pack() -> bool:
    """Whether this CPU has a packed layer."""
    return load_kernels() is not None or has_fp16_packing()


def pack_linear(weight: Tensor, bias: Tensor | None = None, *, native: bool = True) -> PackedLinear:
    """A packed layer with these weights.

    Args:
        weight: ``[out, in]``; rounded to 16 bits.
        bias: ``[out]`` or None.
        native: whether our own kernel may be used.
    """
    kernels = load_kernels() if native else None
    if kernels is not None:
        return BrainLinear(weight, bias, kernels)
    return HalfLinear(weight, bias)


def pack_linears(module: nn.Module, *, native: bool = True) -> int:
    """Replace every linear layer below ``module`` by a packed one, in place.

    Returns:
        How many layers were replaced.
    """
    count = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, pack_linear(child.weight, child.bias, native=native))
            elif type(child) is Conv1D:  # GPT-2's, with transposed weights
                setattr(parent, name, pack_linear(child.weight.T, child.bias, native=native))
            else:
                continue
            count += 1
    return count
