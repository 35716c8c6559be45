"""A model's 16-bit weights in float32 for a while, and the very same ones afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

_NARROW = frozenset({torch.bfloat16, torch.float16})

#: Bytes for activations, beyond the widened weights.
_MARGIN = 512 << 20


def narrow_tensors(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers in 16 bits, each once however many modules share it."""
    return [t for t in chain(model.parameters(), model.buffers()) if t.dtype in _NARROW]


@contextmanager
def widened(model: nn.Module) -> Iterator[None]:
    """Let ``model`` compute in float32, with the values that its weights have.

    The 16-bit storages are kept beside, so that nothing is rounded or untied afterwards,
    whatever happens within.

    Raises:
        torch.OutOfMemoryError: the device lacks the twofold bytes of the 16-bit weights.
    """
    tensors = narrow_tensors(model)
    kept = [tensor.data for tensor in tensors]
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    _ask_for_room(tensors, devices)
    try:
        for tensor in tensors:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, data in zip(tensors, kept, strict=True):
            tensor.data = data
        if devices:
            torch.cuda.empty_cache()


def _ask_for_room(tensors: list[Tensor], devices: set[torch.device]) -> None:
    """Other processes on the device would feel the lack of memory before torch says so."""
    for device in devices:
        needed = 2 * sum(t.nbytes for t in tensors if t.device == device) + _MARGIN
        free = torch.cuda.mem_get_info(device)[0]
        if needed > free:
            raise torch.OutOfMemoryError(
                f"{needed / 2**30:.1f} GiB are needed on {device}, {free / 2**30:.1f} are free"
            )
