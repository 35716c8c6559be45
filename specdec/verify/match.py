"""Sample-and-match: draw the target's own token at each node, go on while a child holds it.

The draw at a position depends on (seed, position) and the target alone, so what is emitted
is token for token what plain decoding with that seed emits, whatever was drafted. For
candidates that were not sampled it also accepts as often as rejection sampling can.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.policy.tree import walk
from specdec.policy.verdict import Verdict
from specdec.sampling import argmax_rows, needs_adjusting, sample
from specdec.verify.walks import (
    VerifyInput,
    Walk,
    gather_rows,
    go_on,
    non_finite,
    walk_noise,
    with_histories,
)


def verify_match(inputs: Sequence[VerifyInput]) -> list[Verdict]:
    """Verdicts of the match rule, one per input; lossless.

    Greedy requests whose logits nothing adjusts cost one argmax over all their rows. The other
    trees are walked together, one level at a time, so that only visited rows are sampled.
    """
    simple = [i.params.greedy and not needs_adjusting(i.params) for i in inputs]
    plain = [one for one, alone in zip(inputs, simple, strict=True) if alone]
    judged = iter(_verify_greedy(plain) if plain else [])
    walks = [Walk(one) for one, alone in zip(inputs, simple, strict=True) if not alone]
    active, histories = with_histories(walks)
    while active:
        tokens, finite = sample(
            gather_rows(active),
            [w.source.params for w in active],
            histories,
            walk_noise(active)[:, 0],
        )
        active, histories = with_histories(go_on(active, tokens, finite))
    walked = iter([one.verdict() for one in walks])
    return [next(judged if alone else walked) for alone in simple]


def _verify_greedy(inputs: Sequence[VerifyInput]) -> list[Verdict]:
    values, tokens = _likeliest(inputs)
    drawn, usable = tokens.tolist(), list(map(math.isfinite, values.tolist()))
    verdicts = []
    first = 0
    for one in inputs:
        rows = slice(first, first + len(one.tree))
        first = rows.stop
        nodes, committed = walk(one.tree, drawn[rows])
        bad = next((d for d, node in enumerate(nodes) if not usable[rows.start + node]), None)
        if bad is None:
            verdicts.append(Verdict(tuple(nodes), tuple(committed)))
        else:
            verdicts.append(non_finite(one.position + bad))
    return verdicts


def _likeliest(inputs: Sequence[VerifyInput]) -> tuple[Tensor, Tensor]:
    """Largest logits and their tokens over the rows of all inputs, without copying rows."""
    together = _packed([i.logits for i in inputs])
    if together is not None:
        return argmax_rows(together)
    values, tokens = zip(*(argmax_rows(i.logits) for i in inputs), strict=True)
    return torch.cat(values), torch.cat(tokens)


def _packed(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor that these are consecutive rows of, or None if there is no such one."""
    first = parts[0]
    vocabulary = first.shape[1]
    storage = first.untyped_storage().data_ptr()
    offset = first.storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == storage and part.storage_offset() == offset
        if not same or not part.is_contiguous() or part.shape[1] != vocabulary:
            return None
        offset += part.numel()
    rows = sum(len(part) for part in parts)
    return first.as_strided((rows, vocabulary), (vocabulary, 1))
