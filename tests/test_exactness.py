"""Speculation changes speed, never text: float32, against transformers' own decoding.

What these catch: KV moved to a wrong slot, a mask that shows a node its cousins, positions
off by one in a tree, noise that depends on the batch, state lost by preemption, a lookup that
grows its tree from another token than the last one, or outlives its sequence.
"""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from bench.reference import generate_greedy
from specdec.heads.drafter import NullDrafter
from specdec.params import SamplingParams
from tests.engines import (
    ScriptedDrafter,
    plain_sampling,
    run_all,
    tiny_engine,
    tokens_of,
)
from tests.tiny_models import FAMILIES, VOCABULARY, tiny_model

LENGTHS = (1, 2, 3, 5, 8, 13, 17, 21, 24, 29, 33, 37, 40, 45, 50, 55)
NEW_TOKENS = 24


def make_prompts(seed: int) -> list[list[int]]:
    """Sixteen prompts of mixed lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest,
) -> tuple[PreTrainedModel, dict[tuple[int, ...], list[int]]]:
    """A model with transformers' attention, and its greedy answers."""
    model = tiny_model(request.param, seed=3)
    answers = {
        tuple(prompt): prompt + generate_greedy(model, prompt, NEW_TOKENS)
        for prompt in make_prompts(1)
    }
    return model, answers


#: name -> (kind of drafts, engine settings). ``preempted`` has pages for a few sequences only.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("off", {}),
    "right": ("right", {}),
    "wrong": ("wrong", {}),
    "random": ("random", {}),
    "chunked": ("random", {"prefill_chunk": 5, "token_budget": 24}),
    "preempted": ("random", {"pages": 36, "page_size": 4}),
    "alone": ("random", {"max_sequences": 1}),
    "wide": ("random", {"max_nodes": 32, "token_budget": 512}),
    "lookup": ("none", {"lookup": True, "max_nodes": 12, "token_budget": 512}),
    "both": ("random", {"lookup": True, "pages": 36}),
    "any budget": ("random", {"lookup": True, "budget": "random"}),
    "measured": ("right", {"budget": "measured"}),
}


def make_drafter(kind: str, answers: dict[tuple[int, ...], list[int]]) -> object:
    """Drafts of a kind; what ``off`` offers must not be asked for."""
    if kind == "none":
        return NullDrafter()
    return ScriptedDrafter(answers, "random" if kind == "off" else kind, VOCABULARY)


@pytest.mark.parametrize("case", CASES)
def test_greedy_equals_generate(
    family: tuple[PreTrainedModel, dict[tuple[int, ...], list[int]]], case: str
) -> None:
    model, answers = family
    kind, changes = CASES[case]
    engine = tiny_engine(copy.deepcopy(model), make_drafter(kind, answers), **changes)
    params = SamplingParams(max_tokens=NEW_TOKENS, speculation=kind != "off")
    outputs = run_all(engine, {str(i): (list(prompt), params) for i, prompt in enumerate(answers)})
    for number, (prompt, whole) in enumerate(answers.items()):
        assert tokens_of(outputs[str(number)]) == whole[len(prompt) :], f"prompt {number}"
    stats = [outputs[str(number)][-1].stats for number in range(len(answers))]
    assert all(s is not None for s in stats)
    accepted = sum(s.accepted for s in stats if s)
    preemptions = sum(s.preemptions for s in stats if s)
    if case == "right":
        assert engine.stats.tokens_per_round > 2.5
    if case != "measured":  # on a tiny model drafts may not pay
        assert (accepted == 0) == (kind in ("off", "wrong"))
    assert (preemptions > 0) == (case in ("preempted", "both"))


SAMPLED = (
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.2, top_k=20),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=1.5, top_k=50, top_p=0.95, min_p=0.02),
)


@pytest.mark.parametrize(
    "case", ["plain", "random", "chunked", "preempted", "right", "lookup", "both", "any budget"]
)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2"])
def test_sampled_equals_plain_decoding_with_that_seed(name: str, case: str) -> None:
    model = tiny_model(name, seed=4)
    kind, changes = CASES[case]
    requests, expected, answers = {}, {}, {}
    for number, prompt in enumerate(make_prompts(2)):
        setting = SAMPLED[number % len(SAMPLED)]
        params = replace(setting, max_tokens=12, seed=1000 + number, speculation=kind != "off")
        key = str(number)
        requests[key] = (prompt, params)
        expected[key] = plain_sampling(model, prompt, 12, params)
        answers[tuple(prompt)] = prompt + expected[key]
    engine = tiny_engine(copy.deepcopy(model), make_drafter(kind, answers), **changes)
    outputs = run_all(engine, requests)
    for key, tokens in expected.items():
        assert tokens_of(outputs[key]) == tokens, key
    if case == "right":
        assert engine.stats.tokens_per_round > 2.5


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_lookup_takes_fewer_rounds_where_text_repeats(temperature: float) -> None:
    """Without attention the next token depends on the last alone, so greedy text runs in
    circles, and prompts that quote such text are quoted in turn."""
    model = tiny_model("llama", seed=3)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "o_proj" in name:
                weights.zero_()
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=5)
    prompts = [p + generate_greedy(model, p, 40) for p in make_prompts(3)[:6]]
    requests = {str(number): (prompt, params) for number, prompt in enumerate(prompts)}
    texts, rounds = [], []
    for lookup in (False, True):
        engine = tiny_engine(copy.deepcopy(model), NullDrafter(), lookup=lookup)
        outputs = run_all(engine, requests)
        texts.append({name: tokens_of(found) for name, found in outputs.items()})
        rounds.append(engine.stats.tokens_per_round)
    assert texts[0] == texts[1]
    assert rounds[0] == 1.0
    assert rounds[1] > (4.0 if temperature == 0 else 1.1)


def test_abort_frees_pages_and_leaves_others_alone() -> None:
    model = tiny_model("llama", seed=3)
    prompts = make_prompts(6)
    answers = {tuple(p): p + generate_greedy(model, p, NEW_TOKENS) for p in prompts}
    drafter = ScriptedDrafter(answers, "random", VOCABULARY)
    engine = tiny_engine(copy.deepcopy(model), drafter, lookup=True)
    params = SamplingParams(max_tokens=NEW_TOKENS)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params)
    collected: dict[str, list[int]] = {str(n): [] for n in range(len(prompts))}
    ends: dict[str, str | None] = {}
    rng = random.Random(0)
    victims = rng.sample(sorted(collected), 6)
    steps = 0
    while engine.has_work:
        steps += 1
        if steps % 2 == 0 and victims:
            victim = victims.pop()
            assert engine.abort(victim) == (victim not in ends)
            engine.check_integrity()
        for output in engine.step():
            assert output.request_id not in ends
            collected[output.request_id] += output.new_tokens
            if output.finished:
                ends[output.request_id] = output.finish_reason
    engine.check_integrity()
    assert engine.pages_in_use == 0
    assert len(engine.drafting.lookup) == 0
    assert set(ends) == set(collected)
    assert not engine.abort("0")
    for number, (start, whole) in enumerate(answers.items()):
        truth = whole[len(start) :]
        got = collected[str(number)]
        assert got == (truth if ends[str(number)] == "length" else truth[: len(got)])


def test_non_finite_row_fails_one_request() -> None:
    """A token whose embedding is NaN: the request that holds it fails, the batch goes on."""
    model = tiny_model("llama", seed=3)
    poison = 7
    prompts = [[t for t in p if t != poison] or [1] for p in make_prompts(8)]
    answers = {tuple(p): p + generate_greedy(model, p, 8) for p in prompts}
    assert sum(poison in whole for whole in answers.values()) < len(prompts)
    broken = copy.deepcopy(model)
    with torch.no_grad():
        table = broken.get_input_embeddings()
        assert isinstance(table, torch.nn.Embedding)
        table.weight[poison] = float("nan")
    engine = tiny_engine(broken, ScriptedDrafter(answers, "random", VOCABULARY), lookup=True)
    params = SamplingParams(max_tokens=8)
    requests = {str(n): (p, params) for n, p in enumerate(prompts)}
    requests["poisoned"] = ([1, poison, 2], params)
    outputs = run_all(engine, requests)
    assert outputs["poisoned"][-1].finish_reason == "error"
    assert "finite" in (outputs["poisoned"][-1].error or "")
    for number, (prompt, whole) in enumerate(answers.items()):
        truth = whole[len(prompt) :]
        if poison not in truth[:-1]:
            assert tokens_of(outputs[str(number)]) == truth


def test_stop_token_inside_an_accepted_run_ends_there() -> None:
    model = tiny_model("llama", seed=3)
    prompt = make_prompts(9)[8]
    whole = prompt + generate_greedy(model, prompt, NEW_TOKENS)
    drafter = ScriptedDrafter({tuple(prompt): whole}, "right", VOCABULARY)
    for place in range(1, 8):
        truth = whole[len(prompt) :]
        stop = truth[place]
        engine = tiny_engine(copy.deepcopy(model), drafter)
        params = SamplingParams(max_tokens=NEW_TOKENS, stop_token_ids=frozenset({stop}))
        outputs = run_all(engine, {"a": (prompt, params)})["a"]
        assert tokens_of(outputs) == truth[: truth.index(stop) + 1]
        assert outputs[-1].finish_reason == "stop"
        stats = outputs[-1].stats
        assert stats is not None
        assert stats.completion_tokens == truth.index(stop) + 1
        assert stats.accepted + stats.rounds + 1 == stats.completion_tokens
