"""Bodies of answers. Fields that are not set are left out of the JSON."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from deployments.logprobs import ChatLogprobs, TextLogprobs

FinishReason = Literal["stop", "length", "tool_calls"]


class CompletionTokensDetails(BaseModel):
    """How many drafted tokens became part of the answer, and how many did not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class PromptTokensDetails(BaseModel):
    """How many tokens of the prompts were found computed."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of a request, all its choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Answer(BaseModel):
    """What all answers and their chunks have in common."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class CalledFunction(BaseModel):
    """What the model wants called. Of a chunk: what it adds to it.

    Attributes:
        name: of the function.
        arguments: JSON, as the model wrote it, which may be wrong.
    """

    name: str | None = None
    arguments: str | None = None


class ToolCall(BaseModel):
    """A call of the model's turn. Of a chunk: what it adds to the call with that index."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class AssistantMessage(BaseModel):
    """The model's turn."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One answer to a chat."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Answer):
    """Answer of ``POST /v1/chat/completions``."""

    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(BaseModel):
    """What a chunk adds to the model's turn."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChunkChoice(BaseModel):
    """What a chunk adds to one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(Answer):
    """One event of a streamed chat."""

    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class TextChoice(BaseModel):
    """One completion, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None


class TextCompletion(Answer):
    """Answer of ``POST /v1/completions``, and one event of it streamed."""

    choices: list[TextChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """Details of the model, as in vLLM."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["specdec"] = "specdec"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(BaseModel):
    """Answer of ``GET /v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    """Answer of ``GET /health`` and ``GET /ready``."""

    status: str


class Version(BaseModel):
    """Answer of ``GET /version``."""

    version: str


class ErrorDetails(BaseModel):
    """What is wrong, in OpenAI's shape."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every answer other than 200."""

    error: ErrorDetails
