"""What the endpoints do: from a request's body to its answer."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response

from deployments.client import WorkerClient
from deployments.config import LimitSettings
from deployments.errors import ApiError, from_request_error, internal, invalid, log
from deployments.formats import AnswerHead, ChatFormat, Format, TextFormat
from deployments.generation import ChoicePlan, Generation
from deployments.messages import GenerateRequest, WorkerInfo
from deployments.responses import FinishReason, Usage
from deployments.sampling import of_choice, sampling_params
from deployments.schema import ChatRequest, CompletionRequest, SamplingFields, parse_request
from deployments.sse import DONE, EventStream, event
from specdec.chat import encode_prompt
from specdec.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Longer texts are tokenized beside the event loop.
_LONG_TEXT = 10_000


class CompletionApi:
    """Chats and completions with one model."""

    def __init__(
        self,
        client: WorkerClient,
        tokenizer: PreTrainedTokenizerBase,
        info: WorkerInfo,
        limits: LimitSettings,
        model_name: str,
        fingerprint: str,
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._info = info
        self._limits = limits
        self._model_name = model_name
        self._fingerprint = fingerprint

    async def chat(self, data: dict[str, Any]) -> Response:
        """Answer ``POST /v1/chat/completions``.

        Raises:
            ApiError: any answer other than 200.
        """
        request = parse_request(ChatRequest, data)
        self._check(request, prompts=1)
        messages = [
            {
                "role": "system" if message.role == "developer" else message.role,
                "content": message.content,
                **({} if message.name is None else {"name": message.name}),
            }
            for message in request.messages
        ]
        long = sum(len(message.content) for message in request.messages) > _LONG_TEXT
        tokens = await self._encode(messages, long, "messages")
        head = self._head("chatcmpl")
        return await self._answer(
            request, head, ChatFormat(head, _include_usage(request)), [tokens], continues=False
        )

    async def complete(self, data: dict[str, Any]) -> Response:
        """Answer ``POST /v1/completions``.

        Raises:
            ApiError: any answer other than 200.
        """
        request = parse_request(CompletionRequest, data)
        self._check(request, prompts=len(request.prompt))
        prompts = [
            await self._encode(prompt, len(prompt) > _LONG_TEXT, "prompt")
            if isinstance(prompt, str)
            else tuple(prompt)
            for prompt in request.prompt
        ]
        head = self._head("cmpl")
        return await self._answer(
            request, head, TextFormat(head, _include_usage(request)), prompts, continues=True
        )

    def _check(self, request: SamplingFields, prompts: int) -> None:
        if request.model != self._model_name:
            raise ApiError(
                404,
                f"The model {request.model!r:.200} is not served here; "
                f"this server has {self._model_name!r}.",
                param="model",
                code="model_not_found",
            )
        n = 1 if request.n is None else request.n
        if n < 1:
            raise invalid("n", f"'n' must be at least 1, not {n}.")
        if n * prompts > self._limits.choices:
            raise invalid(
                "n" if prompts == 1 else "prompt",
                f"{prompts} prompts with {n} choices each are more than the "
                f"{self._limits.choices} choices that a request may ask for.",
            )

    async def _encode(
        self, prompt: str | list[dict[str, str]], long: bool, param: str
    ) -> tuple[int, ...]:
        try:
            if long:
                tokens = await asyncio.to_thread(encode_prompt, self._tokenizer, prompt)
            else:
                tokens = encode_prompt(self._tokenizer, prompt)
        except RequestError as error:
            raise from_request_error(error) from error
        if not tokens:
            raise invalid(param, f"'{param}' is empty.")
        return tuple(tokens)

    def _head(self, prefix: str) -> AnswerHead:
        return AnswerHead(
            id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self._model_name,
            system_fingerprint=self._fingerprint,
        )

    async def _answer(
        self,
        request: SamplingFields,
        head: AnswerHead,
        form: Format,
        prompts: list[tuple[int, ...]],
        continues: bool,
    ) -> Response:
        params = sampling_params(
            request, max(map(len, prompts)), self._info.max_model_length, self._limits
        )
        choices = [(prompt, choice) for prompt in prompts for choice in range(request.n or 1)]
        plans = [
            ChoicePlan(
                GenerateRequest(f"{head.id}-{index}", prompt, of_choice(params, choice)), continues
            )
            for index, (prompt, choice) in enumerate(choices)
        ]
        generation = Generation(plans, self._client, self._tokenizer, self._info.eos_token_ids)
        try:
            await generation.start()
            if not request.stream:
                return await _whole(generation, form, len(plans))
        except BaseException:
            await generation.close()
            raise
        usage = _UsageWanted(
            _include_usage(request),
            request.stream_options is not None
            and bool(request.stream_options.continuous_usage_stats),
        )
        return EventStream(_events(generation, form, len(plans), usage, head.id), generation.close)


@dataclass(frozen=True)
class _UsageWanted:
    """Where a stream tells the usage: at its end, and if there, also in every chunk."""

    at_end: bool
    always: bool


def _include_usage(request: SamplingFields) -> bool:
    return request.stream_options is not None and bool(request.stream_options.include_usage)


async def _whole(generation: Generation, form: Format, count: int) -> Response:
    texts: list[list[str]] = [[] for _ in range(count)]
    reasons: list[FinishReason] = ["stop"] * count
    async with aclosing(generation.pieces()) as pieces:
        async for piece in pieces:
            texts[piece.index].append(piece.text)
            if piece.finish_reason is not None:
                reasons[piece.index] = piece.finish_reason
    choices = list(zip(map("".join, texts), reasons, strict=True))
    body = form.whole(choices, generation.usage)
    return JSONResponse(body.model_dump(mode="json", exclude_unset=True))


async def _events(
    generation: Generation, form: Format, count: int, wanted: _UsageWanted, request_id: str
) -> AsyncGenerator[bytes]:
    """Chunks, then ``[DONE]``; after an error its event, and nothing more."""

    def running() -> Usage | None:
        return generation.usage if wanted.at_end and wanted.always else None

    try:
        for index in range(count):
            opening = form.opening(index, running())
            if opening is not None:
                yield event(opening)
        async with aclosing(generation.pieces()) as pieces:
            async for piece in pieces:
                yield event(form.chunk(piece, running()))
        if wanted.at_end:
            yield event(form.usage(generation.usage))
        yield DONE
    except ApiError as error:
        yield event(error.body())
    except Exception:  # the status is sent: nothing further out can answer  # noqa: BLE001
        log.exception("request %s failed while it was streamed", request_id)
        yield event(internal(request_id).body())
