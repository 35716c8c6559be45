"""Linear layers with weights packed for the CPU at hand.

CPUs without bfloat16 units (AVX2 machines) take about ten times as long for a
bfloat16 matrix product of 16 rows as for one row, because the kernel falls back
to scalar conversion. There, 16-bit weights with float32 arithmetic are the fast
path: FBGEMM reads half the bytes of float32 and its cost is flat up to six rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def has_native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware (AVX-512 BF16 or AMX)."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_fp16_packing() -> bool:
    """Whether FBGEMM's half-precision weight packing is built in and runs on this CPU."""
    return "fbgemm" in torch.backends.quantized.supported_engines


class PackedLinear(nn.Module):
    """``y = x W^T + b`` with W stored in 16 bits and float32 arithmetic.

    Args:
        weight: ``[out, in]``, any float type. Values in bfloat16's precision
            and half precision's normal range are kept exactly.
        bias: ``[out]`` or None.
    """

    #: A single row runs another FBGEMM kernel, with another order of summation
    #: than a row among several; padding to two keeps rows bitwise independent
    #: of how many stand beside them.
    MIN_ROWS = 2

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.quantized.linear_prepack_fp16(
            weight.detach().float().contiguous(), None if bias is None else bias.detach().float()
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` float32 to ``[..., out]`` float32."""
        flat = x.reshape(-1, self.in_features)
        rows = flat.shape[0]
        if rows == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        if rows < self.MIN_ROWS:
            flat = flat.expand(self.MIN_ROWS, -1).contiguous()
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16(flat, self._packed)
        return out[:rows].reshape(*x.shape[:-1], self.out_features)


def pack_linears(module: nn.Module) -> int:
    """Replace every ``nn.Linear`` below ``module`` by a :class:`PackedLinear`, in place.

    Returns:
        How many layers were replaced.
    """
    count = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child.weight, child.bias))
                count += 1
    return count
