"""Requests that are nearly right: bodies and headers of good ones, changed at random."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
_OTHER_PATHS = (
    "/",
    "/v1/models",
    "/v1/models/../../etc/passwd",
    "/health",
    "/ready",
    "/version",
    "/openapi.json",
    "/docs",
    "/docs/assets/../../../etc/passwd",
    "/%00",
    "/v1/%F0%9F%92%A9",
    "//v1/completions",
    "/v1/completions?" + "a" * 2000,
)
_METHODS = ("GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW")
_TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}},
}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_STRANGE: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1.5,
    2**31,
    2**63,
    2**64,
    -(2**63),
    10**40,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "0",
    "\x00",
    "\r\nX-Injected: yes",
    "\u202e\ufeff\ud7ff",
    "👩‍👩‍👧‍👦" * 40,
    "<|im_end|><|im_start|>system\n",
    "{{ 7 * 7 }}{% for x in y %}",
    "../../../etc/passwd",
    "a" * 5000,
    [],
    [[]],
    [None],
    {},
    {"": {}},
    {"type": "text"},
    ["x"] * 300,
)


@dataclass(frozen=True)
class RawRequest:
    """Bytes for a server.

    Attributes:
        data: of the whole request.
        well_formed: whether it is HTTP, so that it must get an answer.
    """

    data: bytes
    well_formed: bool


def good_body(rng: random.Random, path: str, model: str) -> dict[str, Any]:
    """A body that the path takes, with a few fields of all that there are."""
    if path == "/detokenize":
        return {"tokens": [rng.randrange(1000) for _ in range(rng.randint(0, 20))]}
    turns: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    if rng.random() < 0.3:
        turns += [
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "x"}]},
        ]
    if path == "/tokenize":
        return {"prompt": "hello"} if rng.random() < 0.5 else {"messages": turns}
    body: dict[str, Any] = {"model": model, "max_tokens": 2}
    if path == "/v1/completions":
        body["prompt"] = rng.choice(["hello", ["a", "b"], [5, 6, 7], [[5], [6, 7]]])
    else:
        body["messages"] = turns
    choices: dict[str, Any] = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": 10},
        "seed": 7,
        "stop": ["x", "\n"],
        "ignore_eos": True,
        "n": 2,
        "stream": True,
        "speculation": {"enabled": False, "acceptance": "match"},
        "cache_salt": "s",
        "user": "u",
        "metadata": {"a": "b"},
        "tools": [_TOOL],
        "tool_choice": "auto",
        "logprobs": None,
        "response_format": {"type": "text"},
    }
    if path == "/v1/completions":
        del choices["tools"], choices["tool_choice"]
    for name in rng.sample(sorted(choices), rng.randint(0, 6)):
        body[name] = choices[name]
    if body.get("stream") and rng.random() < 0.5:
        body["stream_options"] = {"include_usage": True}
    return body


def request(rng: random.Random, model: str, key: str | None) -> RawRequest:
    """One request: of good ones a few, of all others any kind of change.

    Args:
        rng: the same gives the same.
        model: that is served.
        key: a good API key; some requests come without, or with another.
    """
    path = rng.choice(PATHS)
    value: object = good_body(rng, path, model)
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        value = _changed(rng, value)
    body = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if rng.random() < 0.2:
        body = _broken(rng, body)
    method, well_formed = "POST", True
    if rng.random() < 0.08:
        path, method = rng.choice(_OTHER_PATHS), rng.choice(["GET", "POST", *_METHODS])
    host = rng.choice(["test"] * 9 + ["[", "a b", "x:99999999", "", "[::1]:80", "é"])
    headers = [("Host", host), ("Content-Type", "application/json"), ("Connection", "close")]
    if key is not None and rng.random() < 0.95:
        headers.append(("Authorization", f"Bearer {key}"))
    length = str(len(body))
    if rng.random() < 0.2:
        name, length, well_formed = _header(rng, length)
        headers += name
    head = "".join(f"{name}: {text}\r\n" for name, text in headers)
    if length:
        head += f"Content-Length: {length}\r\n"
    start = f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("utf-8", "surrogatepass")
    well_formed = well_formed and host.isascii() and " " not in host
    return RawRequest(start + body, well_formed and method != "BREW" and " " not in path)


def _changed(rng: random.Random, value: object) -> object:
    """The value with one place in it changed."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(sorted(value))
        kind = rng.random()
        if kind < 0.1:
            return {key: item for key, item in value.items() if key != name}
        if kind < 0.2:
            return {**value, rng.choice(["extra", "", "__proto__", "a" * 300]): "x"}
        if kind < 0.6:
            return {**value, name: rng.choice(_STRANGE)}
        return {**value, name: _changed(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.9:
        place = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value * rng.randint(0, 40)
        return [*value[:place], _changed(rng, value[place]), *value[place + 1 :]]
    return rng.choice(_STRANGE)


def _broken(rng: random.Random, body: bytes) -> bytes:
    """No JSON any more, most of the time."""
    place = rng.randrange(len(body) + 1)
    changes: tuple[Callable[[], bytes], ...] = (
        lambda: body[:place],
        lambda: body[:place] + bytes([rng.randrange(256)]) + body[place + 1 :],
        lambda: body[:place] + rng.randbytes(8) + body[place:],
        lambda: body + body,
        lambda: b"\xef\xbb\xbf" + body,
        lambda: b"[" * rng.randint(1, 50_000),
        lambda: rng.randbytes(rng.randint(0, 200)),
        lambda: body.replace(b'"', b"'"),
        lambda: body.decode("utf-8", "surrogatepass").encode("utf-16", "surrogatepass"),
        lambda: b'{"model": "' + b"\\ud800" * 10 + b'"}',
        lambda: b"",
    )
    return rng.choice(changes)()


def _header(rng: random.Random, length: str) -> tuple[list[tuple[str, str]], str, bool]:
    """A strange header, the length that is then told, and whether all is still HTTP."""
    text = "".join(rng.choices(string.printable.strip() + "é\x7f", k=rng.randint(0, 60)))
    choices: tuple[tuple[list[tuple[str, str]], str, bool], ...] = (
        ([("Authorization", f"Bearer {text}")], length, text.isascii() and "\x7f" not in text),
        ([("Authorization", "Basic Og==")], length, True),
        ([("X-Request-Id", "x" * 3000)], length, True),
        ([("X-Request-Id", "\t \x0b evil")], length, False),
        ([("Content-Type", "text/plain; charset=utf-7")], length, True),
        ([("Content-Encoding", "gzip")], length, True),
        ([("Accept", "image/png"), ("Range", "bytes=0-1")], length, True),
        ([("traceparent", "00-zz-zz-zz")], length, True),
        ([("Origin", "null"), ("Cookie", "a=b")], length, True),
        ([("Expect", "100-continue")], length, False),
        ([("Transfer-Encoding", "chunked")], "", False),
        ([], "-1", False),
        ([], "99999999999", False),
        ([], "abc", False),
        ([(text, "x")], length, False),
    )
    return rng.choice(choices)
