"""A linear layer on our own kernel."""

from __future__ import annotations

import ctypes
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from specdec.model.linear import PackedLinear
from specdec.model.native.structs import LinearStruct

#: Outputs per packed block; ``COLS`` in packing.h.
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
        #: ``[ceil(out / 16), ceil(in / 2), 16]`` int32; see packing.h.
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
        blocks, pairs, _ = self.packed.shape
        halves = self.packed.view(torch.bfloat16).view(blocks, pairs, BLOCK, 2)
        whole = halves.permute(0, 2, 1, 3).reshape(blocks * BLOCK, 2 * pairs)
        return whole[: self.out_features, : self.in_features].float()

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
    """``[out, in]`` as blocks ``[ceil(out / 16), ceil(in / 2), 16]`` int32; see packing.h."""
    rows, columns = weight.shape
    weight = weight.detach().to("cpu", torch.bfloat16)
    blocks, pairs = -(-rows // BLOCK), -(-columns // 2)
    weight = functional.pad(weight, (0, 2 * pairs - columns, 0, blocks * BLOCK - rows))
    halves = weight.view(blocks, BLOCK, pairs, 2).permute(0, 2, 1, 3).contiguous()
    return halves.view(torch.int32).view(blocks, pairs, BLOCK)
