"""Grammars and ``min_tokens`` against plain decoding under masks made by enumeration.

The oracle knows no grammar library: the languages are finite, so what may come next follows from
the list of their sentences; transformers' forward gives the logits, its processors what
``min_tokens`` does. What these catch: a mask of the wrong node (an ancestor's, a sibling's), a
matcher that does not follow a rejected draft back, masks after penalties in place of before them,
a grammar's place lost by preemption or resumption, text after the grammar's end.
"""

from __future__ import annotations

import copy
import itertools
import random
from dataclasses import replace
from typing import cast

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from bench.letters import letter_tokenizer
from specdec.engine import Engine
from specdec.noise import uniform
from specdec.params import SamplingParams
from specdec.policy.roster import Roster
from specdec.policy.sequence import Sequence
from tests.engines import ScriptedDrafter, run_all, tiny_engine, tokens_of
from tests.languages import END, LANGUAGES, TOKENIZER, VOCABULARY, allowed_next
from tests.tiny_models import tiny_model

KINDS = {
    "greedy": SamplingParams(max_tokens=30),
    "sampled": SamplingParams(max_tokens=30, temperature=1.3, top_k=3),
    "penalised": SamplingParams(
        max_tokens=30, temperature=1.0, repetition_penalty=1.4, logit_bias={40: 100.0, 65: 3.0}
    ),
    "least": SamplingParams(max_tokens=30, temperature=0.9, min_tokens=4),
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    found = tiny_model("llama", seed=5, vocab_size=VOCABULARY)
    assert found.generation_config is not None
    found.generation_config.eos_token_id = END
    return found


def engine_of(model: PreTrainedModel, drafter: object, **changes: object) -> Engine:
    plain = tiny_engine(copy.deepcopy(model), drafter, **changes)  # type: ignore[arg-type]
    return Engine(plain.runner, TOKENIZER, drafter, plain.settings)  # type: ignore[arg-type]


@torch.no_grad()
def plain_answer(
    model: PreTrainedModel, prompt: list[int], params: SamplingParams, sentences: frozenset[str]
) -> list[int]:
    """One token after the other, with transformers' processors; ends with the grammar."""
    after = LogitsProcessorList()
    if params.repetition_penalty != 1:
        after.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature > 0:
        after.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        after.append(TopKLogitsWarper(params.top_k))
    tokens = list(prompt)
    while len(tokens) - len(prompt) < params.max_tokens:
        output = tokens[len(prompt) :]
        allowed = allowed_next(output, sentences)
        if allowed == {END}:
            break  # nothing can follow
        if len(output) < params.min_tokens and allowed != {END}:
            allowed -= {END}
        ids = cast(torch.LongTensor, torch.tensor([tokens]))
        rows = model(ids, use_cache=False).logits[:, -1].float()
        mask = torch.full_like(rows, -torch.inf)
        mask[0, sorted(allowed)] = 0
        rows = rows + mask
        for token, bias in params.logit_bias.items():
            rows[0, token] += bias
        rows = after(ids, cast(torch.FloatTensor, rows))
        if params.greedy:
            tokens.append(int(rows.argmax()))
        else:
            mass = rows.softmax(-1).double()[0].cumsum(0)
            point = uniform(params.seed, len(tokens)) * mass[-1].item()
            tokens.append(int(torch.searchsorted(mass, torch.tensor(point).double(), right=True)))
        if tokens[-1] == END:
            break
    return tokens[len(prompt) :]


def make_requests(
    model: PreTrainedModel,
) -> tuple[dict[str, tuple[list[int], SamplingParams]], dict[str, list[int]]]:
    rng = random.Random(3)
    requests, expected = {}, {}
    for number, (language, kind) in enumerate(itertools.product(LANGUAGES, KINDS)):
        spec, sentences = LANGUAGES[language]
        prompt = [rng.randrange(END) for _ in range(rng.randrange(3, 9))]
        params = replace(KINDS[kind], grammar=spec, seed=number)
        key = f"{language} {kind}"
        requests[key] = (prompt, params)
        expected[key] = plain_answer(model, prompt, params, sentences)
    return requests, expected


CASES: dict[str, tuple[str, dict[str, object]]] = {
    "plain": ("off", {}),
    "right": ("right", {}),
    "random": ("random", {"max_nodes": 16, "token_budget": 256}),
    "wrong": ("wrong", {"lookup": True}),
    "small pool": ("random", {"pages": 16, "page_size": 2, "prefill_chunk": 5}),
}


@pytest.fixture(scope="module")
def asked(
    model: PreTrainedModel,
) -> tuple[dict[str, tuple[list[int], SamplingParams]], dict[str, list[int]]]:
    return make_requests(model)


@pytest.mark.parametrize("case", CASES)
def test_output_is_that_of_plain_decoding_under_enumerated_masks(
    model: PreTrainedModel,
    asked: tuple[dict[str, tuple[list[int], SamplingParams]], dict[str, list[int]]],
    case: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests, expected = asked
    midway: list[str] = []  # preempted within their grammars
    preempt = Roster._preempt

    def watched(roster: Roster, sequence: Sequence) -> None:
        if sequence.emitted:
            midway.append(sequence.request_id)
        preempt(roster, sequence)

    monkeypatch.setattr(Roster, "_preempt", watched)
    kind, changes = CASES[case]
    answers = {tuple(p): p + expected[key] for key, (p, _) in requests.items()}
    drafter = ScriptedDrafter(answers, "random" if kind == "off" else kind, VOCABULARY)
    engine = engine_of(model, drafter, **changes)
    if kind == "off":
        requests = {k: (p, replace(q, speculation=False)) for k, (p, q) in requests.items()}
    outputs = run_all(engine, requests)
    for key, tokens in expected.items():
        sentences = LANGUAGES[key.split()[0]][1]
        assert tokens_of(outputs[key]) == tokens, key
        assert outputs[key][-1].finish_reason == "stop"
        assert TOKENIZER.decode(tokens, skip_special_tokens=True) in sentences
    if case == "right":
        assert engine.stats.tokens_per_round > 1.8
    assert len(set(midway)) >= 3 if case == "small pool" else not midway, midway


def test_a_request_resumes_in_its_grammar(
    model: PreTrainedModel,
    asked: tuple[dict[str, tuple[list[int], SamplingParams]], dict[str, list[int]]],
) -> None:
    requests, expected = asked
    engine = engine_of(model, ScriptedDrafter({}, "random", VOCABULARY))
    for key, (prompt, params) in requests.items():
        for known in range(len(expected[key])):
            prior = expected[key][:known]
            engine.add_request(f"{key} {known}", prompt, params, prior_tokens=prior)
    rest: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            rest.setdefault(output.request_id, []).extend(output.new_tokens)
    for key, tokens in expected.items():
        for known in range(len(tokens)):
            assert rest[f"{key} {known}"] == tokens[known:], (key, known)


@pytest.mark.parametrize("rule", ["rejection", "typical"])
def test_other_rules_keep_to_the_grammar(model: PreTrainedModel, rule: str) -> None:
    drafter = ScriptedDrafter({}, "random", VOCABULARY)
    engine = engine_of(model, drafter)
    drafter.max_depth = 0 if rule == "rejection" else 4  # it cannot draw samples
    requests = {
        f"{name} {seed}": (
            [seed, 3, 9],
            SamplingParams(
                max_tokens=30,
                temperature=1.0,
                seed=seed,
                grammar=spec,
                acceptance=rule,  # type: ignore[arg-type]
            ),
        )
        for name, (spec, _) in LANGUAGES.items()
        for seed in range(6)
    }
    for key, found in run_all(engine, requests).items():
        text = TOKENIZER.decode(tokens_of(found), skip_special_tokens=True)
        assert text in LANGUAGES[key.split()[0]][1]


def test_no_end_token_before_min_tokens(model: PreTrainedModel) -> None:
    """Against transformers' own processor; end tokens are so likely that all requests end."""
    stop = 65
    rng = random.Random(1)
    params = SamplingParams(
        max_tokens=12, stop_token_ids=frozenset({stop}), logit_bias={stop: 50.0, END: 51.0}
    )
    requests, expected = {}, {}
    for least in range(8):
        prompt = [rng.randrange(END) for _ in range(9)]
        processor = MinNewTokensLengthLogitsProcessor(len(prompt), least, [stop, END], "cpu")
        tokens = list(prompt)
        with torch.no_grad():
            while len(tokens) < len(prompt) + 12 and not {stop, END} & set(tokens[len(prompt) :]):
                ids = cast(torch.LongTensor, torch.tensor([tokens]))
                rows = model(ids, use_cache=False).logits[:, -1].float()
                rows[0, stop] += 50
                rows[0, END] += 51
                tokens.append(int(processor(ids, cast(torch.FloatTensor, rows)).argmax()))
        requests[str(least)] = (prompt, replace(params, min_tokens=least))
        expected[str(least)] = tokens[len(prompt) :]
        assert len(expected[str(least)]) == least + 1
    answers = {tuple(p): p + expected[key] for key, (p, _) in requests.items()}
    engine = engine_of(model, ScriptedDrafter(answers, "random", VOCABULARY))
    outputs = run_all(engine, requests)
    assert {key: tokens_of(found) for key, found in outputs.items()} == expected


def test_tokens_of_several_letters(model: PreTrainedModel) -> None:
    """Where a text can be cut in several ways: drafts change nothing, and it is a sentence."""
    tokenizer = letter_tokenizer()
    end = tokenizer.eos_token_id
    larger = tiny_model("llama", seed=6, vocab_size=end + 1)
    assert larger.generation_config is not None
    larger.generation_config.eos_token_id = end
    found: list[dict[str, list[int]]] = []
    answers: dict[tuple[int, ...], list[int]] = {}
    for speculation in (False, True):
        drafter = ScriptedDrafter(answers, "random", end + 1)
        plain = tiny_engine(copy.deepcopy(larger), drafter, max_nodes=12, token_budget=256)
        engine = Engine(plain.runner, tokenizer, drafter, plain.settings)  # type: ignore[arg-type]
        requests = {
            f"{name} {seed}": (
                [seed, 5, 80],
                SamplingParams(
                    max_tokens=30,
                    temperature=seed % 3 / 2,
                    seed=seed,
                    grammar=spec,
                    speculation=speculation,
                ),
            )
            for name, (spec, _) in LANGUAGES.items()
            for seed in range(6)
        }
        outputs = run_all(engine, requests)
        found.append({key: tokens_of(output) for key, output in outputs.items()})
        for key, tokens in found[0].items():
            prompt = requests[key][0]
            answers[tuple(prompt)] = prompt + tokens
    assert found[0] == found[1]
    assert engine.stats.accepted > 0
    for key, tokens in found[0].items():
        assert tokenizer.decode(tokens, skip_special_tokens=True) in LANGUAGES[key.split()[0]][1]
