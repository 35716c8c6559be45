"""What heads propose where a constraint forbids tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.errors import GrammarError
from specdec.policy.constraint import PathLimits

#: Share of the heads' probability on allowed tokens among the likeliest few above which those
#: are taken as they are. Below it the whole row is read again under the mask.
_ENOUGH = 0.5


@dataclass(frozen=True)
class Proposal:
    """Candidates below one node.

    Attributes:
        tokens: the likeliest first.
        factors: per token the estimated chance that it follows.
    """

    tokens: Sequence[int]
    factors: Sequence[float]


def limit_proposal(
    proposal: Proposal,
    limits: PathLimits,
    path: Sequence[int],
    full_logits: Callable[[], Tensor],
    count: int,
) -> Proposal:
    """The proposal without forbidden tokens, or a new one where little of it is left.

    The target renormalises over what is allowed, so the draft does: a token that must come has
    the chance 1, however unlikely the heads think it.

    Args:
        proposal: the heads' own.
        limits: on the tree.
        path: tokens from depth 1 down to the node.
        full_logits: gives ``[V]`` logits below the node, -inf outside the draft vocabulary.
        count: most candidates.
    """
    kept = limits.keeps(path, proposal.tokens)
    tokens = [token for token, keep in zip(proposal.tokens, kept, strict=True) if keep]
    factors = [factor for factor, keep in zip(proposal.factors, kept, strict=True) if keep]
    mass = sum(factors)
    if mass >= _ENOUGH:
        forbidden = sum(proposal.factors) - mass
        return Proposal(tokens, [factor / (1 - forbidden) for factor in factors])
    try:
        allowed = limits.allowed(path)
    except GrammarError:
        return Proposal([], [])
    if allowed is None:
        return proposal
    logits = full_logits()
    masked = logits.masked_fill(torch.from_numpy(~allowed).to(logits.device), -torch.inf)
    best = masked.softmax(-1).topk(min(count, int(allowed.sum())))
    if not bool(best.values.isfinite().all()):
        return Proposal([], [])  # the heads know none of the allowed tokens
    return Proposal(best.indices.tolist(), best.values.tolist())
