"""Rows of logits and filter settings to test the sampler with."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.params import SamplingParams
from specdec.sampling.window import WINDOWS

quick = settings(deadline=None, derandomize=True, max_examples=60)

#: Small windows reach the partial filters with small vocabularies; () sorts every row.
WINDOW_CHOICES = [(), (1, 3), (4, 16), (8,), WINDOWS]


@st.composite
def logit_rows(draws: st.DrawFn, vocabulary: int) -> Tensor:
    """Rows ``[V]``: spread, tied, nearly tied, masked, down to one token left."""
    generator = torch.Generator().manual_seed(draws(st.integers(0, 2**32)))
    kind = draws(st.sampled_from(["spread", "flat", "ties", "equal", "near", "steep"]))
    noise = torch.randn(vocabulary, generator=generator)
    row = {
        "spread": noise * 3,
        "flat": noise * 0.01,
        "ties": (noise * 1.5).round(),
        "equal": torch.full_like(noise, -1.25),
        "near": 2 + noise * 1e-6,
        "steep": noise * 40,
    }[kind]
    left = draws(st.sampled_from([vocabulary, vocabulary, (vocabulary + 1) // 2, 2, 1]))
    if left < vocabulary:
        row[torch.randperm(vocabulary, generator=generator)[left:]] = -torch.inf
    return row


TOP_K = [0, 1, 2, 3, 5, 10, 40, 70, 10_000]
TOP_P = [1.0, 1e-9, 1e-3, 0.25, 0.5, 0.9, 0.95, 0.999, 0.9999999]
MIN_P = [0.0, 1e-46, 1e-35, 1e-3, 0.05, 0.3, 0.999, 1.0]
filters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.05, 0.7, 1.0, 1.7, 30.0]),
    top_k=st.sampled_from(TOP_K),
    top_p=st.sampled_from(TOP_P),
    min_p=st.sampled_from(MIN_P),
)


def language_like(rows: int, vocabulary: int, seed: int) -> Tensor:
    """Rows with the long tail of a language model's logits."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * 1.7
    best = torch.randn(rows, 200, generator=generator).abs() * 3 + 5
    places = torch.rand(rows, vocabulary, generator=generator).topk(200).indices
    return logits.scatter_add_(1, places, best)
