"""The sampler against transformers' own processors, and draws against plain inversion."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given
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
    process_logits,
)
from specdec.sampling.filters import RowParams, filter_rows, scale
from specdec.sampling.window import WINDOWS, filter_window
from tests.logit_rows import (
    MIN_P,
    TOP_K,
    TOP_P,
    WINDOW_CHOICES,
    filters,
    language_like,
    logit_rows,
    quick,
)

torch.set_num_threads(1)


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
