"""Random requests that mix all parameters: speculation on and off must answer the same.

In float32, through the real server. Each request is first sent plainly, with speculation off, to
learn its text; a stop string is then cut out of the middle of it, so that it begins and ends
anywhere in tokens and in accepted runs. The request with everything is then sent twice: streamed
or not with speculation on, the other way with speculation off. All of both answers is compared:
text, reasons, log-probabilities and usage.

    python -m bench.equivalence --requests 200
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from bench.common import Figure, report, write_results
from bench.server import running_server
from deployments.metrics.table import PREEMPTIONS
from specdec.cli.scrape import fetch
from specdec.config import DEFAULT_MODEL

#: Between two log-probabilities of the same token from steps of other widths, in float32.
TOLERANCE = 1e-3
#: Requests at once.
_AT_ONCE = 6

PROMPTS = (
    "Write a short story about a robot who learns to paint.",
    "Repeat after me, three times: the quick brown fox jumps over the lazy dog.",
    "List five animals and the sound that each of them makes.",
    "Write a Python function that adds two numbers, and call it twice.",
    "Describe a person with name, age and favourite colours as JSON.",
    "Was ist die Hauptstadt von Österreich? Antworte mit Umlauten: äöü äöü äöü.",
    "Count from one to twenty in words.",
    "Write emojis: 😀 😃 😄 😁 and then explain them 你好.",
)

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}

GRAMMARS: tuple[dict[str, Any], ...] = (
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": _PERSON}}},
    {"structured_outputs": {"regex": r"[A-Z][a-z]{1,9}( [a-z]{1,9}){3,12}\."}},
    {"structured_outputs": {"choice": ["yes, of course", "no, never", 'maybe\n"later"']}},
    {"guided_grammar": 'start: item+\nitem: /[a-z]{2,8}/ (", " | ".\\n")'},
)


@dataclass(frozen=True)
class Difference:
    """A request whose two answers differ."""

    body: Mapping[str, object]
    where: str
    speculative: object
    plain: object


def random_body(rng: random.Random, model: str) -> dict[str, Any]:
    """A request without stop strings."""
    chat = rng.random() < 0.6
    prompt = rng.choice(PROMPTS)
    body: dict[str, Any] = {"model": model, "max_tokens": rng.randrange(4, 49)}
    if chat:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    body["temperature"] = rng.choice((0, 0, 0.5, 0.9, 1.3))
    body["seed"] = rng.randrange(-(2**63), 2**63)
    choices: dict[str, Any] = {
        "top_p": rng.choice((0.5, 0.9, 0.99)),
        "top_k": rng.choice((1, 5, 40)),
        "min_p": rng.choice((0.02, 0.2)),
        "presence_penalty": rng.choice((-1.5, 0.7, 2)),
        "frequency_penalty": rng.choice((-0.5, 0.3, 1.9)),
        "repetition_penalty": rng.choice((0.9, 1.1, 1.4)),
        "logit_bias": {str(rng.randrange(49_000)): rng.choice((-100, 3.5, 20)) for _ in range(3)},
        "min_tokens": rng.randrange(1, body["max_tokens"] + 1),
        "ignore_eos": True,
        "n": rng.choice((2, 3)),
        "include_stop_str_in_output": True,
        "stop_token_ids": [rng.randrange(49_000), 28, 30],  # the comma and the full stop
    }
    body |= {name: value for name, value in choices.items() if rng.random() < 0.25}
    if rng.random() < 0.4:
        body |= rng.choice(GRAMMARS)
    if rng.random() < 0.4:
        body |= {"logprobs": True, "top_logprobs": rng.randrange(6)} if chat else {"logprobs": 3}
    if not chat and rng.random() < 0.3:
        body["echo"] = True
    return body


def with_stops(rng: random.Random, body: dict[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """The request with stop strings out of the middle of its plain text, where it has one."""
    text = rng.choice(list(texts))
    if len(text) < 4 or rng.random() < 0.3:
        return body
    stops = []
    for _ in range(rng.randrange(1, 4)):
        start = rng.randrange(1, len(text) - 1)
        stops.append(text[start : start + rng.randrange(1, 12)])
    return body | {"stop": stops}


def ask(http: httpx.Client, body: Mapping[str, Any], stream: bool) -> dict[str, Any]:
    """An answer, its events put together if it was streamed.

    Raises:
        AssertionError: the server did not answer with 200, or a stream broke off.
    """
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    if not stream:
        answer = http.post(path, json=dict(body))
        assert answer.status_code == 200, (body, answer.text[:500])
        return _plain(answer.json())
    sent = {**body, "stream": True, "stream_options": {"include_usage": True}}
    answer = http.post(path, json=sent)
    assert answer.status_code == 200, (body, answer.text[:500])
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]", (body, lines[-1])
    return _joined([json.loads(line) for line in lines[:-1]], int(body.get("n", 1)))


def _plain(data: dict[str, Any]) -> dict[str, Any]:
    choices = [
        {
            "text": choice["message"]["content"] if "message" in choice else choice["text"],
            "reason": choice["finish_reason"],
            "logprobs": _entries([choice["logprobs"]]),
        }
        for choice in data["choices"]
    ]
    return {"choices": choices, "usage": _counts(data["usage"])}


def _joined(events: Sequence[dict[str, Any]], count: int) -> dict[str, Any]:
    choices: list[dict[str, Any]] = [{"text": "", "reason": None} for _ in range(count)]
    parts: list[list[dict[str, Any] | None]] = [[] for _ in range(count)]
    for data in events:
        for choice in data["choices"]:
            found = choices[choice["index"]]
            added = choice["delta"].get("content") if "delta" in choice else choice["text"]
            found["text"] += added or ""
            found["reason"] = choice["finish_reason"] or found["reason"]
            parts[choice["index"]].append(choice["logprobs"])
    for found, part in zip(choices, parts, strict=True):
        found["logprobs"] = _entries(part)
    return {"choices": choices, "usage": _counts(events[-1]["usage"])}


def _entries(parts: Sequence[dict[str, Any] | None]) -> list[Any]:
    """Per token what is told of it."""
    found: list[Any] = []
    for part in parts:
        if part is not None and "content" in part:
            found += part["content"]
        elif part is not None:
            found += [list(entry) for entry in zip(*part.values(), strict=True)]
    return found


def _counts(usage: dict[str, Any]) -> dict[str, int]:
    return {key: value for key, value in usage.items() if isinstance(value, int)}


def first_difference(left: object, right: object, tolerance: float, path: str = "") -> str | None:
    """Where two answers differ; numbers with a fraction may by the tolerance."""
    if isinstance(left, float) and isinstance(right, float):
        return None if math.isclose(left, right, rel_tol=0, abs_tol=tolerance) else path
    if isinstance(left, dict) and isinstance(right, dict):
        if list(left) != list(right):
            # equally likely tokens may change places
            same = sorted(left) == sorted(right)
            return (
                None
                if same
                and all(first_difference(left[key], right[key], tolerance) is None for key in left)
                else path
            )
        pairs = [(f"{path}.{key}", left[key], right[key]) for key in left]
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(left, right, strict=True))]
    else:
        return None if left == right else path
    found = (first_difference(a, b, tolerance, where) for where, a, b in pairs)
    return next((where for where in found if where is not None), None)


def compare(
    http: httpx.Client, model: str, count: int, seed: int, tolerance: float = TOLERANCE
) -> tuple[list[Difference], dict[str, int]]:
    """Send ``count`` random requests to a server.

    Returns:
        The requests that were not answered alike, and how often each field was asked for.
    """
    rng = random.Random(seed)
    bodies = [random_body(rng, model) for _ in range(count)]
    plainly = {"speculation": {"enabled": False}}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        first = list(pool.map(lambda body: ask(http, body | plainly, False), bodies))
        bodies = [
            with_stops(rng, body, [choice["text"] for choice in found["choices"]])
            for body, found in zip(bodies, first, strict=True)
        ]
        streamed = [rng.random() < 0.5 for _ in bodies]
        nodes = [rng.choice(({}, {"max_nodes": rng.randrange(1, 9)})) for _ in bodies]
        speculative = list(
            pool.map(
                lambda body, extra, stream: ask(http, body | {"speculation": extra}, stream),
                bodies,
                nodes,
                streamed,
            )
        )
        plain = list(
            pool.map(lambda body, stream: ask(http, body | plainly, not stream), bodies, streamed)
        )
    differences = []
    asked: dict[str, int] = {}
    for body, left, right in zip(bodies, speculative, plain, strict=True):
        for name in body:
            asked[name] = asked.get(name, 0) + 1
        where = first_difference(left, right, tolerance)
        if where is not None:
            differences.append(Difference(body, where, left, right))
    return differences, asked


def main() -> int:
    """Command line. Status 1 if any two answers differ, or no request was ever preempted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    engine = {
        "model": DEFAULT_MODEL,
        "dtype": "float32",
        "kv": {"pages": 16},  # few enough that requests are preempted
        "batch": {"max_sequences": 8, "token_budget": 128, "prefill_chunk": 32},
    }
    with (
        running_server({"engine": engine}, DEFAULT_MODEL) as server,
        httpx.Client(base_url=server.url, timeout=600) as http,
    ):
        differences, asked = compare(http, server.model, options.requests, options.seed)
        preemptions = sum(fetch(server.metrics_url)[PREEMPTIONS.prometheus].values())
    figures = {
        "answers_that_differ": Figure(len(differences), 0, at_most=True),
        "preemptions": Figure(preemptions, 1),
    }
    for difference in differences:
        print(json.dumps(asdict(difference), ensure_ascii=False))
    details = {"asked_for": asked, "requests": options.requests, "seed": options.seed}
    print(report(figures))
    print("wrote", write_results("equivalence", figures, details))
    return int(not all(figure.met for figure in figures.values()))


if __name__ == "__main__":
    raise SystemExit(main())
