"""Output rows in 8 bits, for drafting."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.model.native.structs import ByteRowsStruct

#: Outputs per packed block; ``BYTE_BLOCK`` in bytes.h.
BLOCK = 8
_LARGEST = 127


class ByteRows:
    """Rows of an output head, each as a scale times whole numbers from -127 to 127.

    Half the bytes of bfloat16 rows. Logits are then off by some thousandths of their spread,
    which a draft does not notice: verification decides.

    Args:
        weight: ``[out, in]``, ``in`` even.
    """

    def __init__(self, weight: Tensor) -> None:
        self.shape = weight.shape
        top = weight.abs().amax(-1)
        self.scale = (top / _LARGEST).float().contiguous()
        steps = torch.where(self.scale > 0, self.scale, 1.0)[:, None]
        self.packed = _pack((weight.float() / steps).round_().to(torch.int8))

    def struct(self) -> ByteRowsStruct:
        """What the kernels read; valid while this object lives."""
        return ByteRowsStruct(self.packed.data_ptr(), self.scale.data_ptr(), *self.shape)

    def unpacked(self) -> Tensor:
        """The rows ``[out, in]`` in float32, as they are computed with."""
        rows, columns = self.shape
        whole = self.packed.permute(0, 2, 1, 3).reshape(-1, columns)[:rows]
        return whole * self.scale[:, None]


def _pack(numbers: Tensor) -> Tensor:
    """``[out, in]`` as blocks ``[ceil(out / 8), in / 2, 8, 2]``."""
    rows, columns = numbers.shape
    blocks = -(-rows // BLOCK)
    padded = numbers.new_zeros(blocks * BLOCK, columns)
    padded[:rows] = numbers
    return padded.view(blocks, BLOCK, columns // 2, 2).permute(0, 2, 1, 3).contiguous()
