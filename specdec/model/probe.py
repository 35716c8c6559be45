"""What a model's attention layers ask for, learned from one forward with the hook in place."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.errors import UnsupportedModelError
from specdec.model.hook import AttentionCall, read_window
from specdec.model.kv import KvLayout

#: Arguments of an attention call that do not change its result, given what else is checked.
_HARMLESS = frozenset({"sliding_window", "position_ids", "cache_position", "position_embeddings"})


def _harmless(name: str, given: object) -> bool:
    """Whether an argument asks for nothing beyond causal self-attention."""
    if name == "is_causal":
        return given is None or given is True
    off = given is None or (isinstance(given, bool | int | float) and not given)
    return off or name in _HARMLESS


@dataclass(frozen=True)
class AttentionShape:
    """What the pool and the masks must provide.

    Attributes:
        layout: of the KV pool.
        windows: per layer its sliding window in tokens, or None.
        repeats: query heads per KV head.
    """

    layout: KvLayout
    windows: tuple[int | None, ...]
    repeats: int


@dataclass(frozen=True)
class _Layer:
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    repeats: int
    window: int | None


@dataclass
class Probe:
    """An attention context that records what each layer asks for and attends to nothing.

    The forward must be given no attention mask, so that the model builds its own.
    """

    layers: dict[int, _Layer] = field(default_factory=dict)

    def attend(self, call: AttentionCall) -> Tensor:
        """Record the call.

        Raises:
            UnsupportedModelError: the call asks for what paged attention cannot do.
        """
        layer = getattr(call.module, "layer_idx", None)
        if not isinstance(layer, int):
            raise UnsupportedModelError("an attention layer does not know its index")
        if layer in self.layers:
            raise UnsupportedModelError(f"layer {layer} attends more than once per forward")
        query, key, value = call.query.shape, call.key.shape, call.value.shape
        if key != value or query[3] != key[3]:
            raise UnsupportedModelError(
                f"layer {layer}: queries, keys and values differ in size "
                f"({list(query)}, {list(key)}, {list(value)}); one pool cannot hold them"
            )
        if query[0] != 1 or query[2] != key[2] or query[1] % key[1]:
            raise UnsupportedModelError(
                f"layer {layer}: {list(query)} queries over {list(key)} keys is not causal "
                "self-attention with grouped heads"
            )
        for name, given in call.extra.items():
            if not _harmless(name, given):
                raise UnsupportedModelError(f"layer {layer} passes {name!r} to its attention")
        window = read_window(call.mask)
        passed = call.extra.get("sliding_window")
        if passed is not None and passed != window:
            raise UnsupportedModelError(
                f"layer {layer}: a sliding window of {passed} tokens, but a mask of {window}"
            )
        self.layers[layer] = _Layer(key[1], key[3], call.value.dtype, query[1] // key[1], window)
        return call.query.transpose(1, 2)

    def shape(self) -> AttentionShape:
        """What was learned.

        Raises:
            UnsupportedModelError: layers are missing, or they differ.
        """
        if not self.layers or sorted(self.layers) != list(range(len(self.layers))):
            raise UnsupportedModelError(
                f"only layers {sorted(self.layers)} attend; recurrent or shared layers "
                "cannot be served"
            )
        layers = [self.layers[i] for i in range(len(self.layers))]
        kinds = {(x.kv_heads, x.head_dim, x.dtype, x.repeats) for x in layers}
        if len(kinds) > 1:
            raise UnsupportedModelError(
                f"the attention layers differ in heads or head size ({len(kinds)} kinds); "
                "one pool cannot hold them"
            )
        first = layers[0]
        layout = KvLayout(len(layers), first.kv_heads, first.head_dim, first.dtype)
        return AttentionShape(layout, tuple(x.window for x in layers), first.repeats)
