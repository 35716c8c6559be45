"""Answers as training data: which positions teach what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specdec.errors import HeadsError


@dataclass(frozen=True)
class AnswerSet:
    """Answers, one after the other, of ``N`` tokens in all.

    ``hidden[t]`` is the state that ``tokens[t]`` was drawn from. A round that starts there
    has ``tokens[t]`` as its root, and the right token at depth ``d`` is ``tokens[t + d]``.

    Attributes:
        tokens: ``[N]`` int64.
        hidden: ``[N, H]`` bfloat16.
        lengths: tokens of each answer.
        before: ``[N]`` tokens of the same answer before each token.
        after: ``[N]`` tokens of the same answer after each token.
        lead_in: the tokens that stand before every answer (the end of the chat template).
    """

    tokens: Tensor
    hidden: Tensor
    lengths: Tensor
    before: Tensor
    after: Tensor
    lead_in: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def known(self, positions: Tensor, recent: int) -> Tensor:
        """``[P, recent + 1]`` tokens up to the roots at ``positions``; -1 where unknown."""
        back = torch.arange(recent, -1, -1)
        at = positions[:, None] - back
        inside = back <= self.before[positions, None]
        lead = len(self.lead_in) + self.before[positions, None] - back
        padded = torch.cat([self.lead_in.new_full((1,), -1), self.lead_in])
        outside = padded[(lead + 1).clamp(0, len(self.lead_in))]
        return torch.where(inside, self.tokens[at.clamp(min=0)], outside)

    def answers(self) -> list[range]:
        """Positions of each answer."""
        ends = self.lengths.cumsum(0).tolist()
        starts = [0, *ends[:-1]] if ends else []
        return [range(start, end) for start, end in zip(starts, ends, strict=True)]


def load_answers(shards: Sequence[Path], lead_in: Sequence[int] = ()) -> AnswerSet:
    """Read shards written by :mod:`specdec.training.answers`.

    Raises:
        HeadsError: a shard cannot be read, or its parts disagree.
    """
    parts = []
    for shard in shards:
        try:
            part = load_file(shard)
            tokens, lengths, hidden = part["tokens"], part["lengths"], part["hidden"]
        except (SafetensorError, OSError, KeyError) as error:
            raise HeadsError(f"{shard}: no shard of answers: {error}") from error
        if int(lengths.sum()) != len(tokens) or len(hidden) != len(tokens):
            raise HeadsError(f"{shard}: tokens, lengths and hidden states disagree")
        parts.append((tokens.long(), lengths.long(), hidden))
    if not parts:
        raise HeadsError("there are no answers to learn from")
    tokens, lengths, hidden = (torch.cat(column) for column in zip(*parts, strict=True))
    starts = lengths.cumsum(0) - lengths
    before = torch.arange(len(tokens)) - starts.repeat_interleave(lengths)
    after = lengths.repeat_interleave(lengths) - before - 1
    return AnswerSet(
        tokens, hidden, lengths, before, after, torch.tensor(list(lead_in), dtype=torch.long)
    )


def split_shards(
    shards: Sequence[Path], held_out: int, greedy: Sequence[bool]
) -> tuple[list[Path], list[Path]]:
    """Shards to learn from, and ``held_out`` greedy ones spread evenly to measure on.

    Args:
        shards: in order.
        held_out: how many to hold out.
        greedy: per shard whether its answers are greedy; only these can be measured on.

    Raises:
        HeadsError: too few are greedy, or nothing would be left to learn from.
    """
    free = [index for index, yes in enumerate(greedy) if yes]
    if held_out >= len(shards) or held_out > len(free):
        raise HeadsError(
            f"{len(shards)} shards of answers, {len(free)} of them greedy, are too few to hold "
            f"out {held_out}: ask for more answer tokens"
        )
    step = len(shards) / held_out
    chosen: set[int] = set()
    for index in range(held_out):
        wanted = int((index + 0.5) * step)
        _, nearest = min((abs(i - wanted), i) for i in free)
        free.remove(nearest)
        chosen.add(nearest)
    return (
        [shard for index, shard in enumerate(shards) if index not in chosen],
        [shard for index, shard in enumerate(shards) if index in chosen],
    )


def frequent_tokens(tokens: Tensor, vocab_size: int, size: int) -> Tensor:
    """``[size]`` most frequent tokens, in ascending order.

    Ties, and places left over, go to lower ids: byte-pair vocabularies are in order of
    falling frequency.
    """
    counts = torch.bincount(tokens, minlength=vocab_size).double()
    counts -= torch.arange(vocab_size) / vocab_size
    return counts.argsort(descending=True)[: min(size, vocab_size)].sort().values
