"""Rejection sampling through the whole engine: the distribution of its text is the target's.

Here sampled drafts pass through the scheduler's cuts, slots, KV moves and several rounds,
which tests of the rule alone do not reach. The statistic is Pearson's chi-square over all
texts of three tokens, small cells pooled, against the distribution enumerated with
transformers' own forward. Seeded; a right engine fails with probability 1e-5 per case.
"""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import PreTrainedModel

from specdec.drafting import SAMPLED_STREAMS
from specdec.heads.drafting import HeadsDrafter
from specdec.heads.medusa import MedusaHeads
from specdec.heads.sequential import SequentialHeads, SequentialShape
from specdec.heads.target import Target
from specdec.params import SamplingParams
from tests.engines import run_all, tiny_engine, tokens_of
from tests.tiny_models import tiny_model

VOCAB, LENGTH, REQUESTS = 6, 3, 6000
FALSE_ALARM = 1e-5
PROMPT = [1, 4, 2]


def random_drafter(kind: str, target: Target) -> HeadsDrafter:
    """Heads with random weights: drafts that are sometimes right."""
    torch.manual_seed(3)
    heads: MedusaHeads | SequentialHeads
    if kind == "medusa":
        heads = MedusaHeads([1, 1, 1], target.hidden_size, VOCAB)
    else:
        shape = SequentialShape(target.hidden_size, VOCAB, 3, width=16, inner=8, recent=0)
        heads = SequentialHeads(shape, None)
    for parameter in heads.parameters():
        parameter.data = torch.randn(parameter.shape) * 0.2
    heads.attach(target)
    return HeadsDrafter(heads.eval())


@torch.no_grad()
def enumerate_texts(model: PreTrainedModel, temperature: float) -> np.ndarray:
    """Probability of each text of ``LENGTH`` tokens, in the order of itertools.product."""
    texts = torch.tensor(list(itertools.product(range(VOCAB), repeat=LENGTH)))
    ids = torch.cat([torch.tensor(PROMPT).expand(len(texts), -1), texts], 1)
    logits = model(ids, use_cache=False).logits[:, len(PROMPT) - 1 : -1].double()
    shares = (logits / temperature).softmax(-1)
    mass: np.ndarray = shares.gather(2, texts[:, :, None])[:, :, 0].prod(1).numpy()
    return mass


def chi_square_p(counts: np.ndarray, expected: np.ndarray) -> float:
    """p-value, cells of fewer than five expected pooled."""
    large = expected >= 5
    observed = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    return float(stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["medusa", "sequential"])
def test_rejection_keeps_the_distribution(kind: str) -> None:
    model = tiny_model("llama", seed=5, vocab_size=VOCAB)
    temperature = 3.0
    probabilities = enumerate_texts(model, temperature)
    engine_model = copy.deepcopy(model)
    drafter = random_drafter(kind, Target.of(engine_model))
    engine = tiny_engine(
        engine_model, drafter, pages=128, max_nodes=6, max_sequences=SAMPLED_STREAMS
    )
    requests = {
        str(seed): (
            PROMPT,
            SamplingParams(
                max_tokens=LENGTH, temperature=temperature, seed=seed, acceptance="rejection"
            ),
        )
        for seed in range(REQUESTS)
    }
    counts = np.zeros(VOCAB**LENGTH)
    accepted = 0
    for start in range(0, REQUESTS, 500):
        part = dict(itertools.islice(requests.items(), start, start + 500))
        for outputs in run_all(engine, part).values():
            place = 0
            for token in tokens_of(outputs):
                place = place * VOCAB + token
            counts[place] += 1
            last = outputs[-1].stats
            accepted += last.accepted if last else 0
    assert accepted > REQUESTS / 10, "drafts must be accepted for this to test anything"
    assert chi_square_p(counts, probabilities * REQUESTS) > FALSE_ALARM
    skewed = probabilities**1.2 / (probabilities**1.2).sum()
    assert chi_square_p(counts, skewed * REQUESTS) < FALSE_ALARM, "the test has no power"
