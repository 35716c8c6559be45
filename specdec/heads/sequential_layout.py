"""Sequential heads as named tensors; sizes are taken from the tensors."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from specdec.errors import HeadsError
from specdec.heads.sequential import SequentialHeads, SequentialShape
from specdec.heads.tensors import TensorTaker


def tensors_of_sequential(heads: SequentialHeads) -> dict[str, Tensor]:
    """All that is needed to build the heads again; not what they borrow from their model."""
    return {
        name: tensor
        for name, tensor in heads.state_dict().items()
        if not name.startswith("borrowed.")
    }


def sequential_from_tensors(
    tensors: Mapping[str, Tensor], hidden_size: int, vocab_size: int
) -> SequentialHeads:
    """Build sequential heads.

    Raises:
        HeadsError: a tensor is missing, extra, misshapen or of a wrong type; names it.
    """
    taker = TensorTaker(tensors)
    bias = taker.shape("depth_bias")
    first = taker.shape("first.weight")
    if len(bias) != 2 or len(first) != 2:
        raise HeadsError("tensors 'depth_bias' and 'first.weight' must be matrices")
    if first[1] % hidden_size or first[1] < 2 * hidden_size:
        raise HeadsError(
            f"tensor 'first.weight' has shape {list(first)}, expected a multiple of the "
            f"hidden size {hidden_size} inputs, at least two"
        )
    blocks = taker.count(r"blocks\.(\d+)\.", "blocks.{}.up.weight")
    up = taker.shape("blocks.0.up.weight")
    shape = SequentialShape(
        hidden_size,
        vocab_size,
        depths=bias[0],
        width=bias[1],
        inner=up[0] // 2,
        blocks=blocks,
        recent=first[1] // hidden_size - 2,
    )
    heads = SequentialHeads(shape, taker.take_token_map(vocab_size))
    for name, parameter in heads.named_parameters():
        parameter.data = taker.take(name, *parameter.shape)
    taker.finish()
    return heads
