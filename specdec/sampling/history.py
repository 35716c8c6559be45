"""What depends on the tokens that came before, exact per row: masks, bias and penalties."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.params import SamplingParams


@dataclass(frozen=True)
class RowHistory:
    """The tokens before the one that a row of logits decides about.

    Attributes:
        prompt: tokens of the prompt.
        output: tokens emitted since, and for a tree node those of its path too, its own included.
        allowed: ``[V]`` which tokens may come next; None where all may.
    """

    prompt: Sequence[int]
    output: Sequence[int]
    allowed: NDArray[np.bool_] | None = None


def needs_adjusting(params: SamplingParams) -> bool:
    """Whether :func:`adjust_logits` changes anything for such a row, greedy rows included."""
    return params.has_penalties or params.is_constrained or bool(params.logit_bias)


def adjust_logits(
    logits: Tensor, params: Sequence[SamplingParams], histories: Sequence[RowHistory | None]
) -> Tensor:
    """Forbid tokens, add logit biases, apply repetition, frequency and presence penalties.

    The repetition penalty (Keskar et al. 2019) counts prompt and output and equals
    transformers' RepetitionPenaltyLogitsProcessor; the other two count the output alone, as
    OpenAI and vLLM define them. A token id beyond the vocabulary has no logit and is skipped.

    Args:
        logits: ``[R, V]`` float32; not modified.
        params: one per row.
        histories: one per row; None leaves masks and penalties out.

    Returns:
        ``[R, V]``: ``logits`` itself where no row asks for anything.
    """
    if not any(needs_adjusting(p) for p in params):
        return logits
    logits = logits.clone()
    for number, (p, history) in enumerate(zip(params, histories, strict=True)):
        if history is not None and history.allowed is not None:
            forbidden = torch.from_numpy(~history.allowed).to(logits.device)
            logits[number].masked_fill_(forbidden, -torch.inf)
        if p.logit_bias:
            ids, biases = _columns(p.logit_bias, logits[number])
            logits[number, ids] += biases
        if p.has_penalties and history is not None:
            _penalise(logits[number], p, history)
    return logits


def _penalise(row: Tensor, params: SamplingParams, history: RowHistory) -> None:
    if params.repetition_penalty != 1:
        seen = set(history.prompt).union(history.output)
        ids = torch.tensor([t for t in seen if t < len(row)], dtype=torch.int64, device=row.device)
        values = row[ids]
        row[ids] = torch.where(
            values < 0, values * params.repetition_penalty, values / params.repetition_penalty
        )
    if params.frequency_penalty != 0 or params.presence_penalty != 0:
        ids, counts = _columns(Counter(history.output), row)
        row[ids] -= params.frequency_penalty * counts
        row[ids] -= params.presence_penalty


def _columns(values: Mapping[int, float], row: Tensor) -> tuple[Tensor, Tensor]:
    """Keys below the vocabulary's size and their values, as tensors on the row's device."""
    inside = {token: value for token, value in values.items() if token < len(row)}
    return (
        torch.tensor(list(inside), dtype=torch.int64, device=row.device),
        torch.tensor(list(inside.values()), dtype=row.dtype, device=row.device),
    )
