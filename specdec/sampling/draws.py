"""Taking one token per row: the likeliest, or by inverting the distribution function."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# Rows are searched in two levels, blocks and then one block: on a CPU, torch's float64 cumsum
# over a whole vocabulary takes ten times as long.
_BLOCK = 256


def argmax_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row and the first token that has it, as ``torch.max``.

    Args:
        logits: ``[R, V]``.

    Returns:
        Values ``[R]`` (NaN where the row holds one) and tokens ``[R]`` int64.
    """
    if logits.device.type != "cpu":
        values, tokens = logits.max(-1)
        return values, tokens
    rows = logits.detach().numpy()  # its argmax is vectorised over the columns, torch's is not
    best = rows.argmax(-1)
    return torch.from_numpy(rows[np.arange(len(rows)), best]), torch.from_numpy(best)


def finite_rows(logits: Tensor) -> Tensor:
    """Which rows ``[R]`` of ``[R, V]`` can be used: no NaN, no +inf, and a token left.

    -inf stands for a forbidden token and is fine.
    """
    return logits.amax(-1).isfinite()


def invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw columns in proportion to their weight: the inverse distribution function.

    Running sums are float64, in column order. A column of weight zero is never drawn, whatever
    the uniform and however the sums round. A row of NaN gives some column and harms no other.

    Args:
        weights: ``[R, C]``, not negative; need not add up to 1.
        uniforms: ``[R]`` float64 in [0, 1).

    Returns:
        ``[R]`` int64.
    """
    columns = weights.shape[1]
    mass = torch.cat([part.sum(-1) for part in _blocks(weights)], 1).double()
    upto = mass.cumsum(-1)
    target = uniforms[:, None] * upto[:, -1:]
    block = _first_above(upto, mass, target)
    target -= (upto - mass).gather(1, block[:, None])
    index = _columns(block, columns)
    inside = weights.gather(1, index).double()
    chosen = _first_above(inside.cumsum(-1), inside, target)
    return index.gather(1, chosen[:, None])[:, 0]


def draw(processed: Tensor, greedy: Tensor, uniforms: Tensor) -> Tensor:
    """One token per row of processed logits.

    Args:
        processed: ``[R, V]`` float32, -inf where filtered.
        greedy: ``[R]`` bool; such rows take the first of the likeliest tokens.
        uniforms: ``[R]`` float64 in [0, 1), used by the others.

    Returns:
        ``[R]`` int64.
    """
    _, tokens = argmax_rows(processed)
    sampled = (~greedy).nonzero()[:, 0]
    if len(sampled):
        tokens[sampled] = invert(processed[sampled].softmax(-1), uniforms[sampled])
    return tokens


def _blocks(rows: Tensor) -> list[Tensor]:
    """``[R, C]`` as views ``[R, C // 256, 256]`` and, if something is left over, ``[R, 1, r]``."""
    whole = rows.shape[1] // _BLOCK * _BLOCK
    parts = [rows[:, :whole].view(len(rows), whole // _BLOCK, _BLOCK)] if whole else []
    return parts + ([rows[:, None, whole:]] if whole < rows.shape[1] else [])


def _columns(block: Tensor, total: int) -> Tensor:
    """Column numbers ``[R, 256]`` of one block per row; past the end the last one repeats."""
    within = torch.arange(min(_BLOCK, total), device=block.device)
    return (block[:, None] * _BLOCK + within).clamp_(max=total - 1)


def _first_above(sums: Tensor, weights: Tensor, target: Tensor) -> Tensor:
    """First column ``[R]`` with weight whose running sum exceeds the target, else the last."""
    positive = weights > 0
    above = positive & (sums > target)
    last = (positive * torch.arange(weights.shape[1], device=weights.device)).amax(-1)
    return torch.where(above.any(-1), above.to(torch.uint8).argmax(-1), last)
