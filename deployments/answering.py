"""From what is generated to the body of an answer, whole or as a stream of events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from deployments.admitted import AdmittedGeneration
from deployments.answers import AnswerRecord
from deployments.errors import ApiError, internal, log
from deployments.event_ids import Cursor, Position
from deployments.formats import Format
from deployments.logprobs import LogprobsForm, PlacedLogprobs, attach
from deployments.metrics.request import note_error
from deployments.responses import FinishReason, Usage
from deployments.sse import DONE, event


async def whole_answer(
    generation: AdmittedGeneration, form: Format, count: int, told: LogprobsForm | None
) -> Response:
    """All choices in one body.

    Raises:
        ApiError: a worker gave up.
    """
    texts: list[list[str]] = [[] for _ in range(count)]
    logprobs: list[list[PlacedLogprobs]] = [[] for _ in range(count)]
    reasons: list[FinishReason] = ["stop"] * count
    async with aclosing(generation.pieces()) as pieces:
        async for piece in pieces:
            texts[piece.index].append(piece.text)
            logprobs[piece.index] += piece.logprobs
            if piece.finish_reason is not None:
                reasons[piece.index] = piece.finish_reason
    choices = list(zip(map("".join, texts), reasons, strict=True))
    body = form.whole(choices, generation.usage)
    if told is not None:
        for index, entries in enumerate(logprobs):
            attach(body, index, entries, told)
    return JSONResponse(body.model_dump(mode="json", exclude_unset=True))


async def answer_events(
    generation: AdmittedGeneration,
    form: Format,
    record: AnswerRecord,
    position: Position,
    told: LogprobsForm | None,
) -> AsyncGenerator[bytes]:
    """Chunks from a position on, then ``[DONE]``; after an error its event, and nothing more."""

    def running() -> Usage | None:
        return generation.usage if record.include_usage and record.continuous_usage else None

    def chunk(data: BaseModel) -> bytes:
        return event(data, position.encode() if generation.resumable else None)

    try:
        for index, cursor in enumerate(position.cursors):
            opening = None if cursor.opened else form.opening(index, running())
            if opening is not None:
                position = position.moved(index, Cursor(opened=True))
                yield chunk(opening)
        async with aclosing(generation.pieces()) as pieces:
            async for piece in pieces:
                # also of what was sent: it may hold half a call
                body = form.chunk(piece, running())
                if told is not None and piece.logprobs:
                    attach(body, 0, piece.logprobs, told)
                if not piece.sent:
                    position = position.moved(piece.index, piece.cursor)
                    yield chunk(body)
        if record.include_usage and not position.usage_sent:
            position = replace(position, usage_sent=True)
            yield chunk(form.usage(generation.usage))
        yield DONE
    except ApiError as error:
        generation.trace.failed(error.code or error.kind)
        note_error(error)
        yield event(error.body())
    except Exception as error:  # the status is sent: nothing further out can answer  # noqa: BLE001
        generation.trace.failed(type(error).__name__)
        log.exception("request %s failed while it was streamed", record.head.id)
        note_error(internal(record.head.id))
        yield event(internal(record.head.id).body())
