"""The document at ``/openapi.json``: what this server takes and answers, field by field."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from deployments.config import LimitSettings
from deployments.responses import (
    ChatCompletion,
    ErrorAnswer,
    Health,
    ModelCard,
    ModelList,
    TextCompletion,
    Version,
)
from deployments.schema import IGNORED, NEUTRAL, ChatRequest, CompletionRequest
from deployments.tokenization import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
)
from specdec.params import MAX_COUNT, MAX_LOGPROBS, REPETITION_PENALTIES

_REF = "#/components/schemas/{model}"
_REQUESTS = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
_ANSWERS = (
    ChatCompletion,
    TextCompletion,
    TokenizeAnswer,
    DetokenizeAnswer,
    ModelCard,
    ModelList,
    Health,
    Version,
    ErrorAnswer,
)
#: What the errors of a path mean; docs/api.md has their codes.
_ERRORS = {
    "400": "the request is at fault; `param` names the field",
    "401": "no API key, or one that is not good (any more)",
    "403": "the API key is not for this model",
    "404": "no such model or path",
    "405": "not this method",
    "408": "too late: body or answer took too long",
    "413": "the body is too large",
    "429": "over a limit; `Retry-After` says when to come again",
    "500": "a fault of the server",
    "503": "no worker, or none in time; `Retry-After` says when to come again",
}
_GET_ERRORS = ("401", "405", "500")
_POST_ERRORS = tuple(_ERRORS)
#: Ranges that are checked by specdec.params, for fields of requests.
_RANGES: dict[str, dict[str, float]] = {
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": MAX_COUNT},
    "min_p": {"minimum": 0, "maximum": 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": dict(zip(("minimum", "maximum"), REPETITION_PENALTIES, strict=True)),
    "top_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "min_tokens": {"minimum": 0},
    "max_tokens": {"minimum": 1},
    "max_completion_tokens": {"minimum": 1},
    "seed": {"minimum": -(2**63), "maximum": 2**64 - 1},
}


def document(model_name: str, limits: LimitSettings, keys: bool) -> dict[str, Any]:
    """OpenAPI 3.1.

    Args:
        model_name: the one that is served.
        limits: of a request.
        keys: whether a key is asked for.
    """
    modes: list[tuple[type[BaseModel], Any]] = [
        *((kind, "validation") for kind in _REQUESTS),
        *((kind, "serialization") for kind in _ANSWERS),
    ]
    _, schemas = models_json_schema(modes, ref_template=_REF)
    components = schemas["$defs"]
    for kind in _REQUESTS:
        _sharpen(components[kind.__name__], model_name, limits)
    for kind in (ChatRequest, CompletionRequest):
        _add_tolerated(components[kind.__name__])
    security: dict[str, Any] = {}
    if keys:
        security = {"security": [{"key": []}]}
        components = {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        }
    else:
        components = {"schemas": components}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "specdec",
            "version": version("specdec"),
            "description": "OpenAI's API for one model, with some of vLLM's additions.",
        },
        "paths": _paths(model_name),
        "components": components,
        **security,
    }


def _paths(model_name: str) -> dict[str, Any]:
    name = {
        "name": "name",
        "in": "path",
        "required": True,
        "schema": {"type": "string"},
        "example": model_name,
    }
    return {
        "/v1/chat/completions": {
            "post": _post("Answer a conversation", ChatRequest, ChatCompletion, streams=True)
        },
        "/v1/completions": {
            "post": _post("Continue a text", CompletionRequest, TextCompletion, streams=True)
        },
        "/v1/models": {"get": _get("The model that is served", ModelList)},
        "/v1/models/{name}": {
            "get": _get("Details of a model", ModelCard, "403", "404"),
            "parameters": [name],
        },
        "/tokenize": {
            "post": _post("Text or conversation to tokens", TokenizeRequest, TokenizeAnswer)
        },
        "/detokenize": {"post": _post("Tokens to text", DetokenizeRequest, DetokenizeAnswer)},
        "/health": {"get": _open("Whether the gateway lives", Health)},
        "/ready": {"get": _open("Whether a worker takes requests", Health, "503")},
        "/version": {"get": _open("Version of the server", Version)},
    }


def _post(
    summary: str, request: type[BaseModel], answer: type[BaseModel], streams: bool = False
) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _ref(answer)}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "summary": summary,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _ref(request)}},
        },
        "responses": {"200": {"description": summary, "content": content}, **_errors(_POST_ERRORS)},
    }


def _get(summary: str, answer: type[BaseModel], *errors: str) -> dict[str, Any]:
    content = {"application/json": {"schema": _ref(answer)}}
    return {
        "summary": summary,
        "responses": {
            "200": {"description": summary, "content": content},
            **_errors((*_GET_ERRORS, *errors)),
        },
    }


def _open(summary: str, answer: type[BaseModel], *unwell: str) -> dict[str, Any]:
    found = _get(summary, answer)
    found["security"] = []
    del found["responses"]["401"]
    for status in unwell:
        found["responses"][status] = {**found["responses"]["200"], "description": "it does not"}
    return found


def _errors(statuses: tuple[str, ...]) -> dict[str, Any]:
    content = {"application/json": {"schema": _ref(ErrorAnswer)}}
    return {
        status: {"description": _ERRORS[status], "content": content}
        for status in sorted(set(statuses))
    }


def _ref(kind: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=kind.__name__)}


def _sharpen(schema: dict[str, Any], model_name: str, limits: LimitSettings) -> None:
    """Write the ranges into it that are not checked by the pydantic model."""
    ranges = {
        **_RANGES,
        "n": {"minimum": 1, "maximum": limits.choices},
        "model": {"enum": [model_name]},
    }
    for name, range_ in ranges.items():
        field = schema["properties"].get(name)
        if field is not None:
            kinds = field.get("anyOf", [field])
            kinds[0].update(range_)


def _add_tolerated(schema: dict[str, Any]) -> None:
    """Fields that pass though nothing is done for them."""
    for name in IGNORED - schema["properties"].keys():
        schema["properties"][name] = {"description": "Accepted, without effect."}
    for name in NEUTRAL.keys() - schema["properties"].keys():
        schema["properties"][name] = {
            "description": "Not supported; these values ask for nothing.",
            "enum": list(NEUTRAL[name]),
        }
