"""Draws against plain inversion of the distribution function; rows that do not meet."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from specdec.params import SamplingParams
from specdec.sampling import (
    RowHistory,
    argmax_rows,
    draw,
    finite_rows,
    invert,
    process_logits,
    sample,
)
from tests.logit_rows import (
    WINDOW_CHOICES,
    filters,
    language_like,
    logit_rows,
    quick,
)

torch.set_num_threads(1)


@quick
@given(st.data(), st.integers(1, 700), st.integers(1, 3), st.sampled_from(WINDOW_CHOICES))
def test_sample_is_draw_of_processed_logits(
    data: st.DataObject, vocabulary: int, rows: int, windows: tuple[int, ...]
) -> None:
    logits = torch.stack([data.draw(logit_rows(vocabulary)) for _ in range(rows)])
    kinds = st.one_of(filters, st.just(SamplingParams()), st.just(SamplingParams(temperature=1.0)))
    params = [data.draw(kinds) for _ in range(rows)]
    uniforms = torch.tensor(
        [data.draw(st.floats(0, 1, exclude_max=True)) for _ in range(rows)], dtype=torch.float64
    )
    tokens, finite = sample(logits, params, [None] * rows, uniforms, windows=windows)
    processed = process_logits(logits, params, [None] * rows)
    greedy = torch.tensor([p.greedy for p in params])
    assert finite.all()
    assert (processed.gather(1, tokens[:, None]) > -torch.inf).all()
    expected = draw(processed, greedy, uniforms)
    for row in (tokens != expected).nonzero()[:, 0].tolist():
        # Partial and whole rows sum in another order; only a draw on an edge may differ.
        edges = processed[row].double().softmax(-1).cumsum(-1)
        assert (edges - uniforms[row]).abs().min() < 1e-6


@quick
@given(
    st.lists(st.sampled_from([0.0, 0.0, 1e-30, 1e-3, 0.1, 1.0, 7.0]), min_size=1, max_size=40),
    st.integers(0, 600),
    st.sampled_from([0.0, 2.0**-53, 0.25, 0.5, 1 - 2.0**-53]),
)
@example([0.0, 0.1, 0.0], 0, 0.0)
@example([0.0, 0.1, 0.0], 0, 1 - 2.0**-53)
def test_a_token_of_no_weight_is_never_drawn(
    weights: list[float], padding: int, uniform: float
) -> None:
    """Whatever the sums come to: they are 0.9999... or far from 1 here."""
    if not any(weights):
        weights[0] = 1e-30
    row = torch.tensor([0.0] * padding + weights + [0.0] * padding)
    token = invert(row[None], torch.tensor([uniform], dtype=torch.float64))[0]
    assert row[token] > 0
    positive = row.nonzero()[:, 0]
    if uniform == 0:
        assert token == positive[0]
    if uniform > 0.9 and row[positive[-1]] > 1e-3:
        assert token == positive[-1]


def test_sums_that_fall_short_of_one_still_give_a_token() -> None:
    logits = torch.full((1, 3000), -torch.inf)
    logits[0, 100:1100] = torch.log(torch.full((1000,), 1e-3))
    uniform = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    assert draw(logits, torch.tensor([False]), uniform).tolist() == [1099]
    assert draw(logits, torch.tensor([False]), uniform * 0).tolist() == [100]


@pytest.mark.parametrize("columns", [1, 7, 256, 257, 1000, 4096])
def test_draws_invert_the_distribution_function(columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    weights = torch.randn(64, columns, generator=generator).exp()
    weights[torch.rand(64, columns, generator=generator) < 0.3] = 0
    weights[:, columns // 2] = 1.0
    uniforms = torch.rand(64, dtype=torch.float64, generator=generator)
    sums = np.cumsum(weights.double().numpy(), axis=1)
    for row, token in enumerate(invert(weights, uniforms).tolist()):
        target = float(uniforms[row]) * sums[row, -1]
        slack = 1e-6 * sums[row, -1]
        assert sums[row, token] > target - slack
        assert token == 0 or sums[row, token - 1] <= target + slack


@quick
@given(st.data(), st.integers(1, 600), st.integers(1, 4))
def test_argmax_is_the_first_of_the_likeliest(
    data: st.DataObject, vocabulary: int, rows: int
) -> None:
    logits = torch.stack([data.draw(logit_rows(vocabulary)) for _ in range(rows)])
    values, tokens = argmax_rows(logits)
    expected = logits.max(-1)
    assert torch.equal(values, expected.values)
    assert torch.equal(tokens, logits.argmax(-1))
    assert torch.equal(sample(logits, [SamplingParams()] * rows, [None] * rows, values)[0], tokens)


MIXED = [
    SamplingParams(),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=1.0, top_k=20, min_p=0.05),
    SamplingParams(temperature=2.0, top_p=0.99),
    SamplingParams(temperature=1.0, repetition_penalty=1.2, presence_penalty=0.3),
]


def sample_rows(
    logits: Tensor, params: Sequence[SamplingParams], uniforms: Tensor
) -> tuple[list[int], list[bool]]:
    histories = [RowHistory([1, 2, 3], [3, 4]) if p.has_penalties else None for p in params]
    tokens, finite = sample(logits, params, histories, uniforms)
    return tokens.tolist(), finite.tolist()


def test_a_row_gives_the_same_token_alone_and_in_a_batch() -> None:
    params = MIXED * 3
    logits = language_like(len(params), 5_001, 8)
    uniforms = torch.rand(len(params), dtype=torch.float64, generator=torch.manual_seed(5))
    together, _ = sample_rows(logits, params, uniforms)
    alone = [
        sample_rows(logits[i : i + 1], params[i : i + 1], uniforms[i : i + 1])[0][0]
        for i in range(len(params))
    ]
    assert together == alone


def test_processed_rows_are_bitwise_the_same_alone_and_in_a_batch() -> None:
    logits = language_like(len(MIXED), 5_001, 9)
    together = process_logits(logits, MIXED, [None] * len(MIXED))
    for row, p, expected in zip(logits, MIXED, together, strict=True):
        assert torch.equal(process_logits(row[None], [p], [None])[0], expected)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("broken", range(len(MIXED)))
def test_a_row_that_is_not_finite_is_told_and_harms_no_other(poison: float, broken: int) -> None:
    logits = language_like(len(MIXED), 3_000, 10)
    uniforms = torch.rand(len(MIXED), dtype=torch.float64, generator=torch.manual_seed(6))
    expected, _ = sample_rows(logits, MIXED, uniforms)
    logits[broken, 1234] = poison
    tokens, finite = sample_rows(logits, MIXED, uniforms)
    assert finite == [row != broken for row in range(len(MIXED))]
    assert finite_rows(logits).tolist() == finite
    for row in range(len(MIXED)):
        assert row == broken or tokens[row] == expected[row]


def test_a_row_without_any_token_left_is_not_finite() -> None:
    logits = torch.full((len(MIXED), 400), -torch.inf)
    uniforms = torch.zeros(len(MIXED), dtype=torch.float64)
    assert not any(sample_rows(logits, MIXED, uniforms)[1])


def test_one_forbidden_token_is_finite() -> None:
    logits = torch.zeros(1, 4)
    logits[0, 0] = -torch.inf
    assert finite_rows(logits).tolist() == [True]


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-38, 1e-20])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = language_like(4, 1_000, 11)
    for p in (
        SamplingParams(temperature=temperature),
        SamplingParams(temperature=temperature, top_k=5, top_p=0.9, min_p=0.1),
    ):
        uniforms = torch.full((4,), 0.999, dtype=torch.float64)
        tokens, finite = sample(logits, [p] * 4, [None] * 4, uniforms)
        assert finite.all()
        assert tokens.tolist() == logits.argmax(-1).tolist()
