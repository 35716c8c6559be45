"""Batched decoding without copies: attention and a KV cache for making answers."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import sdpa_mask

ATTENTION = "specdec_grouped_sdpa"


def _grouped_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention that reads grouped KV heads once; transformers' own repeats them in memory."""
    out = nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        # transformers leaves the mask out where it would be purely causal
        is_causal=attention_mask is None and query.shape[2] > 1,
        scale=scaling,
        enable_gqa=True,
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _grouped_sdpa)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


class GrowingLayer(DynamicLayer):
    """A cache layer that grows in steps, so that a token costs no copy of the whole cache."""

    GROWTH = 64

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append ``[B, H, T, D]`` states; returns views of all states so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._buffers = (key_states[:, :, :0], value_states[:, :, :0])
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        if end > self._buffers[0].shape[2]:
            shape = (*key_states.shape[:2], end + self.GROWTH, key_states.shape[3])
            grown = (key_states.new_empty(shape), value_states.new_empty(shape))
            for new, old in zip(grown, self._buffers, strict=True):
                new[:, :, :start] = old[:, :, :start]
            self._buffers = grown
        self._buffers[0][:, :, start:end] = key_states
        self._buffers[1][:, :, start:end] = value_states
        self.keys, self.values = (buffer[:, :, :end] for buffer in self._buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``; the next update makes a new buffer."""
        super().batch_select_indices(indices)
        if self.keys is not None and self.values is not None:
            self._buffers = (self.keys, self.values)
