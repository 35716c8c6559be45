"""The two forms of an answer: chat and text completion, whole or in chunks."""

from __future__ import annotations

from typing import Protocol

from pydantic import BaseModel

from deployments.generation import Piece
from deployments.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    FinishReason,
    TextChoice,
    TextCompletion,
    Usage,
)


class AnswerHead(BaseModel):
    """What every body of one answer begins with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class Format(Protocol):
    """Builds the bodies of one answer."""

    def opening(self, index: int, usage: Usage | None) -> BaseModel | None:
        """The chunk that comes before the first text of a choice, if any."""

    def chunk(self, piece: Piece, usage: Usage | None) -> BaseModel:
        """The chunk of a piece. Text and end of a choice may come in one piece.

        Args:
            usage: up to now, where every chunk is to have it.
        """

    def usage(self, usage: Usage) -> BaseModel:
        """The chunk with the usage and no choices."""

    def whole(self, choices: list[tuple[str, FinishReason]], usage: Usage) -> BaseModel:
        """The answer that is not streamed."""


class ChatFormat:
    """Of ``/v1/chat/completions``."""

    def __init__(self, head: AnswerHead, include_usage: bool) -> None:
        self._head = {**head.model_dump(), "object": "chat.completion.chunk"}
        self._null_usage = {"usage": None} if include_usage else {}

    def opening(self, index: int, usage: Usage | None) -> ChatChunk:
        """The role, and no text."""
        return self._chunk(index, ChatDelta(role="assistant", content=""), None, usage)

    def chunk(self, piece: Piece, usage: Usage | None) -> ChatChunk:
        """The text as a delta."""
        delta = ChatDelta(content=piece.text) if piece.text else ChatDelta()
        return self._chunk(piece.index, delta, piece.finish_reason, usage)

    def usage(self, usage: Usage) -> ChatChunk:
        """See Format."""
        return ChatChunk(**self._head, choices=[], usage=usage)

    def whole(self, choices: list[tuple[str, FinishReason]], usage: Usage) -> ChatCompletion:
        """See Format."""
        return ChatCompletion(
            **{**self._head, "object": "chat.completion"},
            choices=[
                ChatChoice(
                    index=index,
                    message=AssistantMessage(role="assistant", content=text, refusal=None),
                    logprobs=None,
                    finish_reason=reason,
                )
                for index, (text, reason) in enumerate(choices)
            ],
            usage=usage,
        )

    def _chunk(
        self, index: int, delta: ChatDelta, reason: FinishReason | None, usage: Usage | None
    ) -> ChatChunk:
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=reason)
        known = {"usage": usage} if usage is not None else self._null_usage
        return ChatChunk(**self._head, choices=[choice], **known)


class TextFormat:
    """Of ``/v1/completions``."""

    def __init__(self, head: AnswerHead, include_usage: bool) -> None:
        self._head = {**head.model_dump(), "object": "text_completion"}
        self._null_usage = {"usage": None} if include_usage else {}

    def opening(self, index: int, usage: Usage | None) -> None:
        """None: the first chunk has text."""

    def chunk(self, piece: Piece, usage: Usage | None) -> TextCompletion:
        """The text."""
        choice = TextChoice(
            index=piece.index, text=piece.text, logprobs=None, finish_reason=piece.finish_reason
        )
        known = {"usage": usage} if usage is not None else self._null_usage
        return TextCompletion(**self._head, choices=[choice], **known)

    def usage(self, usage: Usage) -> TextCompletion:
        """See Format."""
        return TextCompletion(**self._head, choices=[], usage=usage)

    def whole(self, choices: list[tuple[str, FinishReason]], usage: Usage) -> TextCompletion:
        """See Format."""
        return TextCompletion(
            **self._head,
            choices=[
                TextChoice(index=index, text=text, logprobs=None, finish_reason=reason)
                for index, (text, reason) in enumerate(choices)
            ],
            usage=usage,
        )
