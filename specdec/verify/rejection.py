"""Speculative sampling for sampled drafts: accept with min(1, q/p), else correct the rest.

q is the processed target distribution, p the processed draft distribution. Leviathan et
al., "Fast inference from transformers via speculative decoding", ICML 2023; several
siblings sampled without replacement: Yang et al., "Multi-candidate speculative decoding",
2024, and Jeon et al., "Recursive speculative decoding", 2024.

The emitted distribution is exactly q under two conditions on the tree:

- siblings stand in the order in which :func:`sample_siblings` drew them;
- how many siblings a node has was decided without looking at the sampled tokens. Cutting
  a tree by depth or rank is fine, cutting it by the probability of the tokens that happened
  to be drawn is not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from specdec import noise
from specdec.policy.verdict import Verdict
from specdec.sampling import RowHistory, finite_rows, invert, process_logits
from specdec.verify.match import verify_match
from specdec.verify.walks import (
    VerifyInput,
    Walk,
    gather_rows,
    go_on,
    walk_noise,
    with_histories,
)


def sample_siblings(p: Tensor, count: int, seed: int, position: int) -> list[tuple[int, float]]:
    """Draw candidates for one position without replacement.

    Args:
        p: ``[V]`` processed draft distribution.
        count: how many to draw; fewer come back where p has fewer tokens.
        position: of the candidates in the sequence.

    Returns:
        Tokens, in the order drawn, and their probabilities under ``p``.
    """
    tokens, shares = sample_siblings_batch(p[None], count, [seed], [position])
    pairs = zip(tokens[0].tolist(), shares[0].tolist(), strict=True)
    return [(token, share) for token, share in pairs if token >= 0]


def sample_siblings_batch(
    p: Tensor, count: int, seeds: ArrayLike, positions: ArrayLike
) -> tuple[Tensor, Tensor]:
    """:func:`sample_siblings` for many positions at once.

    Args:
        p: ``[R, V]`` processed draft distributions; not modified.
        count: draws per row.
        seeds: ``[R]``.
        positions: ``[R]``, of the candidates in their sequences.

    Returns:
        Tokens ``[R, count]`` int64, -1 where a row ran out of tokens, and their
        probabilities ``[R, count]`` under ``p``.
    """
    numbers = noise.uniforms(
        np.asarray(seeds, dtype=np.uint64)[:, None],
        np.asarray(positions, dtype=np.uint64)[:, None],
        noise.DRAFT_LANE + np.arange(count, dtype=np.uint64),
    )
    uniforms = torch.from_numpy(numbers).to(p.device)
    left = p.clone()
    tokens = torch.empty(len(p), count, dtype=torch.int64, device=p.device)
    for i in range(count):
        drawn = invert(left, uniforms[:, i])[:, None]
        tokens[:, i : i + 1] = torch.where(left.gather(1, drawn) > 0, drawn, -1)
        left.scatter_(1, drawn, 0.0)
    shares = p.gather(1, tokens.clamp_min(0)).masked_fill(tokens < 0, 0.0)
    return tokens, shares


def verify_rejection(inputs: Sequence[VerifyInput]) -> list[Verdict]:
    """Verdicts of the rejection rule, one per input; lossless in distribution.

    Greedy requests, and candidates that were not sampled (no ``draft_probabilities``), go
    by the match rule, which is lossless for them.
    """
    sampled = [_has_sampled_draft(i) for i in inputs]
    others = [i for i, chosen in zip(inputs, sampled, strict=True) if not chosen]
    walks = [Walk(i) for i, chosen in zip(inputs, sampled, strict=True) if chosen]
    active, histories = with_histories(walks)
    while active:
        active, histories = with_histories(go_on(active, *_decide(active, histories)))
    walked = iter([one.verdict() for one in walks])
    matched = iter(verify_match(others) if others else [])
    return [next(walked if chosen else matched) for chosen in sampled]


def try_siblings(
    target: Tensor, draft: Tensor, siblings: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Test the siblings of each row in turn until one is accepted.

    A sibling that ``draft`` cannot produce was not sampled from it and is never accepted.

    Args:
        target: ``[S, V]`` float32, q.
        draft: ``[S, V]`` float32, p.
        siblings: ``[S, m]`` int64 tokens in the order drawn, -1 for none.
        uniforms: ``[S, m]`` float64 in [0, 1).

    Returns:
        The accepted token ``[S]`` int64 or -1, and what is left of the target ``[S, V]``, from
        which the token of a row without an accepted one is to be drawn.
    """
    rest, left = target.clone(), draft.clone()
    accepted = torch.full_like(siblings[:, 0], -1)
    for tokens, numbers in zip(siblings.unbind(1), uniforms.unbind(1), strict=True):
        at = tokens.clamp_min(0)[:, None]
        q, p = rest.gather(1, at)[:, 0].double(), left.gather(1, at)[:, 0].double()
        tested = (accepted < 0) & (tokens >= 0) & (p > 0)
        passed = numbers * p < q
        accepted = torch.where(tested & passed, tokens, accepted)
        refused = (tested & ~passed).nonzero()[:, 0]
        if len(refused):
            rest[refused] = residual(rest[refused], left[refused])
            left[refused] = without(left[refused], tokens[refused])
    return accepted, rest


def residual(q: Tensor, p: Tensor) -> Tensor:
    """``(q - p)+`` renormalised, rows ``[n, V]``; q itself where rounding leaves nothing."""
    above = (q - p).clamp_min_(0)
    mass = above.sum(-1, keepdim=True)
    return torch.where(mass > 0, above / mass, q)


def without(p: Tensor, tokens: Tensor) -> Tensor:
    """Remove one token per row of p ``[n, V]`` and renormalise; zero where that was all."""
    others = p.scatter(1, tokens[:, None], 0.0)
    mass = others.sum(-1, keepdim=True)
    return torch.where(mass > 0, others / mass, 0.0)


def _has_sampled_draft(one: VerifyInput) -> bool:
    return not one.params.greedy and one.draft_probabilities is not None and len(one.tree) > 1


def _decide(walks: Sequence[Walk], histories: Sequence[RowHistory | None]) -> tuple[Tensor, Tensor]:
    """Each walk's next token ``[S]``, and whether its row was finite ``[S]``."""
    processed = process_logits(gather_rows(walks), [w.source.params for w in walks], histories)
    rest = processed.softmax(-1)
    width = max(len(w.children) for w in walks)
    numbers = walk_noise(
        walks, [noise.DRAW_LANE, *range(noise.ACCEPT_LANE, noise.ACCEPT_LANE + width)]
    )
    if not width:
        return invert(rest, numbers[:, 0]), finite_rows(processed)
    padded = [[w.source.tree.tokens[c] for c in w.children] for w in walks]
    siblings = torch.tensor([row + [-1] * (width - len(row)) for row in padded])
    draft = torch.stack([w.draft_row for w in walks]).to(rest)
    accepted, rest = try_siblings(rest, draft, siblings.to(rest.device), numbers[:, 1:])
    drawn = invert(rest, numbers[:, 0])
    return torch.where(accepted < 0, drawn, accepted), finite_rows(processed)
