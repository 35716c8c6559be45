"""Filters that look at the likeliest tokens only.

Sorting a vocabulary of 49,152 costs about 20 times as much as finding its best 256 tokens,
and after top-k, top-p or min-p there is seldom more left than those. A row is answered
here only where the outcome provably equals that of ``filters.filter_rows``: everything
outside the window is removed for sure, no comparison is closer than float32 rounding could
turn, and no tie straddles a boundary (which of the tied tokens go depends on the sort).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec.sampling.filters import RowParams

#: Window widths tried in turn before a row's vocabulary is sorted.
WINDOWS = (256, 2048)

# Observed on 49,152 tokens: the float32 sums of transformers' top-p are within 8e-7 of the
# exact ones, relatively; the margins leave a factor of ten.
_SHARE_MARGIN = 1e-5
_SHARE_FLOOR = 1e-7
_LOG_MARGIN = 2e-6
#: Below this, probabilities at the min-p threshold may leave float32's normal range.
_SMALLEST_MIN_P = 1e-30


@dataclass(frozen=True)
class Window:
    """The tokens that filtering left, for the rows that it could answer.

    Attributes:
        resolved: ``[R]`` bool, which rows of the input these are.
        ids: ``[n, width]`` int64, token ids in rising order.
        logits: ``[n, width]`` float32, -inf where removed.
    """

    resolved: Tensor
    ids: Tensor
    logits: Tensor


def filter_window(scaled: Tensor, params: RowParams, width: int) -> Window:
    """Top-k, top-p and min-p by the ``width`` likeliest tokens of each row.

    Args:
        scaled: ``[R, V]`` float32, divided by the temperature, with V > width.
        params: settings of the rows.
    """
    device = scaled.device
    values, ids = scaled.topk(width)
    finite = values > -torch.inf
    last = values[:, -1]

    k = torch.as_tensor(params.top_k, device=device)
    fits = (k > 0) & (k <= width)
    kth = values.gather(1, (k.clamp(1, width) - 1)[:, None])
    kept = finite & (~fits[:, None] | (values >= kth))
    complete = (last == -torch.inf) | (fits & (last < kth[:, 0]))
    dropped = finite & ~kept
    beyond = complete

    if (params.top_p < 1).any():
        used = torch.as_tensor(params.top_p < 1, device=device)
        at_least = _mass_from_below(scaled, values, kept, complete)
        bound = torch.as_tensor(1 - params.top_p, device=device)[:, None]
        margin = _SHARE_MARGIN * bound + _SHARE_FLOOR
        sure = at_least > bound + margin
        sure[:, 0] = True
        below = (at_least < bound - margin) & ~sure
        kept, dropped, beyond = _combine(kept, dropped, beyond, used, sure, below)
        # Without the whole row's mass after top-k nothing is known about shares.
        unknown = used & ((k > 0) & ~complete | _straddles(values, sure))
    else:
        unknown = torch.zeros_like(complete)

    if (params.min_p > 0).any():
        used = torch.as_tensor(params.min_p > 0, device=device)
        with np.errstate(divide="ignore"):
            bounds = np.log(params.min_p)
        bound = torch.as_tensor(bounds, device=device)[:, None]
        margin = _LOG_MARGIN * (1 + bound.abs())
        ratio = (values - values[:, :1]).double()
        sure = (ratio == 0) | (ratio > bound + margin)
        below = (ratio < bound - margin) & ~sure
        kept, dropped, beyond = _combine(kept, dropped, beyond, used, sure, below)
        unknown |= used & (bound[:, 0] < math.log(_SMALLEST_MIN_P))

    ambiguous = (finite & ~kept & ~dropped).any(-1)
    resolved = beyond & ~ambiguous & ~unknown
    ids, order = ids[resolved].sort(-1)
    left = values.masked_fill(~kept, -torch.inf)[resolved].gather(1, order)
    return Window(resolved, ids, left)


def _combine(
    kept: Tensor, dropped: Tensor, beyond: Tensor, used: Tensor, sure: Tensor, below: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Add one filter's certain verdicts for the rows that use it.

    Returns:
        Tokens surely kept and surely dropped by all filters so far ``[R, width]``, and rows
        ``[R]`` of which nothing outside the window is left.
    """
    off = ~used[:, None]
    return kept & (sure | off), dropped | (below & ~off), beyond | (used & below[:, -1])


def _mass_from_below(scaled: Tensor, values: Tensor, kept: Tensor, complete: Tensor) -> Tensor:
    """Per window token the share of the mass of itself and all less likely tokens, float64."""
    best = values[:, :1]
    weights = torch.where(kept, (values - best).double().exp(), 0.0)
    total = weights.sum(-1)
    partial = (~complete).nonzero()[:, 0]
    if len(partial):
        rows = scaled if len(partial) == len(scaled) else scaled[partial]
        total[partial] = (rows - best[partial]).exp_().sum(-1).double()
    shares = weights / total[:, None]
    return 1 - (shares.cumsum(-1) - shares)


def _straddles(values: Tensor, kept: Tensor) -> Tensor:
    """Whether the last token kept and the first one not kept are equally likely, ``[R]``."""
    count = kept.sum(-1, keepdim=True)
    width = values.shape[1]
    tied = values.gather(1, count - 1) == values.gather(1, count.clamp(max=width - 1))
    return (tied & (count < width))[:, 0]
