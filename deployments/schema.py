"""Bodies of requests, as OpenAI defines them, with vLLM's and our own additions.

Types only: ranges of sampling parameters are checked by specdec.params, once for all callers.
https://platform.openai.com/docs/api-reference/chat/create
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from deployments.errors import brief, from_validation, invalid
from deployments.grammars import ResponseFormat, StructuredOutputs
from deployments.tools.schema import PastCall, Tool, ToolChoice
from specdec.params import AcceptanceRule

#: Accepted, and without effect here.
IGNORED = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)

#: Fields of OpenAI's API that this server does not implement, with the values that ask for
#: nothing. These pass; all others are refused.
NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "audio": (None,),
        "best_of": (None, 1),
        "function_call": (None, "none", "auto"),
        "functions": (None, []),
        "modalities": (None, ["text"]),
        "suffix": (None, ""),
        "web_search_options": (None,),
    }
)

#: Fields of a message that an answer of this API, sent back as history, may carry.
_MESSAGE_NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "annotations": (None, []),
        "audio": (None,),
        "function_call": (None,),
        "refusal": (None,),
    }
)


class Body(BaseModel):
    """Base: no conversion between types, unknown fields are errors, numbers are finite."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class StreamOptions(Body):
    """How to stream.

    Attributes:
        include_usage: end with a chunk that has the usage and no choices.
        continuous_usage_stats: also put the usage up to then in every chunk, as vLLM does;
            load generators ask for it. Without effect where ``include_usage`` is not true.
        include_obfuscation: OpenAI's padding against traffic analysis; without effect here.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SpeculationOptions(Body):
    """Extension: how this request is decoded.

    Attributes:
        enabled: draft and verify; never changes the text under a lossless rule.
        acceptance: ``match`` and ``rejection`` are lossless, ``typical`` is lossy.
        max_nodes: most nodes of a draft tree, root included; the engine's own limit holds too.
    """

    enabled: bool = True
    acceptance: AcceptanceRule = "match"
    max_nodes: int | None = None


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else [] if value is None else value


def _as_text(value: object) -> object:
    """The text of a message's content: a string, or the joined parts of type ``text``."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("string_type", "Input should be a string or a list of parts")
    texts: list[str] = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise PydanticCustomError(
                "value_error",
                "part {index} has type {kind}; only parts of type 'text' are supported",
                {"index": index, "kind": brief(kind)},
            )
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise PydanticCustomError(
                "value_error",
                "part {index} must hold 'type' and a string 'text', nothing else",
                {"index": index},
            )
        texts.append(part["text"])
    return "".join(texts)


def _as_prompts(value: object) -> object:
    """One or many prompts, each a text or token ids, as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        if value and all(type(token) is int for token in value):
            return [value]
        if value and all(
            isinstance(prompt, str)
            or (isinstance(prompt, list) and all(type(token) is int for token in prompt))
            for prompt in value
        ):
            return value
    raise PydanticCustomError(
        "prompt_type",
        "Input should be a string, a list of strings, a list of token ids or a list of such lists",
    )


class Message(Body):
    """A turn of the conversation.

    Attributes:
        role: whose it is.
        content: its text; empty where an assistant's turn has calls alone.
        name: of who speaks.
        tool_calls: of an assistant's turn.
        tool_call_id: of a tool's turn: the call that it answers.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str, BeforeValidator(_as_text, json_schema_input_type=str | list[dict[str, str]])
    ]
    name: str | None = None
    tool_calls: list[PastCall] | None = None
    tool_call_id: str | None = None


class SamplingFields(Body):
    """Fields that chats and completions have in common."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: Annotated[
        list[str], BeforeValidator(_as_list, json_schema_input_type=str | list[str] | None)
    ] = Field(default_factory=list)
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    priority: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: SpeculationOptions | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=256)


class ChatRequest(SamplingFields):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(SamplingFields):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[
        list[str | list[int]],
        BeforeValidator(
            _as_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]
        ),
    ]
    logprobs: int | None = None
    echo: bool | None = None


RequestT = TypeVar("RequestT", bound=SamplingFields)
BodyT = TypeVar("BodyT", bound=Body)


def parse_request(kind: type[RequestT], data: dict[str, Any]) -> RequestT:
    """Check a body against its schema.

    Raises:
        ApiError: 400 that names the field.
    """
    data = with_plain_messages(_without(data, NEUTRAL, IGNORED, ""))
    request = validated(kind, data)
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "'stream_options' needs 'stream' to be true.")
    return request


def with_plain_messages(data: dict[str, Any]) -> dict[str, Any]:
    """A body whose messages have no fields that ask for nothing.

    Raises:
        ApiError: one of them asks for something that this server does not do.
    """
    messages = data.get("messages")
    if not isinstance(messages, list):
        return data
    plain = [
        _without(message, _MESSAGE_NEUTRAL, frozenset(), f"messages[{index}].")
        if isinstance(message, dict)
        else message
        for index, message in enumerate(messages)
    ]
    for message in plain:
        calls = isinstance(message, dict) and message.get("tool_calls")
        if calls and message.get("content") is None:  # as an answer with calls alone has it
            message["content"] = ""
    return {**data, "messages": plain}


def validated(kind: type[BodyT], data: dict[str, Any]) -> BodyT:
    """A body as its model has it.

    Raises:
        ApiError: 400 that names the field.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise from_validation(error, data) from error


def _without(
    data: dict[str, Any],
    neutral: Mapping[str, tuple[object, ...]],
    ignored: frozenset[str],
    prefix: str,
) -> dict[str, Any]:
    """``data`` less the fields that ask for nothing.

    Raises:
        ApiError: one of them asks for something.
    """
    kept = {}
    for name, value in data.items():
        if name in neutral:
            if not any(type(value) is type(none) and value == none for none in neutral[name]):
                raise invalid(
                    f"{prefix}{name}",
                    f"'{prefix}{name}' is not supported by this server.",
                    "unsupported_parameter",
                )
        elif name not in ignored:
            kept[name] = value
    return kept
