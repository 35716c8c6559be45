"""The sampler against transformers' own processors, and draws against plain inversion."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.logits_process import SequenceBiasLogitsProcessor

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
from specdec.sampling.filters import RowParams, filter_rows, scale
from specdec.sampling.window import WINDOWS, filter_window

torch.set_num_threads(1)

quick = settings(deadline=None, derandomize=True, max_examples=60)

#: Small windows reach the partial filters with small vocabularies; () sorts every row.
WINDOW_CHOICES = [(), (1, 3), (4, 16), (8,), WINDOWS]


class OutputPenalties(LogitsProcessor):
    """Presence and frequency penalties as OpenAI's API reference defines them."""

    def __init__(self, params: SamplingParams, prompt_length: int) -> None:
        self.params, self.prompt_length = params, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row, ids in zip(scores, input_ids[:, self.prompt_length :].tolist(), strict=True):
            for token in set(ids):
                row[token] -= np.float32(ids.count(token) * self.params.frequency_penalty)
                row[token] -= np.float32(self.params.presence_penalty)
        return scores


def transformers_result(
    logits: Tensor, params: SamplingParams, history: RowHistory | None
) -> Tensor:
    """``[V]`` to ``[V]`` by the processors that ``generate`` would set up."""
    steps = LogitsProcessorList()
    if params.logit_bias:
        steps.append(SequenceBiasLogitsProcessor([[[t], b] for t, b in params.logit_bias.items()]))
    if history is not None:
        steps.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
        steps.append(OutputPenalties(params, len(history.prompt)))
    if not params.greedy:
        steps.append(TemperatureLogitsWarper(float(params.temperature)))
        if params.top_k:
            steps.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            steps.append(TopPLogitsWarper(params.top_p))
        if params.min_p > 0:
            steps.append(MinPLogitsWarper(params.min_p))
    ids = [*history.prompt, *history.output] if history else [0]
    result: Tensor = steps(cast("torch.LongTensor", torch.tensor([ids])), logits[None].clone())
    return result[0]


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


@quick
@given(st.data(), st.integers(1, 60), st.integers(1, 4), st.sampled_from(WINDOW_CHOICES))
def test_filters_equal_transformers(
    data: st.DataObject, vocabulary: int, rows: int, windows: tuple[int, ...]
) -> None:
    logits = torch.stack([data.draw(logit_rows(vocabulary)) for _ in range(rows)])
    params = [data.draw(filters) for _ in range(rows)]
    before = logits.clone()
    processed = process_logits(logits, params, [None] * rows, windows=windows)
    assert torch.equal(logits, before)
    for row, p, result in zip(logits, params, processed, strict=True):
        assert torch.equal(result, transformers_result(row, p, None))


GRID_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": lambda noise: noise * 0.01,
    "spread": lambda noise: noise * 3,
    "ties": lambda noise: (noise * 1.5).round(),
    "near 2": lambda noise: 2 + noise * 1e-6,
    "near 0": lambda noise: noise * 1e-8,
    "far": lambda noise: noise * 60,
}


@pytest.mark.parametrize("kind", GRID_ROWS)
def test_every_combination_of_filters_equals_transformers(kind: str) -> None:
    """20 tokens: near-equal ones put shares right onto thresholds such as 0.5 and 0.95."""
    row = GRID_ROWS[kind](torch.randn(20, generator=torch.manual_seed(14)))
    params = [
        SamplingParams(temperature=1.0, top_k=k, top_p=p, min_p=m)
        for k, p, m in itertools.product(TOP_K, TOP_P, MIN_P)
    ]
    expected = torch.stack([transformers_result(row, one, None) for one in params])
    logits = row.expand(len(params), -1)
    for windows in ((), (4, 12), (8,)):
        result = process_logits(logits, params, [None] * len(params), windows=windows)
        assert torch.equal(result, expected)


@quick
@given(st.data(), st.integers(2, 30), st.sampled_from(WINDOW_CHOICES))
def test_bias_and_penalties_equal_transformers(
    data: st.DataObject, vocabulary: int, windows: tuple[int, ...]
) -> None:
    token = st.integers(0, vocabulary - 1)
    params = SamplingParams(
        temperature=data.draw(st.sampled_from([0.0, 0.8])),
        top_k=data.draw(st.sampled_from([0, 3])),
        top_p=data.draw(st.sampled_from([1.0, 0.8])),
        min_p=data.draw(st.sampled_from([0.0, 0.1])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 0.7, 1.3])),
        presence_penalty=data.draw(st.sampled_from([0.0, -0.5, 1.5])),
        frequency_penalty=data.draw(st.sampled_from([0.0, 0.25, -2.0])),
        logit_bias=data.draw(st.dictionaries(token, st.sampled_from([-100.0, -1.0, 2.5]))),
    )
    history = RowHistory(
        data.draw(st.lists(token, min_size=1, max_size=8)), data.draw(st.lists(token, max_size=8))
    )
    logits = data.draw(logit_rows(vocabulary))
    other = SamplingParams(temperature=0.5, top_k=2)
    processed = process_logits(
        torch.stack([logits, logits]), [other, params], [None, history], windows=windows
    )
    assert torch.equal(processed[0], transformers_result(logits, other, None))
    assert torch.equal(processed[1], transformers_result(logits, params, history))


def test_presence_and_frequency_count_the_output_alone() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    history = RowHistory(prompt=[0, 0, 1], output=[2, 3, 2])
    processed = process_logits(torch.zeros(1, 5), [params], [history])
    assert processed[0].tolist() == [0, 0, -1.0, -0.75, 0]


def test_tokens_beyond_the_vocabulary_are_skipped() -> None:
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, logit_bias={9: 1.0})
    processed = process_logits(torch.ones(1, 3), [params], [RowHistory([7], [8, 1])])
    assert processed[0].tolist() == [1, -0.5, 1]


def language_like(rows: int, vocabulary: int, seed: int) -> Tensor:
    """Rows with the long tail of a language model's logits."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * 1.7
    best = torch.randn(rows, 200, generator=generator).abs() * 3 + 5
    places = torch.rand(rows, vocabulary, generator=generator).topk(200).indices
    return logits.scatter_add_(1, places, best)


LARGE = [
    SamplingParams(temperature=0.7, top_k=50),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=0.8, top_p=0.95, top_k=40),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=1.3, top_k=200, top_p=0.99, min_p=0.01),
    SamplingParams(temperature=3.0, top_p=0.9),
    SamplingParams(temperature=1.0, top_k=3000, top_p=0.999),
    SamplingParams(temperature=1.0, top_k=3000, min_p=0.02),
]


@pytest.mark.parametrize("vocabulary", [49_152, 50_257])
def test_a_full_vocabulary_equals_transformers_by_any_path(vocabulary: int) -> None:
    logits = language_like(len(LARGE), vocabulary, 3)
    expected = torch.stack(
        [transformers_result(row, p, None) for row, p in zip(logits, LARGE, strict=True)]
    )
    for windows in (WINDOWS, ()):
        assert torch.equal(
            process_logits(logits, LARGE, [None] * len(LARGE), windows=windows), expected
        )


def test_most_rows_are_answered_without_a_sort() -> None:
    """The partial filters are worth having: at least 9 in 10 rows of usual settings."""
    params = LARGE[:5] * 8
    logits = language_like(len(params), 20_000, 4)
    settings_ = RowParams.of(params, logits.shape[1])
    window = filter_window(scale(logits, settings_), settings_, WINDOWS[0])
    assert window.resolved.float().mean() >= 0.9


@quick
@given(st.data(), st.integers(9, 60))
def test_a_window_answers_only_what_the_whole_row_says(
    data: st.DataObject, vocabulary: int
) -> None:
    params = RowParams.of([data.draw(filters)], vocabulary)
    scaled = scale(data.draw(logit_rows(vocabulary))[None], params)
    window = filter_window(scaled, params, 8)
    if window.resolved[0]:
        dense = torch.full_like(scaled, -torch.inf).scatter(1, window.ids, window.logits)
        assert torch.equal(dense, filter_rows(scaled, params))
        assert (window.ids.diff() > 0).all()


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
