"""A linear layer on our own kernel."""

from __future__ import annotations

import ctypes
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.model.linear import PackedLinear
from specdec.model.native.structs import LinearStruct

#: Outputs per packed block; ``COLS`` in linear.h.
BLOCK = 16


class BrainLinear(PackedLinear):
    """With weights in bfloat16.

    Args:
        weight: ``[out, in]``; rounded to bfloat16.
        bias: ``[out]`` or None.
        kernels: from :func:`specdec.model.native.build.load_kernels`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, kernels: ctypes.CDLL) -> None:
        super().__init__(*weight.shape)
        self.kernels = kernels
        #: ``[ceil(out / 16), in, 8]`` int32: output i of a block low, output i + 8 high.
        self.packed = pack_blocks(weight)
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self._struct = self.struct()

    def struct(self) -> LinearStruct:
        """What the kernels read; valid while this layer and its tensors live."""
        bias = None if self.bias is None else self.bias.data_ptr()
        return LinearStruct(self.packed.data_ptr(), bias, self.out_features, self.in_features)

    def adopt(self, packed: Tensor) -> None:
        """Use ``packed``, which holds the same values at another place."""
        self.packed = packed
        self._struct = self.struct()

    def unpacked(self) -> Tensor:
        """The weights ``[out, in]`` in float32."""
        halves = self.packed.view(torch.bfloat16).view(-1, self.in_features, 8, 2)
        return halves.permute(0, 3, 2, 1).reshape(-1, self.in_features)[: self.out_features].float()

    def _product(self, x: Tensor) -> Tensor:
        x = x.detach().contiguous()
        if x.dtype != torch.float32:
            raise TypeError(f"packed layers compute in float32, not in {x.dtype}")
        out = x.new_empty(x.shape[0], self.out_features)
        self.kernels.specdec_linear(
            ctypes.byref(self._struct),
            ctypes.c_void_p(x.data_ptr()),
            ctypes.c_int64(x.shape[0]),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_int64(torch.get_num_threads()),
        )
        return out


def kernels_of(model: nn.Module) -> ctypes.CDLL | None:
    """The kernels that a model was packed for, or None."""
    head = cast(PreTrainedModel, model).get_output_embeddings()
    return head.kernels if isinstance(head, BrainLinear) else None


def pack_blocks(weight: Tensor) -> Tensor:
    """``[out, in]`` as blocks ``[ceil(out / 16), in, 8]`` int32; see :class:`BrainLinear`."""
    rows, columns = weight.shape
    weight = weight.detach().to("cpu", torch.bfloat16)
    blocks = -(-rows // BLOCK)
    if blocks * BLOCK != rows:
        weight = torch.cat([weight, weight.new_zeros(blocks * BLOCK - rows, columns)])
    halves = weight.view(blocks, 2, BLOCK // 2, columns).permute(0, 3, 2, 1).contiguous()
    return halves.view(torch.int32).view(blocks, columns, BLOCK // 2)
