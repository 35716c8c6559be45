"""Typical acceptance: Medusa's lossy rule. It changes what the model says.

A candidate x is accepted where q(x) > min(epsilon, delta * exp(-H(q))), q the processed
target distribution before it and H its entropy in nats. Of the accepted paths the longest
is kept, of several the likeliest. Cai et al., "Medusa: simple LLM inference acceleration
framework with multiple decoding heads", ICML 2024.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from specdec.params import SamplingParams
from specdec.policy.verdict import Verdict
from specdec.sampling import process_logits, sample
from specdec.verify.walks import VerifyInput, Walk, gather_rows, walk_noise, with_histories


@dataclass(frozen=True)
class _Branch:
    """An accepted path of the tree of input ``owner``, with its log-probability."""

    owner: int
    walk: Walk
    likelihood: float = 0.0

    @property
    def rank(self) -> tuple[int, float]:
        return len(self.walk.nodes), self.likelihood


def verify_typical(inputs: Sequence[VerifyInput]) -> list[Verdict]:
    """Verdicts of the typical rule, one per input; lossy.

    The bonus token is drawn from q with the usual noise. Greedy requests judge candidates by
    q at temperature 1, unfiltered, and take the likeliest token as bonus.
    """
    params = [_judging(i.params) for i in inputs]
    best = [_Branch(owner, Walk(i)) for owner, i in enumerate(inputs)]
    level = best
    while forks := [branch for branch in level if branch.walk.children]:
        level = _accepted(forks, [params[branch.owner] for branch in forks])
        for branch in level:
            if branch.rank > best[branch.owner].rank:
                best[branch.owner] = branch
    able, histories = with_histories([branch.walk for branch in best])
    if able:
        params = [w.source.params for w in able]
        tokens, finite = sample(gather_rows(able), params, histories, walk_noise(able)[:, 0])
        for walk, token, usable in zip(able, tokens.tolist(), finite.tolist(), strict=True):
            if usable:
                walk.tokens.append(token)
            else:
                walk.fail()
    return [branch.walk.verdict() for branch in best]


def _accepted(forks: Sequence[_Branch], params: Sequence[SamplingParams]) -> list[_Branch]:
    """The branches extended by each child that passes."""
    walks, histories = with_histories([branch.walk for branch in forks])
    if len(walks) < len(forks):  # those that cannot be judged are not extended
        kept = [i for i, branch in enumerate(forks) if branch.walk.error is None]
        forks, params = [forks[i] for i in kept], [params[i] for i in kept]
    if not walks:
        return []
    q = process_logits(gather_rows(walks), params, histories).softmax(-1)
    entropies = torch.special.entr(q).sum(-1).tolist()
    pairs = [(number, child) for number, w in enumerate(walks) for child in w.children]
    rows = torch.tensor([number for number, _ in pairs], device=q.device)
    tokens = torch.tensor([walks[number].source.tree.tokens[child] for number, child in pairs])
    extended = []
    for (number, child), share in zip(pairs, q[rows, tokens.to(q.device)].tolist(), strict=True):
        branch, limits = forks[number], params[number]
        relative = limits.typical_delta * math.exp(-entropies[number])
        if share > min(limits.typical_epsilon, relative):
            likelihood = branch.likelihood + math.log(share)
            extended.append(_Branch(branch.owner, branch.walk.branch(child), likelihood))
    return extended


def _judging(params: SamplingParams) -> SamplingParams:
    """The parameters that q is made with."""
    if not params.greedy:
        return params
    return replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
