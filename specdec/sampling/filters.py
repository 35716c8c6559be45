"""Temperature, top-k, top-p and min-p over whole rows, in transformers' own arithmetic.

These are the definition: the partial filters of ``window.py`` answer only where they
provably agree, and leave every other row to this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.params import SamplingParams

#: Below this temperature plain division could overflow float32, so rows are shifted first.
_TINY_TEMPERATURE = 1e-30


@dataclass(frozen=True)
class RowParams:
    """Filter settings of the rows of a batch, one entry per row, on the host.

    Attributes:
        temperature: above 0.
        top_k: 0 keeps all.
        top_p: 1 keeps all.
        min_p: 0 keeps all.
    """

    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]

    @staticmethod
    def of(params: Sequence[SamplingParams], vocabulary: int) -> RowParams:
        """Of sampled rows; a ``top_k`` that spans the vocabulary becomes 0."""
        top_k = np.array([p.top_k for p in params], dtype=np.int64)
        return RowParams(
            np.array([p.temperature for p in params], dtype=np.float64),
            np.where(top_k < vocabulary, top_k, 0),
            np.array([p.top_p for p in params], dtype=np.float64),
            np.array([p.min_p for p in params], dtype=np.float64),
        )

    def take(self, rows: NDArray[np.int64]) -> RowParams:
        """The settings of these rows."""
        return RowParams(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows]
        )

    @property
    def filtered(self) -> NDArray[np.bool_]:
        """Which rows drop any token."""
        kept: NDArray[np.bool_] = (self.top_k == 0) & (self.top_p >= 1) & (self.min_p <= 0)
        return ~kept


def scale(logits: Tensor, params: RowParams) -> Tensor:
    """Divide by the temperature: ``[R, V]`` float32 to ``[R, V]``."""
    smallest = torch.finfo(torch.float32).tiny
    divisor = torch.as_tensor(params.temperature, dtype=torch.float32).clamp_min(smallest)
    shifted = np.flatnonzero(params.temperature < _TINY_TEMPERATURE)
    if len(shifted):
        rows = torch.as_tensor(shifted, device=logits.device)
        lowered = logits[rows] - logits[rows].amax(-1, keepdim=True)
        logits = logits.index_copy(0, rows, lowered)
    return logits / divisor.to(logits.device)[:, None]


def filter_rows(scaled: Tensor, params: RowParams) -> Tensor:
    """Top-k, then top-p, then min-p; removed tokens become -inf.

    Bit for bit TopKLogitsWarper, TopPLogitsWarper and MinPLogitsWarper of transformers 5.24,
    each row with its own settings; tokens tied at a boundary fall as they do there.

    Args:
        scaled: ``[R, V]`` float32, divided by the temperature; not modified.

    Returns:
        ``[R, V]`` float32.
    """
    rows = scaled.clone()
    for one_filter, setting, used in (
        (_top_k, params.top_k, params.top_k > 0),
        (_top_p, params.top_p, params.top_p < 1),
        (_min_p, params.min_p, params.min_p > 0),
    ):
        chosen = np.flatnonzero(used)
        if len(chosen):
            index = torch.as_tensor(chosen, device=rows.device)
            part = rows[index]
            removed = one_filter(part, torch.as_tensor(setting[chosen], device=rows.device))
            rows[index] = part.masked_fill_(removed, -torch.inf)
    return rows


def _top_k(rows: Tensor, top_k: Tensor) -> Tensor:
    """``[n, V]`` and ``[n]`` int64 to a mask of removed tokens."""
    best = rows.topk(int(top_k.max())).values
    return rows < best.gather(1, top_k[:, None] - 1)


def _top_p(rows: Tensor, top_p: Tensor) -> Tensor:
    ascending, order = rows.sort(descending=False)
    mass = ascending.softmax(-1).cumsum(-1)
    removed = mass <= (1 - top_p).to(rows.dtype)[:, None]
    removed[:, -1] = False
    return removed.scatter(1, order, removed)


def _min_p(rows: Tensor, min_p: Tensor) -> Tensor:
    shares = rows.softmax(-1)
    return shares < min_p.to(rows.dtype)[:, None] * shares.amax(-1, keepdim=True)
