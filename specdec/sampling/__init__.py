"""From logits to tokens: pure functions over rows, with randomness passed in.

Order: mask, logit bias, penalties, temperature, top-k, top-p, min-p. It equals transformers'
processors, ties included. Rows never influence each other, so a row gives the same token
alone and in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.params import SamplingParams
from specdec.sampling.draws import argmax_rows, draw, finite_rows, invert
from specdec.sampling.filters import RowParams, filter_rows, scale
from specdec.sampling.history import RowHistory, adjust_logits, needs_adjusting
from specdec.sampling.window import WINDOWS, filter_window

__all__ = [
    "RowHistory",
    "adjust_logits",
    "argmax_rows",
    "draw",
    "finite_rows",
    "invert",
    "needs_adjusting",
    "process_logits",
    "sample",
]


@dataclass(frozen=True)
class _Part:
    """Some rows after filtering: ``logits`` of the columns ``ids`` (None: the vocabulary)."""

    rows: Tensor
    logits: Tensor
    ids: Tensor | None = None


def process_logits(
    logits: Tensor,
    params: Sequence[SamplingParams],
    histories: Sequence[RowHistory | None],
    *,
    windows: Sequence[int] = WINDOWS,
) -> Tensor:
    """Logits as a request's parameters want them; their softmax is the target distribution.

    Args:
        logits: ``[R, V]`` float32; not modified.
        params: one per row; rows of temperature 0 get no filters.
        histories: one per row; None leaves masks and penalties out.
        windows: widths of the partial filters to try before sorting a row.

    Returns:
        ``[R, V]`` float32, -inf where a token is filtered out.
    """
    rows = adjust_logits(logits, params, histories)
    sampled, settings = _sampled_rows(params, logits.shape[1])
    if not len(sampled):
        return rows
    out = rows.clone()
    index, taken = _take(rows, sampled)
    for part in _filter(scale(taken, settings), settings, windows):
        dense = part.logits
        if part.ids is not None:
            dense = logits.new_full((len(part.rows), logits.shape[1]), -torch.inf)
            dense.scatter_(1, part.ids, part.logits)
        out[index[part.rows]] = dense
    return out


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    histories: Sequence[RowHistory | None],
    uniforms: Tensor,
    *,
    windows: Sequence[int] = WINDOWS,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row: :func:`process_logits` and :func:`draw` without full rows.

    Args:
        logits: ``[R, V]`` float32; not modified.
        params: one per row.
        histories: one per row.
        uniforms: ``[R]`` float64 in [0, 1); rows of temperature 0 do not use theirs.
        windows: as for :func:`process_logits`.

    Returns:
        Tokens ``[R]`` int64, and ``[R]`` bool: whether the row was finite. The token of a row
        that was not means nothing.
    """
    rows = adjust_logits(logits, params, histories)
    best, tokens = argmax_rows(rows)
    finite = best.isfinite()
    sampled, settings = _sampled_rows(params, logits.shape[1])
    if not len(sampled):
        return tokens, finite
    index, taken = _take(rows, sampled)
    scaled = scale(taken, settings)
    finite[index] &= finite_rows(scaled)
    for part in _filter(scaled, settings, windows):
        at = index[part.rows]
        if part.ids is None:
            tokens[at] = invert(part.logits.softmax(-1), uniforms[at])
        else:
            column = invert(part.logits.softmax(-1, dtype=torch.float64), uniforms[at])
            tokens[at] = part.ids.gather(1, column[:, None])[:, 0]
    return tokens, finite


def _sampled_rows(
    params: Sequence[SamplingParams], vocabulary: int
) -> tuple[NDArray[np.int64], RowParams]:
    rows = [number for number, p in enumerate(params) if not p.greedy]
    return np.array(rows, dtype=np.int64), RowParams.of([params[i] for i in rows], vocabulary)


def _filter(scaled: Tensor, params: RowParams, windows: Sequence[int]) -> list[_Part]:
    """Every row of ``scaled`` in one of the parts, by the cheapest way that is exact."""
    parts = []
    plain = np.flatnonzero(~params.filtered)
    if len(plain):
        parts.append(_Part(*_take(scaled, plain)))
    open_rows = np.flatnonzero(params.filtered)
    for width in windows:
        if width >= scaled.shape[1] or not len(open_rows):
            break
        rows, taken = _take(scaled, open_rows)
        window = filter_window(taken, params.take(open_rows), width)
        parts.append(_Part(rows[window.resolved], window.logits, window.ids))
        open_rows = open_rows[~window.resolved.cpu().numpy()]
    if len(open_rows):
        rows, taken = _take(scaled, open_rows)
        parts.append(_Part(rows, filter_rows(taken, params.take(open_rows))))
    return parts


def _take(logits: Tensor, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Row numbers as a tensor, and those rows: ``logits`` itself where that is all of them."""
    index = torch.as_tensor(rows, device=logits.device)
    return index, logits if len(rows) == len(logits) else logits[index]
