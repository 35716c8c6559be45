"""Structured outputs and log-probabilities through the real server, as clients ask for them.

What these catch: an answer that is not of its form, a form that only plain mode keeps to, an echo
whose tokens do not spell its text, a token told without its bytes.
"""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from bench.json_schemas import judge, make_schemas
from bench.server import Server

pytestmark = pytest.mark.slow


class Colour(Enum):
    """What the model may choose from."""

    red = "red"
    blue = "blue"


class Pet(BaseModel):
    """What is asked for."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=30)
    colours: list[Colour] = Field(min_length=1, max_length=2)


ASK: list[Any] = [{"role": "user", "content": "Describe my cat as JSON."}]


def test_the_sdk_parses_a_pydantic_model(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=300)
    answer = client.chat.completions.parse(
        model=server.model, messages=ASK, response_format=Pet, max_tokens=200, temperature=0
    )
    pet = answer.choices[0].message.parsed
    assert pet is not None
    assert 0 <= pet.age <= 30
    assert answer.choices[0].finish_reason == "stop"


def test_answers_keep_to_their_schemas(http: httpx.Client, server: Server) -> None:
    for number, schema in enumerate(make_schemas(6, seed=9)):
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        body = {
            "model": server.model,
            "messages": ASK,
            "max_tokens": 1000,
            "temperature": 0.8,
            "seed": number,
            "response_format": form,
        }
        choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert judge(choice["message"]["content"], schema) is None


@pytest.mark.parametrize("speculation", [True, False])
def test_answers_match_expressions_and_choices(
    http: httpx.Client, server: Server, speculation: bool
) -> None:
    pattern = r"[A-Z][a-z]{2,8}, ([0-9]{1,2})(st|th)( of [A-Z][a-z]{2,9})?"
    choices = ["yes", "yes, but\nlater", 'no "way"', "é"]
    body = {
        "model": server.model,
        "prompt": "The date and time:",
        "max_tokens": 60,
        "n": 3,
        "speculation": {"enabled": speculation},
    }
    for form in ({"guided_regex": pattern}, {"structured_outputs": {"choice": choices}}):
        answer = http.post("/v1/completions", json=body | form).json()
        for choice in answer["choices"]:
            assert choice["finish_reason"] == "stop"
            if "guided_regex" in form:
                assert re.fullmatch(pattern, choice["text"])
            else:
                assert choice["text"] in choices


def test_an_echo_spells_its_tokens(http: httpx.Client, server: Server) -> None:
    prompt = "The naïve café 😀 of"
    body = {"model": server.model, "prompt": prompt, "echo": True, "temperature": 0, "seed": 1}
    plain = http.post("/v1/completions", json=body | {"max_tokens": 6}).json()["choices"][0]
    told = http.post("/v1/completions", json=body | {"max_tokens": 6, "logprobs": 2}).json()
    choice, logprobs = told["choices"][0], told["choices"][0]["logprobs"]
    assert choice["text"] == plain["text"]
    assert choice["text"].startswith(prompt)
    assert logprobs["token_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    spelt = b"".join(
        bytes.fromhex(token[6:].replace("\\x", ""))
        if token.startswith("bytes:")
        else token.encode()
        for token in logprobs["tokens"]
    )
    assert spelt.decode() == choice["text"]
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    alone = http.post("/v1/completions", json=body | {"max_tokens": 0, "logprobs": 2}).json()
    only = alone["choices"][0]
    assert only["text"] == prompt
    count = len(only["logprobs"]["tokens"])
    assert only["logprobs"]["token_logprobs"] == logprobs["token_logprobs"][:count]
    assert alone["usage"]["completion_tokens"] == 0
    assert alone["usage"]["prompt_tokens"] == count


def test_tokens_of_a_chat_have_their_bytes(http: httpx.Client, server: Server) -> None:
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": "Repeat: 😀 é 你好"}],
        "max_tokens": 20,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
    }
    choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    content = choice["logprobs"]["content"]
    data = b"".join(bytes(entry["bytes"]) for entry in content)
    assert data.decode(errors="replace") == choice["message"]["content"]
    for entry in content:
        assert len(entry["top_logprobs"]) == 3
        # greedy: the token is the likeliest
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]
        assert entry["bytes"] == entry["top_logprobs"][0]["bytes"]


def test_a_form_too_large_is_refused(http: httpx.Client, server: Server) -> None:
    schema = {"enum": ["x" * 100] * 3000}
    body = {"model": server.model, "messages": ASK, "guided_json": json.dumps(schema)}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "guided_json"
