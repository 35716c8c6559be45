"""Bad requests: a 4xx in OpenAI's shape that names the field, and a server that goes on."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from bench.server import Server

pytestmark = pytest.mark.slow

HI = [{"role": "user", "content": "hi"}]
LONG = "word " * 9000  # more tokens than the default model's context
DEEP: dict[str, Any] = {}
for _ in range(500):
    DEEP = {"a": DEEP}

#: Fields to change in a good chat, the field that must be named, and the code.
CHATS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"model": 5}, "model", "invalid_type"),
    ({"model": None}, "model", "invalid_type"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": None}, "messages", "invalid_type"),
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"messages": [5]}, "messages[0]", "invalid_type"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role", "missing_required_parameter"),
    ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "invalid_type"),
    (
        {"messages": [*HI, {"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[1].content",
        "invalid_value",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "messages[0].content",
        "invalid_value",
    ),
    (
        {"messages": [{"role": "user", "content": "x", "foo": 1}]},
        "messages[0].foo",
        "unknown_parameter",
    ),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
        "messages[0].tool_calls[0].type",
        "missing_required_parameter",
    ),
    ({"messages": [{"role": "user", "content": LONG}]}, "messages", "context_length_exceeded"),
    ({"temperature": -1}, "temperature", "invalid_value"),
    ({"temperature": 2.5}, "temperature", "invalid_value"),
    ({"temperature": "0.5"}, "temperature", "invalid_type"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"temperature": float("nan")}, "temperature", "invalid_value"),
    ({"temperature": float("inf")}, "temperature", "invalid_value"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"top_p": 1.5}, "top_p", "invalid_value"),
    ({"top_p": float("-inf")}, "top_p", "invalid_value"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"top_k": 1.5}, "top_k", "invalid_type"),
    ({"min_p": 2}, "min_p", "invalid_value"),
    ({"presence_penalty": 3}, "presence_penalty", "invalid_value"),
    ({"frequency_penalty": -3}, "frequency_penalty", "invalid_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": -5}, "max_tokens", "invalid_value"),
    ({"max_tokens": "5"}, "max_tokens", "invalid_type"),
    ({"max_tokens": float("nan")}, "max_tokens", "invalid_type"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
    ({"max_tokens": 100_000}, "max_tokens", "context_length_exceeded"),
    ({"max_tokens": 10**30}, "max_tokens", "context_length_exceeded"),
    ({"seed": 2**64}, "seed", "invalid_value"),
    ({"seed": 0.5}, "seed", "invalid_type"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": 5}, "stop", "invalid_type"),
    ({"stop": [5]}, "stop[0]", "invalid_type"),
    ({"stop": [str(i) for i in range(17)]}, "stop", "invalid_value"),
    ({"stop": "x" * 1001}, "stop", "invalid_value"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"5": "1"}}, "logit_bias.5", "invalid_type"),
    ({"logit_bias": {"60000": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": [1]}, "logit_bias", "invalid_type"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 1000}, "n", "invalid_value"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
    ({"speculation": {"acceptance": "always"}}, "speculation.acceptance", "invalid_value"),
    ({"speculation": True}, "speculation", "invalid_type"),
    ({"no_such_field": 1}, "no_such_field", "unknown_parameter"),
    ({"nested": DEEP}, "nested", "unknown_parameter"),
    ({"prompt": "hi"}, "prompt", "unknown_parameter"),
    ({"logprobs": 1}, "logprobs", "invalid_type"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "invalid_value"),
    ({"stop_token_ids": [49_152]}, "stop_token_ids", "invalid_value"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]", "invalid_type"),
    ({"speculation": {"max_nodes": 0}}, "speculation.max_nodes", "invalid_value"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "nothing"}},
            }
        },
        "response_format.json_schema.schema",
        "invalid_value",
    ),
    ({"guided_json": "{"}, "guided_json", "invalid_value"),
    ({"guided_regex": "(a"}, "guided_regex", "invalid_value"),
    ({"guided_regex": "(a{1000}){1000}"}, "guided_regex", "invalid_value"),
    (
        {"structured_outputs": {"grammar": "start: x"}},
        "structured_outputs.grammar",
        "invalid_value",
    ),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", "invalid_type"),
    (
        {"messages": [{"role": "tool", "content": "x"}]},
        "messages[0].tool_call_id",
        "missing_required_parameter",
    ),
]

COMPLETIONS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"prompt": None}, "prompt", "invalid_type"),
    ({"prompt": []}, "prompt", "invalid_type"),
    ({"prompt": ""}, "prompt", "invalid_value"),
    ({"prompt": [[]]}, "prompt", "invalid_value"),
    ({"prompt": [True, False]}, "prompt", "invalid_type"),
    ({"prompt": [1, "a"]}, "prompt", "invalid_type"),
    ({"prompt": [-1]}, "prompt", "invalid_value"),
    ({"prompt": [-1] * 64}, "prompt", "invalid_value"),
    ({"prompt": [5] * 64 + [2**40]}, "prompt", "invalid_value"),
    ({"prompt": [49_152]}, "prompt", "invalid_value"),
    ({"prompt": [10**30]}, "prompt", "invalid_value"),
    ({"prompt": ["a"] * 17}, "prompt", "invalid_value"),
    ({"prompt": [5] * 8192}, "prompt", "context_length_exceeded"),
    ({"prompt": LONG}, "prompt", "context_length_exceeded"),
    ({"echo": 1}, "echo", "invalid_type"),
    ({"best_of": 2}, "best_of", "unsupported_parameter"),
    ({"suffix": "x"}, "suffix", "unsupported_parameter"),
    ({"logprobs": 21}, "logprobs", "invalid_value"),
    ({"logprobs": True}, "logprobs", "invalid_type"),
    ({"messages": HI}, "messages", "unknown_parameter"),
]

#: Bodies as bytes, and the status.
BODIES: list[tuple[bytes, int]] = [
    (b"", 400),
    (b"{", 400),
    (b"null", 400),
    (b"[]", 400),
    (b'"text"', 400),
    (b'{"model": ', 400),
    (b"\xff\xfe{}", 400),
    (b'{"model": "\xed\xa0\x80"}', 400),
    (b'{"model": "\\ud800"}', 400),
    (b"[" * 100_000, 400),
    (b'{"a":' * 100_000, 400),
    (b'{"max_tokens": ' + b"9" * 5000 + b"}", 400),
    (b"\0" * 100, 400),
    (b" " * (5 * 2**20), 413),
]


def check_error(answer: httpx.Response, status: int, param: str | None, code: str | None) -> None:
    assert answer.status_code == status, answer.text[:300]
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["code"] == code
    assert error["message"]
    assert len(error["message"]) < 500
    assert "Traceback" not in answer.text


def check_serves(http: httpx.Client, server: Server) -> None:
    assert http.get("/ready").json() == {"status": "ok"}
    answer = http.post(
        "/v1/completions",
        json={"model": server.model, "prompt": "a", "max_tokens": 1, "temperature": 0},
    )
    assert answer.status_code == 200


def name_of(case: tuple[dict[str, Any], str | None, str]) -> str:
    return json.dumps(case[0])[:40]


@pytest.mark.parametrize(("changes", "param", "code"), CHATS, ids=map(name_of, CHATS))
def test_chat(
    http: httpx.Client, server: Server, changes: dict[str, Any], param: str | None, code: str
) -> None:
    body = {"model": server.model, "messages": HI, **changes}
    bodies = (
        [body] if {"stream", "stream_options"} & set(changes) else [body, body | {"stream": True}]
    )
    for sent in bodies:
        # json.dumps writes NaN and Infinity as JavaScript does, which httpx would refuse
        answer = http.post("/v1/chat/completions", content=json.dumps(sent))
        check_error(answer, 400, param, code)
    check_serves(http, server)


@pytest.mark.parametrize(("changes", "param", "code"), COMPLETIONS, ids=map(name_of, COMPLETIONS))
def test_completion(
    http: httpx.Client, server: Server, changes: dict[str, Any], param: str | None, code: str
) -> None:
    body = {"model": server.model, "prompt": "hi", **changes}
    check_error(http.post("/v1/completions", content=json.dumps(body)), 400, param, code)
    check_serves(http, server)


@pytest.mark.parametrize(("body", "status"), BODIES, ids=lambda value: repr(value)[:30])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_body(http: httpx.Client, server: Server, path: str, body: bytes, status: int) -> None:
    answer = http.post(path, content=body)
    check_error(answer, status, None, "request_too_large" if status == 413 else "invalid_json")
    check_serves(http, server)


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_missing_field(http: httpx.Client, server: Server, missing: str) -> None:
    body = {"model": server.model, "messages": HI}
    del body[missing]
    answer = http.post("/v1/chat/completions", json=body)
    check_error(answer, 400, missing, "missing_required_parameter")


def test_unknown_model(http: httpx.Client) -> None:
    for path, key in (("/v1/chat/completions", "messages"), ("/v1/completions", "prompt")):
        body = {"model": "gpt-unknown\n\x1b[31m", key: HI if key == "messages" else "hi"}
        check_error(http.post(path, json=body), 404, "model", "model_not_found")
    check_error(http.get("/v1/models/other/model"), 404, "model", "model_not_found")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "unknown_url"),
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("POST", "/v1/chat/completions/", 404, "unknown_url"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("PUT", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ],
)
def test_unknown_route(http: httpx.Client, method: str, path: str, status: int, code: str) -> None:
    check_error(http.request(method, path), status, None, code)


def test_null_means_absent(http: httpx.Client, server: Server) -> None:
    fields = ("temperature", "top_p", "stop", "n", "seed", "stream", "logit_bias", "tools", "user")
    body = {
        "model": server.model,
        "messages": HI,
        "max_tokens": 1,
        **dict.fromkeys(fields),
    }
    assert http.post("/v1/chat/completions", json=body).status_code == 200
