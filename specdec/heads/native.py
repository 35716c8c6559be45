"""Sequential heads on our own kernels: one call per depth in place of some thirty."""

from __future__ import annotations

import ctypes
from typing import cast

import torch
from torch import Tensor, nn

from specdec.heads.base import DraftHeads, LmHead
from specdec.heads.sequential import GatedBlock, SequentialHeads
from specdec.heads.target import Target
from specdec.model.native.bytes import ByteRows
from specdec.model.native.linear import BrainLinear
from specdec.model.native.structs import HeadBlockStruct, HeadsStruct

#: Elements of a vector in the kernels.
_LANES = 8


def accelerate(heads: DraftHeads) -> DraftHeads:
    """Heads on our own kernels where these compute them, else as they are."""
    if not isinstance(heads, SequentialHeads):
        return heads
    shape = heads.shape
    widths = (shape.hidden_size, shape.width, shape.inner)
    if shape.recent or shape.blocks < 1 or any(width % _LANES for width in widths):
        return heads
    packed = all(isinstance(layer, BrainLinear) for layer in _layers(heads))
    return NativeHeads(heads) if packed else heads


def _layers(heads: SequentialHeads) -> list[nn.Module]:
    """All linear layers: three of the heads, the output rows, then two per block."""
    blocks = [cast(GatedBlock, block) for block in heads.blocks]
    inside = [layer for block in blocks for layer in (block.up, block.down)]
    return [heads.first, heads.following, heads.out, heads.lm_head(1).linear, *inside]


class NativeHeads(DraftHeads):
    """The same heads, faster; what they propose is rounded a little.

    Args:
        heads: packed, attached to their base model.

    Attributes:
        output: the output rows that candidates are proposed by, in 8 bits; :meth:`logits`, from
            which candidates are sampled, takes the full ones.
    """

    path_dependent = True

    def __init__(self, heads: SequentialHeads) -> None:
        super().__init__()
        first, following, out, lm_head, *inside = [cast(BrainLinear, x) for x in _layers(heads)]
        self.output = ByteRows(lm_head.unpacked())
        self._kernels = first.kernels
        self.heads = heads
        self.depths, self.recent = heads.depths, heads.recent
        self.hidden_size, self.vocab_size = heads.hidden_size, heads.vocab_size
        self.token_map = heads.token_map
        shape = heads.shape
        longest = max(shape.hidden_size, shape.width)
        self.register_buffer("ones", torch.ones(longest), persistent=False)
        pairs = zip(inside[::2], inside[1::2], strict=True)
        blocks = [HeadBlockStruct(up=up.struct(), down=down.struct()) for up, down in pairs]
        self._bias = heads.depth_bias.detach().float().contiguous()
        self._struct = HeadsStruct(
            first=first.struct(),
            following=following.struct(),
            out=out.struct(),
            lm_head=self.output.struct(),
            blocks=(HeadBlockStruct * len(blocks))(*blocks),
            depth_bias=self._bias.data_ptr(),
            ones=cast(Tensor, self.ones).data_ptr(),
            block_count=len(blocks),
            width=shape.width,
            hidden=shape.hidden_size,
            inner=shape.inner,
            vocabulary=heads.width,
            eps=torch.finfo(torch.float32).eps,
        )

    @property
    def width(self) -> int:
        """V'."""
        return self.heads.width

    def attach(self, target: Target) -> None:
        """Nothing to do: the heads are attached."""

    def begin(self, hidden: Tensor, known: Tensor) -> Tensor:
        """States ``[B, S]`` of roots."""
        return self._states(0, hidden, known[:, -1])

    def advance(self, depth: int, state: Tensor, tokens: Tensor) -> Tensor:
        """States ``[R, S]`` of nodes at ``depth``."""
        return self._states(depth, state, tokens)

    def features(self, depth: int, state: Tensor) -> Tensor:
        """As the heads themselves."""
        return self.heads.features(depth, state)

    def lm_head(self, depth: int) -> LmHead:
        """As the heads themselves."""
        return self.heads.lm_head(depth)

    def propose(self, depth: int, state: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The likeliest tokens below each state; see :meth:`DraftHeads.propose`."""
        rows, count = len(state), min(count, self.width)
        shape = self.heads.shape
        tokens = torch.empty(rows, count, dtype=torch.int64)
        probabilities = torch.empty(rows, count)
        floats = shape.width + 2 * shape.hidden_size + self.width + 1
        scratch = torch.empty(rows * floats + _tile_rows(rows) * shape.width)
        state = state.contiguous()
        self._kernels.specdec_heads_propose(
            ctypes.byref(self._struct),
            ctypes.c_int64(rows),
            _address(state),
            ctypes.c_int64(count),
            _address(tokens),
            _address(probabilities),
            _address(scratch),
            ctypes.c_int64(torch.get_num_threads()),
        )
        return tokens, probabilities

    def _states(self, depth: int, parents: Tensor, tokens: Tensor) -> Tensor:
        if not 0 <= depth < self.depths:
            raise IndexError(f"no state at depth {depth}: the heads have {self.depths} depths")
        shape, rows = self.heads.shape, len(parents)
        source = parents.shape[1]
        embedded = self.heads.embed(tokens).contiguous()
        parents = parents.float().contiguous()
        states = torch.empty(rows, shape.width)
        joined = source + shape.hidden_size
        floats = joined + shape.width + 3 * shape.inner
        widest = max(joined, shape.width, shape.inner)
        scratch = torch.empty(rows * floats + _tile_rows(rows) * widest)
        self._kernels.specdec_heads_states(
            ctypes.byref(self._struct),
            ctypes.c_int64(depth),
            ctypes.c_int64(rows),
            _address(parents),
            ctypes.c_int64(source),
            _address(embedded),
            _address(states),
            _address(scratch),
            ctypes.c_int64(torch.get_num_threads()),
        )
        return states


def _tile_rows(rows: int) -> int:
    return -(-rows // 16) * 16


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
