"""A request that goes on with the tokens of an earlier attempt has the answer that it would have
had: at every cut, beside all other cuts in one batch.

What these catch: noise that is counted from the resumed prefill, penalties that take emitted
tokens for prompt, stop strings that are not seen across the cut, ``max_tokens`` that begins anew,
tokens that are told twice.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedModel

from bench.reference import generate_greedy
from specdec.engine import Engine
from specdec.errors import RequestError
from specdec.heads.drafter import NullDrafter
from specdec.outputs import RequestOutput
from specdec.params import CacheScope, SamplingParams
from tests.engines import ScriptedDrafter, answer, plain_sampling, tiny_engine, tokens_of
from tests.tiny_models import VOCABULARY, tiny_model
from tests.training.tiny_tokenizer import word_tokenizer

COUNT = 18
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46]
SAMPLED = SamplingParams(max_tokens=COUNT, temperature=0.9, seed=77)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", seed=3)


def undisturbed(model: PreTrainedModel, params: SamplingParams) -> tuple[list[int], str]:
    """Plain decoding, where possible by transformers' own forward; else by an engine that neither
    drafts nor batches."""
    special = params.has_penalties or params.stop or params.stop_token_ids or params.logit_bias
    if not special:
        if params.greedy:
            return generate_greedy(model, PROMPT, COUNT), "length"
        return plain_sampling(model, PROMPT, COUNT, params), "length"
    engine = tiny_engine(copy.deepcopy(model), NullDrafter(), tokenizer=word_tokenizer(VOCABULARY))
    plain = replace(params, speculation=False)
    engine.add_request("plain", PROMPT, plain)
    outputs: list[RequestOutput] = []
    while engine.has_work:
        outputs += engine.step()
    return tokens_of(outputs), str(outputs[-1].finish_reason)


def resumed_at_every_cut(
    engine: Engine, params: SamplingParams, truth: list[int]
) -> dict[int, list[RequestOutput]]:
    """All cuts in one batch, the one behind the last token included."""
    outputs: dict[str, list[RequestOutput]] = {}
    for cut in range(len(truth) + 1):
        outputs[str(cut)] = []
        engine.add_request(str(cut), PROMPT, params, CacheScope(), truth[:cut])
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.check_integrity()
    assert engine.pages_in_use == 0
    assert len(engine.drafting.lookup) == 0
    return {int(cut): found for cut, found in outputs.items()}


def with_stop(model: PreTrainedModel, kind: str) -> SamplingParams:
    """Parameters that end a known answer at about its middle."""
    truth = plain_sampling(model, PROMPT, COUNT, SAMPLED)
    middle = COUNT // 2
    if kind == "token":
        return replace(SAMPLED, stop_token_ids=frozenset({truth[middle]}))
    # the end of one word, a whole one, and the start of a third
    first, second, third = (f"w{token}" for token in truth[middle : middle + 3])
    return replace(SAMPLED, stop=("no such text", f"{first[-1]} {second} {third[:2]}"))


PARAMS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(max_tokens=COUNT),
    "sampled": SAMPLED,
    "filtered": replace(SAMPLED, top_k=20, top_p=0.9, min_p=0.01),
    "penalties": replace(
        SAMPLED, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.4
    ),
    "greedy with penalties": SamplingParams(
        max_tokens=COUNT, frequency_penalty=1.5, repetition_penalty=1.2
    ),
    "bias": replace(SAMPLED, logit_bias={5: 4.0, 9: -20.0}),
}
ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {"max_sequences": 32, "lookup": True},
    "preempted": {"pages": 18, "lookup": True, "prefill_chunk": 5, "token_budget": 24},
}


@pytest.mark.parametrize("room", ENGINES)
@pytest.mark.parametrize("kind", [*PARAMS, "stop token", "stop string"])
def test_the_rest_is_what_it_would_have_been(model: PreTrainedModel, kind: str, room: str) -> None:
    params = PARAMS.get(kind) or with_stop(model, kind.removeprefix("stop "))
    truth, reason = undisturbed(model, params)
    assert (len(truth) < COUNT) == (reason == "stop") == kind.startswith("stop")
    drafter = ScriptedDrafter({tuple(PROMPT): PROMPT + truth}, "random", VOCABULARY)
    engine = tiny_engine(
        copy.deepcopy(model), drafter, tokenizer=word_tokenizer(VOCABULARY), **ENGINES[room]
    )
    preemptions = accepted = 0
    for cut, outputs in resumed_at_every_cut(engine, params, truth).items():
        assert tokens_of(outputs) == truth[cut:], f"cut at {cut}"
        end = outputs[-1]
        assert [o.finish_reason for o in outputs] == [None] * (len(outputs) - 1) + [reason]
        stats = end.stats
        assert stats is not None
        assert (stats.prompt_tokens, stats.completion_tokens) == (len(PROMPT), len(truth))
        assert stats.cached_tokens <= len(PROMPT)
        assert (end.accepted, end.drafted) == (stats.accepted, stats.drafted)
        assert [o.accepted for o in outputs] == sorted(o.accepted for o in outputs)
        preemptions += stats.preemptions
        accepted += stats.accepted
    assert accepted > 0
    if room == "roomy" or len(truth) == COUNT:  # a short answer needs few pages
        assert (preemptions > 0) == (room == "preempted")


def test_an_answer_may_be_cut_again_and_again(model: PreTrainedModel) -> None:
    truth, _ = undisturbed(model, SAMPLED)
    prior: list[int] = []
    while len(prior) < COUNT:
        engine = tiny_engine(copy.deepcopy(model), NullDrafter())
        engine.add_request("a", PROMPT, SAMPLED, prior_tokens=prior)
        while not (outputs := engine.step()):
            pass
        prior += outputs[0].new_tokens  # and the engine dies
    assert prior == truth


def test_a_full_pool_ends_a_resumed_answer_where_it_ends_any(model: PreTrainedModel) -> None:
    params = SamplingParams(max_tokens=200)
    whole, _ = answer(tiny_engine(copy.deepcopy(model), NullDrafter(), pages=8), PROMPT, params)
    assert len(PROMPT) + len(whole) == 8 * 4 + 1
    engine = tiny_engine(copy.deepcopy(model), NullDrafter(), pages=8)
    for cut in (1, len(whole) - 1, len(whole)):
        engine.add_request("a", PROMPT, params, prior_tokens=whole[:cut])
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        assert tokens_of(outputs) == whole[cut:]
        assert outputs[-1].finish_reason == "length"


def test_tokens_that_no_attempt_can_have_emitted_are_refused(model: PreTrainedModel) -> None:
    engine = tiny_engine(copy.deepcopy(model), NullDrafter())
    stops = SamplingParams(max_tokens=4, stop_token_ids=frozenset({7}))
    for prior in ([1, VOCABULARY], [-1], [7, 1], [1, 2, 3, 4, 5]):
        with pytest.raises(RequestError) as caught:
            engine.add_request("a", PROMPT, stops, prior_tokens=prior)
        assert caught.value.param == "prior_tokens"
    assert not engine.has_work


def test_an_id_in_use_is_refused_whatever_was_emitted(model: PreTrainedModel) -> None:
    engine = tiny_engine(copy.deepcopy(model), NullDrafter())
    params = SamplingParams(max_tokens=2)
    engine.add_request("a", PROMPT, params)
    with pytest.raises(RequestError, match="in use"):
        engine.add_request("a", PROMPT, params, prior_tokens=[1, 2])  # it had ended
    engine.add_request("b", PROMPT, params, prior_tokens=[1, 2])
    with pytest.raises(RequestError, match="in use"):
        engine.add_request("b", PROMPT, params)
    ends: dict[str, RequestOutput] = {}
    while engine.has_work:
        ends |= {o.request_id: o for o in engine.step() if o.finished}
    assert ends["b"].new_tokens == ()
    assert ends["a"].stats is not None
