"""Linear layers with weights packed for the CPU at hand.

CPUs without bfloat16 units (AVX2 machines) take about ten times as long for a
bfloat16 matrix product of 16 rows as for one row, because the kernel falls back
to scalar conversion. There, 16-bit weights with float32 arithmetic are the fast
path: half the bytes of float32 are read, and a few rows cost little more than one.
"""

from __future__ import annotations

from abc import abstractmethod

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

    A row's result has the same bits however many rows stand beside it.
    """

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.out_features, self.in_features = out_features, in_features

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` float32 to ``[..., out]`` float32."""
        flat = x.reshape(-1, self.in_features)
        if flat.shape[0] == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        return self._product(flat).reshape(*x.shape[:-1], self.out_features)

    @abstractmethod
    def unpacked(self) -> Tensor:
        """The weights ``[out, in]`` in float32."""

    @abstractmethod
    def _product(self, x: Tensor) -> Tensor:
        """``[R, in]`` with R ≥ 1 to ``[R, out]``."""


class HalfLinear(PackedLinear):
    """By FBGEMM, with weights in half precision; flat in cost up to six rows.

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
        super().__init__(*weight.shape)
        self._packed = torch.ops.quantized.linear_prepack_fp16(
            weight.detach().float().contiguous(), None if bias is None else bias.detach().float()
        )

    def unpacked(self) -> Tensor:
        """The weights ``[out, in]`` in float32."""
        weight: Tensor = torch.ops.quantized.linear_unpack_fp16(self._packed)[0]
        return weight

    def _product(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows < self.MIN_ROWS:
            x = x.expand(self.MIN_ROWS, -1).contiguous()
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return out[:rows]
