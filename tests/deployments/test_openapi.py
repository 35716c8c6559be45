"""The document at /openapi.json, against real answers and real refusals."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import jsonschema
import pytest

from bench.server import Server
from deployments.config import LimitSettings
from deployments.openapi import document

pytestmark = pytest.mark.slow

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def spec(server: Server) -> dict[str, Any]:
    answer = httpx.get(f"{server.url}/openapi.json", timeout=30)
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def validate(spec: dict[str, Any], schema: dict[str, Any], value: object) -> None:
    validator = jsonschema.Draft202012Validator({**schema, "components": spec["components"]})
    validator.validate(value)


def check(spec: dict[str, Any], path: str, answer: httpx.Response) -> None:
    """An answer is one that the document foresees."""
    (operation,) = [value for key, value in spec["paths"][path].items() if key in ("get", "post")]
    described = operation["responses"][str(answer.status_code)]
    kind = answer.headers["content-type"].partition(";")[0]
    validate(spec, described["content"][kind]["schema"], answer.json())


def request_schema(spec: dict[str, Any], path: str) -> dict[str, Any]:
    body = spec["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    schema: dict[str, Any] = body["schema"]
    return schema


def test_every_reference_leads_somewhere() -> None:
    text = json.dumps(document("m", LimitSettings(), keys=True))
    known = json.loads(text)["components"]["schemas"]
    for name in re.findall(r'"#/components/schemas/([^"]+)"', text):
        assert name in known
    for schema in known.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_answers_are_as_described(server: Server, spec: dict[str, Any], http: httpx.Client) -> None:
    for path in ("/health", "/ready", "/version", "/v1/models"):
        check(spec, path, http.get(path))
    check(spec, "/v1/models/{name}", http.get(f"/v1/models/{server.model}"))
    check(spec, "/v1/models/{name}", http.get("/v1/models/none"))
    good: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 3, "n": 2}),
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 3, "tools": [TOOL]}),
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 3, "tools": [], "user": "x"}),
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 3}),
        ("/v1/completions", {"prompt": [[5, 6], [7]], "max_tokens": 1, "stop": "x"}),
        ("/tokenize", {"prompt": "hello", "return_token_strs": True}),
        ("/tokenize", {"messages": HI}),
        ("/detokenize", {"tokens": [5, 6, 7]}),
    ]
    for path, fields in good:
        body = {"model": server.model, **fields}
        validate(spec, request_schema(spec, path), body)
        answer = http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        check(spec, path, answer)


def test_what_the_document_forbids_is_refused(
    server: Server, spec: dict[str, Any], http: httpx.Client
) -> None:
    bad: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": HI, "temperature": 3}),
        ("/v1/chat/completions", {"messages": HI, "n": 10**6}),
        ("/v1/chat/completions", {"messages": HI, "unknown": 1}),
        ("/v1/chat/completions", {"messages": HI, "tools": [{"type": "function"}]}),
        ("/v1/chat/completions", {"messages": HI, "model": "other"}),
        ("/v1/completions", {"prompt": {"a": 1}}),
        ("/v1/completions", {"prompt": "x", "seed": 0.5}),
        ("/tokenize", {"prompt": 5}),
        ("/detokenize", {"tokens": ["a"]}),
    ]
    for path, fields in bad:
        body = {"model": server.model, **fields}
        with pytest.raises(jsonschema.ValidationError):
            validate(spec, request_schema(spec, path), body)
        answer = http.post(path, json=body)
        assert 400 <= answer.status_code < 500
        check(spec, path, answer)


def test_docs_load_nothing_from_elsewhere(http: httpx.Client) -> None:
    page = http.get("/docs")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(links) >= 3
    for link in links:
        assert not link.startswith(("http:", "https:", "//")), link
        asset = http.get(f"/{link}")
        assert asset.status_code == 200
        assert len(asset.content) > 1000
    assert "'openapi.json'" in page.text or '"openapi.json"' in page.text
    for path in ("/docs/assets/../../etc/passwd", "/docs/assets/%2e%2e/core.py", "/docs/assets"):
        assert http.get(path).status_code in (404, 405)


def test_tokens_and_back(server: Server, http: httpx.Client) -> None:
    """As completions and chats count them."""
    text = "Hello 日本 👩‍👧 world"
    found = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    back = http.post("/detokenize", json={"tokens": found["tokens"]}).json()
    assert back == {"prompt": text}
    whole = http.post(
        "/v1/completions", json={"model": server.model, "prompt": text, "max_tokens": 1}
    ).json()
    assert whole["usage"]["prompt_tokens"] == found["count"]
    chat = http.post("/tokenize", json={"messages": HI, "tools": [TOOL]}).json()
    whole = http.post(
        "/v1/chat/completions",
        json={"model": server.model, "messages": HI, "tools": [TOOL], "max_tokens": 1},
    ).json()
    assert whole["usage"]["prompt_tokens"] == chat["count"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, 400, "tools"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, 400, "chat_template"),
        ("/tokenize", {"prompt": "a", "model": "no"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, 400, "tokens"),
        ("/detokenize", {"tokens": [True]}, 400, "tokens[0]"),
    ],
)
def test_refusals_of_tokens(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    answer = http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
