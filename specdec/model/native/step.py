"""A whole step of a Llama-like model in one call of our own kernels.

The model stays transformers' own: its modules' weights are read where they lie, and its
own forward still works (the start-up check compares the two). Models of another build run
through the attention hook, with the same packed layers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.model.kv import KvPool
from specdec.model.native.build import tiles_used
from specdec.model.native.linear import BLOCK, BrainLinear
from specdec.model.native.shape import Attention, Decoder, DecoderLayer, Norm
from specdec.model.native.structs import (
    LayerStruct,
    LinearStruct,
    ModelStruct,
    SegmentStruct,
    StepStruct,
)
from specdec.model.probe import AttentionShape
from specdec.model.segment_rows import PackedRows, SegmentRows

#: Families whose decoder layer is RMS norm, rotary attention, residual, RMS norm, SwiGLU,
#: residual, and nothing else (with a bias or per-head norms where the modules have them).
FAMILIES = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)

#: Widths that the kernels' vectors ask for.
_LANES, _HEAD_LANES = 8, 16


class NativeStep:
    """Runs packed rows through all layers, final norm and output head.

    Args:
        model: one that :meth:`fits`.
        shape: of its attention.
        max_length: longest sequence, in tokens.
    """

    def __init__(self, model: PreTrainedModel, shape: AttentionShape, max_length: int) -> None:
        self._max_length = max_length
        self._shape = shape
        decoder = cast(Decoder, model.model)
        self._rotary = cast(nn.Module, model.model.rotary_emb)
        self._embed = model.get_input_embeddings()
        self._head = cast(BrainLinear, model.get_output_embeddings())
        self._kernels = self._head.kernels
        #: Fused weights and norms, kept alive for the structs that point into them.
        self._kept: list[Tensor] = []
        self._layers = [self._layer(layer, i) for i, layer in enumerate(decoder.layers)]
        self._final_norm = self._norm(decoder.norm)
        self._eps = float(decoder.norm.variance_epsilon)
        attention = decoder.layers[0].self_attn
        self._head_eps = float(getattr(getattr(attention, "q_norm", None), "variance_epsilon", 0.0))
        self._scaling = float(attention.scaling)
        self._hidden = int(self._head.in_features)
        self._inner = int(decoder.layers[0].mlp.down_proj.in_features)
        self._struct: ModelStruct | None = None
        self._struct_pool: KvPool | None = None
        self._scratch = torch.empty(0)
        self._cos = self._sin = torch.empty(0, shape.layout.head_dim)

    @property
    def units(self) -> str:
        """What multiplies its matrices: ``tiles`` or ``vectors``; they round differently."""
        return "tiles" if tiles_used(self._kernels) else "vectors"

    @staticmethod
    def fits(model: PreTrainedModel, shape: AttentionShape) -> bool:
        """Whether the kernels compute this model as it is built and packed."""
        if type(model).__name__ not in FAMILIES:
            return False
        if shape.layout.dtype != torch.float32 or shape.layout.head_dim % _HEAD_LANES:
            return False
        if getattr(model.config, "hidden_act", None) != "silu":
            return False
        decoder = cast(Decoder, model.model)
        linears = [part for layer in decoder.layers for part in _linears(layer)]
        if not all(type(part) is BrainLinear for part in (*linears, model.get_output_embeddings())):
            return False
        hooked = (m for m in cast(nn.Module, model.model).modules() if _is_hooked(m))
        return (
            next(hooked, None) is None
            and all(part.out_features % BLOCK == 0 for part in linears)
            and all(part.in_features % _LANES == 0 for part in linears)
            and all(_same_bias(layer.self_attn) for layer in decoder.layers)
        )

    def forward(
        self, segments: Sequence[SegmentRows], pool: KvPool
    ) -> tuple[Tensor, Tensor, tuple[tuple[int, int], ...]]:
        """Logits ``[R, V]``, hidden ``[R, H]`` and per segment the span of its rows in them."""
        packed = PackedRows.of(segments)
        firsts, rows = packed.offsets, int(packed.offsets[-1])
        positions = torch.from_numpy(np.concatenate([s.positions() for s in segments]))
        tokens = torch.tensor([token for s in segments for token in s.tokens])
        logit_rows = torch.from_numpy(packed.logit_rows)
        row_segment = torch.from_numpy(np.repeat(np.arange(len(segments)), np.diff(firsts)))
        x = self._embed(tokens).contiguous()
        cos, sin = self._rotation(positions)
        wanted = len(logit_rows)
        hidden = torch.empty(wanted, self._hidden)
        logits = torch.empty(wanted, self._head.out_features)
        described = [
            _segment(segment, int(first), pool)
            for segment, first in zip(segments, firsts[:-1], strict=True)
        ]
        model = self._bound(pool)
        step = StepStruct(
            rows=rows,
            segment_count=len(segments),
            logit_count=wanted,
            threads=torch.get_num_threads(),
            x=x.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            segments=(SegmentStruct * len(segments))(*(struct for struct, *_ in described)),
            row_segment=row_segment.data_ptr(),
            logit_rows=logit_rows.data_ptr(),
            scratch=self._scratch_for(model, rows),
            hidden=hidden.data_ptr(),
            logits=logits.data_ptr(),
        )
        self._kernels.specdec_step(ctypes.byref(model), ctypes.byref(step))
        return logits, hidden, packed.spans

    def _layer(self, layer: DecoderLayer, index: int) -> LayerStruct:
        attention, mlp = layer.self_attn, layer.mlp
        queries = getattr(attention, "q_norm", None)
        keys = getattr(attention, "k_norm", None)
        return LayerStruct(
            input_norm=self._norm(layer.input_layernorm),
            post_norm=self._norm(layer.post_attention_layernorm),
            query_norm=None if queries is None else self._norm(queries),
            key_norm=None if keys is None else self._norm(keys),
            qkv=self._fused(attention.q_proj, attention.k_proj, attention.v_proj),
            out=attention.o_proj.struct(),
            gate_up=self._fused(mlp.gate_proj, mlp.up_proj),
            down=mlp.down_proj.struct(),
            window=self._shape.windows[index] or 0,
        )

    def _norm(self, norm: Norm) -> int:
        weight: Tensor = norm.weight.detach().float().contiguous()
        self._kept.append(weight)
        return weight.data_ptr()

    def _fused(self, *parts: BrainLinear) -> LinearStruct:
        """One layer that gives the outputs of ``parts`` side by side; they share its weights."""
        packed = torch.cat([part.packed for part in parts])
        start = 0
        for part in parts:
            stop = start + part.packed.shape[0]
            part.adopt(packed[start:stop])
            start = stop
        self._kept.append(packed)
        bias = None
        biases = [part.bias for part in parts if part.bias is not None]
        if biases:
            joined = torch.cat(biases)
            self._kept.append(joined)
            bias = joined.data_ptr()
        return LinearStruct(
            packed.data_ptr(), bias, sum(p.out_features for p in parts), parts[0].in_features
        )

    def _bound(self, pool: KvPool) -> ModelStruct:
        """The model over the keys and values of ``pool``."""
        if self._struct is None or self._struct_pool is not pool:
            for layer, (keys, values) in zip(self._layers, pool.flat, strict=True):
                layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
            layout = pool.layout
            self._struct = ModelStruct(
                layers=(LayerStruct * len(self._layers))(*self._layers),
                layer_count=len(self._layers),
                hidden=self._hidden,
                heads=layout.kv_heads * self._shape.repeats,
                kv_heads=layout.kv_heads,
                head_dim=layout.head_dim,
                inner=self._inner,
                eps=self._eps,
                head_eps=self._head_eps,
                scaling=self._scaling,
                final_norm=self._final_norm,
                lm_head=self._head.struct(),
            )
            self._struct_pool = pool
        return self._struct

    def _scratch_for(self, model: ModelStruct, rows: int) -> int:
        needed = self._kernels.specdec_scratch_floats(ctypes.byref(model), ctypes.c_int64(rows))
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed)
        return self._scratch.data_ptr()

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[T, D]``, from a table that grows with the longest sequence."""
        longest = int(positions.max()) + 1
        if longest > len(self._cos):
            # not beyond the limit: some frequencies change with the longest position asked for
            table = torch.arange(min(1 << (longest - 1).bit_length(), self._max_length))[None]
            cos, sin = self._rotary(torch.empty(0), table)
            self._cos, self._sin = cos[0].float().contiguous(), sin[0].float().contiguous()
        return self._cos[positions], self._sin[positions]


def _linears(layer: DecoderLayer) -> tuple[BrainLinear, ...]:
    attention, mlp = layer.self_attn, layer.mlp
    return (
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    )


def _is_hooked(module: nn.Module) -> bool:
    """Whether somebody changes what a module computes; the kernels would not see it."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _same_bias(attention: Attention) -> bool:
    """Whether all of queries, keys and values have a bias, or none has."""
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    return len({part.bias is None for part in parts}) == 1


def _segment(
    segment: SegmentRows, first: int, pool: KvPool
) -> tuple[SegmentStruct, np.ndarray, np.ndarray | None]:
    """The struct, and the arrays it points to, which must outlive it."""
    slots = np.ascontiguousarray(pool.slots(segment.pages, 0, segment.length))
    # the kernels write where they are told to
    if len(slots) < segment.length or slots.min() < 0 or slots.max() >= pool.null_slot:
        raise IndexError(f"slots of {segment.length} tokens outside a pool of {pool.null_slot}")
    visible = None
    if segment.tree is not None and segment.width > 1:
        visible = np.ascontiguousarray(segment.visible(), dtype=np.uint8)
    struct = SegmentStruct(
        first=first,
        width=segment.width,
        start=segment.start,
        slots=slots.ctypes.data,
        visible=None if visible is None else visible.ctypes.data,
    )
    return struct, slots, visible
