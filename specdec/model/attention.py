"""Attention of packed rows over KV pages, under tree masks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.model.groups import AttentionGroup
from specdec.model.hook import AttentionCall
from specdec.model.kv import KvPool
from specdec.model.plan_inputs import StepInputs


@dataclass(frozen=True)
class PagedStep:
    """Attention over pages, for one step.

    Attributes:
        pool: where keys and values are kept.
        inputs: the step.
        windows: per layer its sliding window in tokens, or None.
    """

    pool: KvPool
    inputs: StepInputs
    windows: tuple[int | None, ...]

    def attend(self, call: AttentionCall) -> Tensor:
        """Write this step's keys and values to their slots, then attend group by group."""
        layer: int = call.module.layer_idx  # type: ignore[assignment]
        keys, values = self.pool.flat[layer]
        rows = call.query.shape[2]
        slots = self.inputs.write_slots
        nodes = self.inputs.tree_rows
        key = _without_poison(_by_row(call.key, keys.dtype).reshape(rows, -1), nodes)
        value = _without_poison(_by_row(call.value, values.dtype).reshape(rows, -1), nodes)
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)

        query = _by_row(call.query, values.dtype)
        window, groups = self.windows[layer], self.inputs.groups
        if len(groups) == 1 and groups[0].rows is not None:
            return self._attend(groups[0], window, query, keys, values, call)[None]
        # Row T takes the results of padding.
        out = query.new_empty(rows + 1, query.shape[1], query.shape[2])
        for group in groups:
            if group.rows is not None:
                part = query[group.rows]
                out[group.rows] = self._attend(group, window, part, keys, values, call)
            else:
                part = query.index_select(0, group.gather_rows)
                result = self._attend(group, window, part, keys, values, call)
                out.index_copy_(0, group.scatter_rows, result)
        return out[None, :rows]

    def _attend(
        self,
        group: AttentionGroup,
        window: int | None,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        call: AttentionCall,
    ) -> Tensor:
        """``query`` is ``[G * Q, query_heads, D]``, and so is the result."""
        layout = self.pool.layout
        shape = (group.count, group.length, layout.kv_heads, layout.head_dim)
        if group.slots is not None:
            keys, values = keys[group.slots], values[group.slots]
        else:
            keys = keys.index_select(0, group.gather_slots)
            values = values.index_select(0, group.gather_slots)
        # Query heads that share a KV head become more rows of it: nothing is repeated.
        repeats = query.shape[1] // layout.kv_heads
        folded = query.reshape(group.count, group.width, layout.kv_heads, repeats, -1)
        folded = folded.permute(0, 2, 3, 1, 4).reshape(
            group.count, layout.kv_heads, repeats * group.width, layout.head_dim
        )
        sinks = call.sinks
        if sinks is not None:
            sinks = sinks.reshape(1, layout.kv_heads, repeats, 1)
            sinks = sinks.expand(-1, -1, -1, group.width).flatten(2)
        result = masked_attention(
            folded,
            keys.view(shape).transpose(1, 2),
            values.view(shape).transpose(1, 2),
            group.biases[window],
            call.scaling,
            call.softcap,
            sinks,
        )
        result = result.view(group.count, layout.kv_heads, repeats, group.width, -1)
        return result.permute(0, 3, 1, 2, 4).reshape(query.shape)


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention as in "Attention Is All You Need", with an additive mask.

    Args:
        query: ``[G, heads, Q, D]``.
        key, value: ``[G, heads, L, D]``.
        bias: broadcast to ``[G, heads, Q, L]``, 0 or -inf; None where all is visible.
        scaling: factor on the scores; None for ``1/sqrt(D)``.
        softcap: of the scores before the mask (Gemma 2, arXiv 2408.00118).
        sinks: ``[1, heads, Q]`` logits that take part in the softmax without a value
            (gpt-oss).

    Returns:
        ``[G, heads, Q, D]``.
    """
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(query.float(), key.float().transpose(-1, -2)) * factor
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    if sinks is not None:
        column = sinks.float().expand(scores.shape[0], -1, -1)[..., None]
        weights = torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights, value.float()).to(query.dtype)


def _by_row(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """``[1, heads, T, D]`` as ``[T, heads, D]``."""
    return heads[0].transpose(0, 1).to(dtype)


def _without_poison(states: Tensor, nodes: Tensor | None) -> Tensor:
    """Zero for NaN and infinity in the rows that are tree nodes.

    A candidate that plain decoding would never have visited may overflow; masked, it would
    still turn its cousins into NaN (NaN - inf is NaN). A node that is walked is caught by
    its own logits. Rows of a prompt stay as they are: their NaN must reach the logits.
    """
    if nodes is None:
        return states
    if nodes.numel() == states.shape[0]:
        return states.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    states = states.clone()
    states[nodes] = states[nodes].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return states
