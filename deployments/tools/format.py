"""The form of a chat's answer whose text may hold calls."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace

from pydantic import BaseModel

from deployments.formats import ChatFormat
from deployments.generation import Piece
from deployments.responses import CalledFunction, ChatChunk, FinishReason, ToolCall, Usage
from deployments.tools.parsed import CallDelta, Parsed
from deployments.tools.parser import ToolParser


class ToolFormat:
    """A ``ChatFormat`` that takes the calls out of the text."""

    def __init__(self, chat: ChatFormat, make_parser: Callable[[], ToolParser]) -> None:
        """Args:
        chat: form of everything else.
        make_parser: for one choice.
        """
        self._chat = chat
        self._make_parser = make_parser
        self._parsers: dict[int, ToolParser] = {}

    def opening(self, index: int, usage: Usage | None) -> ChatChunk:
        """See Format."""
        return self._chat.opening(index, usage)

    def chunk(self, piece: Piece, usage: Usage | None) -> ChatChunk:
        """The text and what became known of calls as a delta, which may be empty."""
        parser = self._parsers.setdefault(piece.index, self._make_parser())
        found = [parser.add(piece.text)]
        if piece.finish_reason is not None:
            found.append(parser.finish(piece.finish_reason == "length"))
        parsed = _joined(found)
        reason = _reason(piece.finish_reason, parser)
        chunk = self._chat.chunk(replace(piece, text=parsed.content, finish_reason=reason), usage)
        if parsed.deltas:
            delta = chunk.choices[0].delta
            delta.tool_calls = [_streamed(call) for call in parsed.deltas.values()]
        return chunk

    def usage(self, usage: Usage) -> ChatChunk:
        """See Format."""
        return self._chat.usage(usage)

    def whole(self, choices: list[tuple[str, FinishReason]], usage: Usage) -> BaseModel:
        """See Format."""
        parsed: list[Parsed] = []
        told: list[tuple[str, FinishReason]] = []
        for text, reason in choices:
            parser = self._make_parser()
            parsed.append(_joined([parser.add(text), parser.finish(reason == "length")]))
            told.append((parsed[-1].content, _reason(reason, parser) or reason))
        answer = self._chat.whole(told, usage)
        for choice, found in zip(answer.choices, parsed, strict=True):
            if found.deltas:
                choice.message.content = found.content or None
                choice.message.tool_calls = [_whole(call) for call in found.deltas.values()]
        return answer


def _joined(found: list[Parsed]) -> Parsed:
    whole = Parsed()
    for part in found:
        whole.content += part.content
        for call in part.deltas.values():
            whole.call(call.index, call.name, call.arguments)
    return whole


def _reason(reason: FinishReason | None, parser: ToolParser) -> FinishReason | None:
    return "tool_calls" if reason == "stop" and parser.calls else reason


def _streamed(call: CallDelta) -> ToolCall:
    if call.name is None:
        return ToolCall(index=call.index, function=CalledFunction(arguments=call.arguments))
    return ToolCall(
        index=call.index,
        id=_call_id(),
        type="function",
        function=CalledFunction(name=call.name, arguments=call.arguments),
    )


def _whole(call: CallDelta) -> ToolCall:
    function = CalledFunction(name=call.name, arguments=call.arguments)
    return ToolCall(id=_call_id(), type="function", function=function)


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
