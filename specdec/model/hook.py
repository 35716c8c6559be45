"""The attention hook: what transformers calls in place of its own attention and masks.

The hook holds no state. What it must know arrives as a keyword argument that models pass on
from ``model(...)`` to their attention layers, so that runners cannot disturb each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from specdec.errors import UnsupportedModelError

#: Name under which transformers knows the hook.
IMPLEMENTATION = "specdec_paged"

#: Keyword argument of ``model(...)`` that carries an :class:`AttentionContext`.
CONTEXT = "specdec_context"

#: ``(batch, head, query position, key position) -> visible``, elementwise.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

#: What a mask that comes from :func:`describe_mask` starts with.
_MARK = 1729


@dataclass(frozen=True)
class AttentionCall:
    """One layer's call of its attention function, for a batch of one.

    Attributes:
        module: the attention layer; its ``layer_idx`` names the layer.
        query: ``[1, query_heads, T, D]``.
        key, value: ``[1, kv_heads, T, D]``.
        mask: what the model made of its attention mask.
        scaling: factor on the scores; None for ``1/sqrt(D)``.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None for no cap.
        sinks: ``[query_heads]`` logits of a slot that takes weight and gives no value.
        extra: whatever else the model passed.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scaling: float | None
    softcap: float | None
    sinks: Tensor | None
    extra: dict[str, object]


class AttentionContext(Protocol):
    """What computes attention during one forward."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Attention of one layer, ``[1, T, query_heads, D]``."""


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """What transformers calls; the context does the work.

    Raises:
        UnsupportedModelError: the model does not pass the context on to its attention.
    """
    context: AttentionContext | None = kwargs.pop(CONTEXT, None)  # type: ignore[assignment]
    if context is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not receive the keyword arguments of the model's "
            "forward, so attention over pages cannot be served"
        )
    call = AttentionCall(module, query, key, value, attention_mask, scaling, softcap, s_aux, kwargs)
    # Contiguous, because some models take a view of the result.
    return context.attend(call).contiguous(), None


def describe_mask(
    mask_function: MaskFunction,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **_: object,
) -> Tensor:
    """What transformers calls to build a mask: says in a tensor what the mask would be.

    The layers get it as their attention mask, so that each tells which of the model's masks
    it uses; read it with :func:`read_window`.

    Raises:
        UnsupportedModelError: the mask is neither causal nor a causal sliding window.
    """
    edge = local_size or 7
    query, key = torch.meshgrid(
        torch.tensor([0, 1, edge - 1, edge, edge + 1, 3 * edge, 40 * edge]),
        torch.tensor([0, 1, edge - 1, edge, edge + 1, 2 * edge, 3 * edge, 39 * edge + 1]),
        indexing="ij",
    )
    zero = torch.zeros_like(query)
    want = key <= query
    if local_size is not None:
        want &= key > query - local_size
    try:
        same = bool((mask_function(zero, zero, query, key) == want).all())
    except (IndexError, RuntimeError, TypeError, ValueError):
        same = False
    if not same:
        raise UnsupportedModelError(
            "the model's attention mask is neither causal nor a causal sliding window "
            f"(size {local_size}), so trees cannot be masked like it"
        )
    return torch.tensor([_MARK, local_size or 0], device=device).view(1, 1, 1, 2)


def read_window(mask: Tensor | None) -> int | None:
    """The sliding window, in tokens, of a mask made by :func:`describe_mask`.

    Raises:
        UnsupportedModelError: the mask is another one, or was changed on the way.
    """
    values = [] if mask is None or mask.shape != (1, 1, 1, 2) else mask.flatten().tolist()
    if not values or values[0] != _MARK:
        raise UnsupportedModelError(
            "an attention layer uses a mask that is not transformers' own causal or sliding "
            "mask (a position bias, perhaps)"
        )
    return int(values[1]) or None


def register() -> None:
    """Make the hook known to transformers, under :data:`IMPLEMENTATION`."""
    AttentionInterface.register(IMPLEMENTATION, paged_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, describe_mask)
