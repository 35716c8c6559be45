"""From a request's fields to the engine's parameters, without a server."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from deployments.body import parse_object
from deployments.config import LimitSettings
from deployments.errors import ApiError
from deployments.sampling import of_choice, prompt_only, sampling_params
from deployments.schema import IGNORED, NEUTRAL, ChatRequest, CompletionRequest, parse_request
from specdec.params import MAX_SEED, GrammarSpec, SamplingParams

LIMITS = LimitSettings()
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def chat(**fields: Any) -> SamplingParams:
    return limited(LIMITS, 10, **fields)


def limited(limits: LimitSettings, prompt_length: int, **fields: Any) -> SamplingParams:
    request = parse_request(ChatRequest, {**CHAT, **fields})
    return sampling_params(request, prompt_length, 100, limits)


def refused(limits: LimitSettings, prompt_length: int, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        limited(limits, prompt_length, **fields)
    assert caught.value.status == 400
    return caught.value


def test_defaults_are_openais() -> None:
    params = chat()
    assert (params.temperature, params.top_p, params.stop) == (1.0, 1.0, ())
    assert params.max_tokens == 90
    assert params.speculation
    assert params.acceptance == "match"
    assert len({chat().seed for _ in range(8)}) == 8


def test_fields_arrive() -> None:
    params = chat(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1.5,
        repetition_penalty=1.2,
        logit_bias={"5": -100, "7": 3.5},
        seed=11,
        stop=["a", "b", "a"],
        ignore_eos=True,
        min_tokens=3,
        stop_token_ids=[4, 9, 4],
        include_stop_str_in_output=True,
        logprobs=True,
        top_logprobs=5,
        guided_regex="a+",
        max_completion_tokens=9,
        max_tokens=5,
        speculation={"enabled": False, "acceptance": "typical", "max_nodes": 6},
    )
    assert params == SamplingParams(
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1.5,
        repetition_penalty=1.2,
        logit_bias={5: -100, 7: 3.5},
        seed=11,
        stop=("a", "b"),
        ignore_eos=True,
        min_tokens=3,
        stop_token_ids=frozenset({4, 9}),
        include_stop=True,
        logprobs=5,
        grammar=GrammarSpec("regex", "a+"),
        speculation=False,
        max_nodes=6,
        acceptance="typical",
    )


@pytest.mark.parametrize(
    ("seed", "expected"), [(0, 0), (-1, MAX_SEED), (-(2**63), 2**63), (MAX_SEED, MAX_SEED)]
)
def test_every_seed_of_64_bits_is_taken(seed: int, expected: int) -> None:
    assert chat(seed=seed).seed == expected


def test_choices_have_seeds_of_their_own() -> None:
    params = chat(seed=5)
    seeds = [of_choice(params, index).seed for index in range(16)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 16
    assert seeds == [of_choice(params, index).seed for index in range(16)]
    assert set(seeds[1:]).isdisjoint(of_choice(chat(seed=6), index).seed for index in range(16))


def test_length_defaults_and_limits() -> None:
    completion = parse_request(CompletionRequest, {"model": "m", "prompt": "x"})
    assert sampling_params(completion, 10, 100, LIMITS).max_tokens == 16
    assert sampling_params(completion, 90, 100, LIMITS).max_tokens == 10
    few = LimitSettings(default_max_tokens=20, max_output_tokens=40)
    assert limited(few, 10).max_tokens == 20
    assert limited(few, 10, max_tokens=40).max_tokens == 40
    assert refused(few, 10, max_tokens=41).param == "max_tokens"
    assert refused(LIMITS, 10, max_completion_tokens=91).param == "max_completion_tokens"
    assert refused(LIMITS, 10, max_completion_tokens=0).param == "max_completion_tokens"
    full = refused(LIMITS, 100)
    assert (full.param, full.code) == ("messages", "context_length_exceeded")


def test_temperatures_that_float32_cannot_tell_from_zero_are_greedy() -> None:
    assert chat(temperature=1e-300).greedy
    assert not chat(temperature=0.01).greedy


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_ignored_fields(name: str) -> None:
    fields: dict[str, Any] = {name: {"any": ["thing"]}}
    assert chat(seed=1, **fields) == chat(seed=1)


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_fields_that_ask_for_nothing(name: str) -> None:
    value: Any
    for value in NEUTRAL[name]:
        assert chat(seed=1, **{name: value}) == chat(seed=1)
    for value in (0, 2, "yes", ["x"], {"type": "json_object"}):
        error = refused(LIMITS, 10, **{name: value})
        assert (error.param, error.code) == (name, "unsupported_parameter")


def test_parts_of_a_message_are_joined() -> None:
    request = parse_request(
        ChatRequest,
        {
            "model": "m",
            "messages": [
                {
                    "role": "developer",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                    "refusal": None,
                    "annotations": [],
                }
            ],
        },
    )
    assert request.messages[0].content == "ab"


def test_numbers_that_are_none_reach_their_field() -> None:
    data = parse_object(b'{"a": NaN, "b": -Infinity, "c": 1e999}')
    assert math.isnan(data["a"])  # type: ignore[arg-type]
    assert (data["b"], data["c"]) == (-math.inf, math.inf)


def test_unicode_passes() -> None:
    assert parse_object('{"a": "\\ud83d\\ude00 é"}'.encode()) == {"a": "😀 é"}


def test_log_probabilities_are_asked_for_as_in_openais_api() -> None:
    assert chat(logprobs=False).logprobs is None
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).logprobs == 20
    assert refused(LIMITS, 10, top_logprobs=2).param == "top_logprobs"
    assert refused(LIMITS, 10, logprobs=True, top_logprobs=21).param == "top_logprobs"
    for fields, expected in (
        ({}, (None, None)),
        ({"logprobs": 0}, (0, None)),
        ({"logprobs": 5, "echo": True}, (5, 5)),
        ({"echo": True}, (None, None)),
    ):
        request = parse_request(CompletionRequest, {"model": "m", "prompt": "x", **fields})
        params = sampling_params(request, 10, 100, LIMITS)
        assert (params.logprobs, params.prompt_logprobs) == expected


def test_an_echo_alone_needs_no_tokens() -> None:
    body = {"model": "m", "prompt": "x", "max_tokens": 0}
    echo = parse_request(CompletionRequest, {**body, "echo": True})
    assert prompt_only(echo)
    assert sampling_params(echo, 10, 100, LIMITS).max_tokens == 1
    plain = parse_request(CompletionRequest, body)
    assert not prompt_only(plain)
    with pytest.raises(ApiError):
        sampling_params(plain, 10, 100, LIMITS)


SCHEMA = {"type": "array", "items": {"const": 1}}


@pytest.mark.parametrize(
    ("fields", "kind", "source", "param"),
    [
        ({"type": "json_object"}, "json_schema", '{"type": "object"}', "response_format"),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
            "json_schema",
            json.dumps(SCHEMA),
            "response_format.json_schema.schema",
        ),
        ({"json": SCHEMA}, "json_schema", json.dumps(SCHEMA), "structured_outputs.json"),
        ({"json": "{}"}, "json_schema", "{}", "structured_outputs.json"),
        ({"regex": "a+"}, "regex", "a+", "structured_outputs.regex"),
        (
            {"choice": ["a\nb", '"é"']},
            "lark",
            'start: "a\\nb" | "\\"\\u00e9\\""',
            "structured_outputs.choice",
        ),
        ({"grammar": "start: x"}, "lark", "start: x", "structured_outputs.grammar"),
    ],
)
def test_forms_of_the_output(fields: dict[str, Any], kind: str, source: str, param: str) -> None:
    name = "response_format" if "type" in fields else "structured_outputs"
    grammar = chat(**{name: fields}).grammar
    assert grammar is not None
    assert (grammar.kind, grammar.source, grammar.param) == (kind, source, param)


def test_forms_of_the_output_exclude_each_other() -> None:
    assert chat(response_format={"type": "text"}).grammar is None
    both = {"response_format": {"type": "json_object"}, "guided_regex": "a"}
    assert refused(LIMITS, 10, **both).param == "guided_regex"
    two = {"structured_outputs": {"regex": "a", "grammar": "b"}}
    assert refused(LIMITS, 10, **two).param == "structured_outputs.grammar"
    assert refused(LIMITS, 10, structured_outputs={}).param == "structured_outputs"
    assert refused(LIMITS, 10, guided_choice=[]).param == "guided_choice"
    missing = refused(LIMITS, 10, response_format={"type": "json_schema"})
    assert missing.param == "response_format.json_schema"
    nameless = {"type": "json_schema", "json_schema": {"schema": {}}}
    assert refused(LIMITS, 10, response_format=nameless).param == "response_format.json_schema.name"


def test_at_least_may_not_be_above_at_most() -> None:
    assert refused(LIMITS, 10, min_tokens=9, max_tokens=8).param == "min_tokens"
    assert refused(LIMITS, 10, min_tokens=-1).param == "min_tokens"
    assert refused(LIMITS, 10, speculation={"max_nodes": 0}).param == "speculation.max_nodes"
