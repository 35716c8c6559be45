"""The match rule emits the target's distribution.

Statistic: Pearson's chi-square over all continuations of three tokens that the target can
emit (up to 6^3 = 216 cells, pooled below 5 expected), 20,000 seeded sequences, trees of
three candidates with one below each. A right rule would fail one in 10,000 such tests if
the seeds were drawn anew.
"""

from __future__ import annotations

import pytest
import torch

from specdec.params import SamplingParams
from tests.toy import SampledTrees, Toy, chi_square, generate, p_value

torch.set_num_threads(1)

FALSE_ALARM = 1e-4
TOY = Toy.random(6, seed=2)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.3),
        SamplingParams(temperature=1.5, top_k=4, top_p=0.9, min_p=0.1),
    ],
    ids=["temperature", "top-k", "top-p", "min-p", "all"],
)
def test_the_distribution_is_the_targets(params: SamplingParams) -> None:
    assert p_value(TOY, SampledTrees(TOY, (3, 1)), params, 20_000, 3) > FALSE_ALARM


def test_the_test_tells_a_slightly_different_target() -> None:
    """One tenth less temperature would not pass."""
    colder = Toy(TOY.target / 0.9, TOY.draft)
    params = SamplingParams(temperature=1.0)
    emitted = generate(colder, SampledTrees(TOY, (3, 1)), params, 20_000, 3)
    assert chi_square(emitted, TOY.enumerate(3, params)) < FALSE_ALARM
