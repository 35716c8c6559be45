"""Log-probabilities against transformers' own forward, token by token.

What these catch: rows of a rejected node, an accepted run that is off by one, log-probabilities
after penalties or temperature, prompt rows lost in chunks, prefix hits or preemption, told twice.
"""

from __future__ import annotations

import copy
import random
from typing import cast

import pytest
import torch
from transformers import PreTrainedModel

from specdec.logprobs import token_logprobs
from specdec.outputs import RequestOutput, TokenLogprobs
from specdec.params import SamplingParams
from tests.engines import ScriptedDrafter, run_all, tiny_engine, tokens_of
from tests.tiny_models import VOCABULARY, tiny_model

KINDS = {
    "greedy": SamplingParams(max_tokens=12, logprobs=4, prompt_logprobs=2),
    "sampled": SamplingParams(max_tokens=12, temperature=0.7, top_k=9, logprobs=0),
    "adjusted": SamplingParams(
        max_tokens=12, repetition_penalty=1.5, logit_bias={5: 4.0}, logprobs=20, prompt_logprobs=0
    ),
    "unasked": SamplingParams(max_tokens=12),
    "prompt alone": SamplingParams(max_tokens=3, prompt_logprobs=3),
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", seed=3)


def make_requests() -> dict[str, tuple[list[int], SamplingParams]]:
    rng = random.Random(2)
    shared = [rng.randrange(VOCABULARY) for _ in range(17)]
    return {
        f"{kind} {number}": (
            shared + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 20))],
            params,
        )
        for kind, params in KINDS.items()
        for number in range(3)
    }


@torch.no_grad()
def check(
    model: PreTrainedModel, prompt: list[int], params: SamplingParams, found: list[RequestOutput]
) -> None:
    tokens = tokens_of(found)
    ids = cast(torch.LongTensor, torch.tensor([prompt + tokens]))
    rows = model(ids, use_cache=False).logits[0].float().log_softmax(-1)
    told = [entry for output in found for entry in output.logprobs]
    of_prompt = [output.prompt_logprobs for output in found if output.prompt_logprobs]
    compare(told, tokens, rows[len(prompt) - 1 :], params.logprobs)
    assert len(of_prompt) == (params.prompt_logprobs is not None)
    if of_prompt:
        compare(list(of_prompt[0]), prompt[1:], rows, params.prompt_logprobs)


def compare(
    told: list[TokenLogprobs], tokens: list[int], rows: torch.Tensor, count: int | None
) -> None:
    if count is None:
        assert not told
        return
    assert [entry.token for entry in told] == tokens
    for entry, row in zip(told, rows, strict=False):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
        best = row.topk(max(count, 1))
        assert [value for _, value in entry.top] == pytest.approx(
            best.values.tolist()[:count], abs=1e-4
        )
        assert all(value == pytest.approx(float(row[t]), abs=1e-4) for t, value in entry.top)


CASES: dict[str, dict[str, object]] = {
    "wide": {"max_nodes": 16, "token_budget": 256},
    "chunked": {"prefill_chunk": 5, "token_budget": 24},
    "preempted": {"pages": 24},
}


@pytest.mark.parametrize("case", CASES)
def test_they_are_those_of_the_models_own_forward(model: PreTrainedModel, case: str) -> None:
    requests = make_requests()
    plain = tiny_engine(copy.deepcopy(model), ScriptedDrafter({}, "wrong", VOCABULARY))
    answers = {
        tuple(requests[key][0]): requests[key][0] + tokens_of(found)
        for key, found in run_all(plain, requests).items()
    }
    drafter = ScriptedDrafter(answers, "right" if case == "wide" else "random", VOCABULARY)
    engine = tiny_engine(copy.deepcopy(model), drafter, **CASES[case])  # type: ignore[arg-type]
    for _ in range(2):  # the second time, prompts lie in published pages
        outputs = run_all(engine, requests)
        for key, (prompt, params) in requests.items():
            check(model, prompt, params, outputs[key])
            stats = outputs[key][-1].stats
            assert stats is not None
            assert params.prompt_logprobs is None or stats.cached_tokens == 0
        preempted = sum(f[-1].stats.preemptions for f in outputs.values() if f[-1].stats)
        assert (preempted > 0) == (case == "preempted")
    if case == "wide":
        assert engine.stats.tokens_per_round > 2


def test_many_rows_and_equal_logits() -> None:
    rows = torch.randn(70, 9, generator=torch.manual_seed(1))
    rows[3] = 0.0
    tokens = [row % 9 for row in range(70)]
    told = token_logprobs(rows, tokens, 9)
    expected = rows.double().log_softmax(-1)
    for entry, token, row in zip(told, tokens, expected, strict=True):
        assert entry.token == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-5)
        assert [value for _, value in entry.top] == sorted((v for _, v in entry.top), reverse=True)
    assert [token for token, _ in told[3].top] == list(range(9))


def test_outputs_that_are_joined_lose_nothing() -> None:
    first, second = (RequestOutput("a", (n,), logprobs=(TokenLogprobs(n, -n, ()),)) for n in (1, 2))
    joined = first.followed_by(second)
    assert joined.new_tokens == (1, 2)
    assert [entry.token for entry in joined.logprobs] == [1, 2]
