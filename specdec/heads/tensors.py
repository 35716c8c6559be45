"""Taking tensors one by one, so that whatever is left over is an error."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from specdec.errors import HeadsError

#: What ``torch.load(weights_only=True)`` raises on files that are broken or not its own.
BROKEN_FILE = (
    OSError,
    RuntimeError,
    EOFError,
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
    TypeError,
    pickle.UnpicklingError,
)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class TensorTaker:
    """A set of named tensors of which each must be asked for exactly once.

    Args:
        tensors: by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._left = dict(tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def matches(self, pattern: str) -> bool:
        """Whether any name that is left begins with ``pattern``."""
        return any(re.match(pattern, name) for name in self._left)

    def count(self, pattern: str, wanted: str) -> int:
        """How many indices names have at the group of ``pattern``: 0, 1, … without a gap.

        Args:
            pattern: matches the beginning of a name; its group is the index.
            wanted: with ``{}`` for the index, the tensor that a gap lacks.

        Raises:
            HeadsError: there is a gap.
        """
        matches = (re.match(pattern, name) for name in self._left)
        found = {int(match[1]) for match in matches if match}
        for index in range(max(found, default=-1) + 1):
            if index not in found:
                raise HeadsError(f"tensor {wanted.format(index)!r} is missing")
        return len(found)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a matrix or vector that stays to be taken.

        Raises:
            HeadsError: it is missing.
        """
        if name not in self._left:
            raise HeadsError(f"tensor {name!r} is missing")
        return tuple(self._left[name].shape)

    def take(self, name: str, *shape: int) -> Tensor:
        """A float tensor of that shape, as float32.

        Raises:
            HeadsError: it is missing, misshapen, of another type or not finite.
        """
        if self.shape(name) != shape:
            raise HeadsError(
                f"tensor {name!r} has shape {list(self.shape(name))}, expected {list(shape)}"
            )
        tensor = self._left.pop(name)
        if tensor.dtype not in _FLOATS:
            raise HeadsError(f"tensor {name!r} is of type {tensor.dtype}, expected a float type")
        if not bool(torch.isfinite(tensor).all()):
            raise HeadsError(f"tensor {name!r} holds values that are not finite")
        return tensor.float()

    def take_token_map(self, vocab_size: int) -> Tensor | None:
        """``token_map`` ``[V']`` of distinct tokens of the base model, or None without one.

        Raises:
            HeadsError: it is not that.
        """
        token_map = self._left.pop("token_map", None)
        if token_map is None:
            return None
        whole = token_map.dtype in (torch.int32, torch.int64)
        if token_map.dim() != 1 or not len(token_map) or not whole:
            raise HeadsError(
                f"tensor 'token_map' is {token_map.dtype} of shape {list(token_map.shape)}, "
                "expected whole numbers [V']"
            )
        if int(token_map.min()) < 0 or int(token_map.max()) >= vocab_size:
            raise HeadsError(f"tensor 'token_map' names tokens outside 0 to {vocab_size - 1}")
        if len(token_map.unique()) != len(token_map):
            raise HeadsError("tensor 'token_map' names a token twice")
        return token_map.long()

    def finish(self) -> None:
        """All must have been taken.

        Raises:
            HeadsError: names one that is left.
        """
        if self._left:
            raise HeadsError(f"unexpected tensor {min(self._left)!r}")
