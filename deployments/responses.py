"""Bodies of answers. Fields that are not set are left out of the JSON."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

FinishReason = Literal["stop", "length"]


class CompletionTokensDetails(BaseModel):
    """How many drafted tokens became part of the answer, and how many did not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    """Tokens of a request, all its choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails


class Answer(BaseModel):
    """What all answers and their chunks have in common."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class AssistantMessage(BaseModel):
    """The model's turn."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    """One answer to a chat."""

    index: int
    message: AssistantMessage
    logprobs: None
    finish_reason: FinishReason


class ChatCompletion(Answer):
    """Answer of ``POST /v1/chat/completions``."""

    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(BaseModel):
    """What a chunk adds to the model's turn."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    """What a chunk adds to one answer."""

    index: int
    delta: ChatDelta
    logprobs: None
    finish_reason: FinishReason | None


class ChatChunk(Answer):
    """One event of a streamed chat."""

    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class TextChoice(BaseModel):
    """One completion, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: None
    finish_reason: FinishReason | None


class TextCompletion(Answer):
    """Answer of ``POST /v1/completions``, and one event of it streamed."""

    choices: list[TextChoice]
    usage: Usage | None = None
