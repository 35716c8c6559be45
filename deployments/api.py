"""What the endpoints do: from a request's body to its answer."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from starlette.responses import Response

from deployments.admission import Admission, NoRoomError
from deployments.admitted import AdmittedGeneration, let_in, no_room
from deployments.answering import answer_events, whole_answer
from deployments.answers import Answer, AnswerRecord, format_of, record_of
from deployments.client import WorkerClient
from deployments.config import LimitSettings
from deployments.errors import ApiError, invalid
from deployments.event_ids import Position, parse_event_id
from deployments.formats import AnswerHead
from deployments.generation import ChoicePlan, Generation
from deployments.idempotency import Idempotency
from deployments.logprobs import logprobs_form
from deployments.messages import GenerateRequest, WorkerInfo
from deployments.metrics.request import note_generation
from deployments.prompts import PromptEncoder
from deployments.recovery import Recovery
from deployments.sampling import of_choice, prompt_only, sampling_params
from deployments.schema import ChatRequest, CompletionRequest, SamplingFields, parse_request
from deployments.scope import cache_scope
from deployments.security.guard import Caller
from deployments.sse import EventStream
from deployments.tools.parser import CallFormat
from deployments.tools.plan import plan_tools
from deployments.tools.transcript import Transcript
from deployments.tracing.request import current_trace
from specdec.params import CacheScope

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
        admission: Admission,
        retry_after_s: int,
        transcript: Transcript,
        call_format: CallFormat,
        recovery: Recovery | None = None,
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._prompts = PromptEncoder(tokenizer, info, limits.prompt_tokens)
        self._info = info
        self._limits = limits
        self._model_name = model_name
        self._fingerprint = fingerprint
        self._chat_logprobs = logprobs_form(tokenizer, chat=True)
        self._text_logprobs = logprobs_form(tokenizer, chat=False)
        self._admission = admission
        self._retry_after_s = retry_after_s
        self._transcript = transcript
        self._call_format = call_format
        self._recovery = recovery
        self._weights = "" if recovery is None else recovery.weights

    def check_room(self) -> None:
        """Turn a request away before its body is looked at, where it would have no chance.

        Raises:
            ApiError: 429, it would not.
        """
        try:
            self._admission.check()
        except NoRoomError as error:
            raise no_room(error, self._retry_after_s) from error

    async def chat(
        self, data: dict[str, Any], caller: Caller, once: Idempotency | None = None
    ) -> Response:
        """Answer ``POST /v1/chat/completions``.

        Args:
            data: the body.
            caller: who sent it.
            once: the key under which it is answered once.

        Raises:
            ApiError: any answer other than 200.
        """
        request = parse_request(ChatRequest, data)
        self._check(request, caller, prompts=1)
        plan = plan_tools(request, self._limits.tools)
        messages, tools = self._transcript.render(request.messages, plan.tools if plan else ())
        long = sum(len(message["content"]) for message in messages) > _LONG_TEXT
        tokens, shared = await self._prompts.encode(messages, long, "messages", tools)
        scope = cache_scope(caller.tenant, request.cache_salt, shared)
        current_trace().asked(messages)
        record = self._record(request, "chat", 1, caller, once, plan.several if plan else None)
        return await self._answer(request, record, [tokens], scope, caller, once)

    async def complete(
        self, data: dict[str, Any], caller: Caller, once: Idempotency | None = None
    ) -> Response:
        """Answer ``POST /v1/completions``; arguments as of :meth:`chat`.

        Raises:
            ApiError: any answer other than 200.
        """
        request = parse_request(CompletionRequest, data)
        self._check(request, caller, prompts=len(request.prompt))
        prompts = [
            (await self._prompts.encode(prompt, len(prompt) > _LONG_TEXT, "prompt"))[0]
            if isinstance(prompt, str)
            else self._prompts.known(prompt)
            for prompt in request.prompt
        ]
        scope = cache_scope(caller.tenant, request.cache_salt)
        current_trace().asked([{"role": "user", "content": text} for text in request.prompt])
        record = self._record(request, "text", len(prompts), caller, once)
        echoes = None
        if request.echo:
            echoes = [
                given if isinstance(given, str) else str(self._tokenizer.decode(given))
                for given in request.prompt
            ]
        return await self._answer(request, record, prompts, scope, caller, once, echoes)

    async def resume(self, last_event_id: str, caller: Caller) -> Response:
        """Go on with an answer behind an event that its client has.

        Raises:
            ApiError: any answer other than 200.
        """
        if self._recovery is None:
            raise invalid(
                "Last-Event-ID", "This server keeps no answers: its recovery.store is not set."
            )
        position = parse_event_id(last_event_id)
        answer = await self._recovery.resume(position, caller.tenant)
        return await self._run(answer, caller, position)

    def _check(self, request: SamplingFields, caller: Caller, prompts: int) -> None:
        if request.model != self._model_name:
            raise ApiError(
                404,
                f"The model {request.model!r:.200} is not served here; "
                f"this server has {self._model_name!r}.",
                param="model",
                code="model_not_found",
            )
        caller.check_model(request.model)
        n = 1 if request.n is None else request.n
        if n < 1:
            raise invalid("n", f"'n' must be at least 1, not {n}.")
        if n * prompts > self._limits.choices:
            raise invalid(
                "n" if prompts == 1 else "prompt",
                f"{prompts} prompts with {n} choices each are more than the "
                f"{self._limits.choices} choices that a request may ask for.",
            )

    def _record(
        self,
        request: SamplingFields,
        kind: Literal["chat", "text"],
        prompts: int,
        caller: Caller,
        once: Idempotency | None,
        several_calls: bool | None = None,
    ) -> AnswerRecord:
        prefix = "chatcmpl" if kind == "chat" else "cmpl"
        name = f"{prefix}-{uuid.uuid4().hex}"
        if once is not None and self._recovery is not None:
            name = once.answer_id(prefix, caller.tenant)
        head = AnswerHead(
            id=name,
            created=int(time.time()),
            model=self._model_name,
            system_fingerprint=self._fingerprint,
        )
        return record_of(
            request, head, kind, prompts, caller.tenant, once, self._weights, several_calls
        )

    async def _answer(
        self,
        request: SamplingFields,
        record: AnswerRecord,
        prompts: list[tuple[int, ...]],
        scope: CacheScope,
        caller: Caller,
        once: Idempotency | None,
        echoes: list[str] | None = None,
    ) -> Response:
        params = sampling_params(
            request, max(map(len, prompts)), self._info.max_model_length, self._limits
        )
        # what is told of tokens and prompts is in no checkpoint
        lasting = params.logprobs is None and echoes is None
        if once is not None and self._recovery is not None and not lasting:
            raise invalid(
                "Idempotency-Key", "An Idempotency-Key cannot be had with 'logprobs' or 'echo'."
            )
        texts: list[str] | list[None] = echoes or [None] * len(prompts)
        choices = [
            (prompt, echo, choice)
            for prompt, echo in zip(prompts, texts, strict=True)
            for choice in range(request.n or 1)
        ]
        head = record.head
        current_trace().requested(head.id, head.model, params, len(choices), bool(request.stream))
        plans = [
            ChoicePlan(
                GenerateRequest(record.request_id(index), prompt, of_choice(params, choice), scope),
                record.continues,
                echo=echo,
                prompt_only=prompt_only(request),
            )
            for index, (prompt, echo, choice) in enumerate(choices)
        ]
        answer, begin = Answer(record, tuple(plans)), False
        # of all others nobody could ever ask for the rest
        if self._recovery is not None and (request.stream or once) and lasting:
            answer, begin = self._recovery.ticketed(answer), once is None
            if once is not None:
                answer = await self._recovery.begin_once(answer)
        return await self._run(answer, caller, None, request, begin)

    async def _run(
        self,
        answer: Answer,
        caller: Caller,
        position: Position | None,
        request: SamplingFields | None = None,
        begin: bool = False,
    ) -> Response:
        """Have an answer generated and give it.

        Args:
            answer: new, or what there is of one.
            caller: who gets it.
            position: up to which it was sent.
            request: that asks for it; None where its rest is asked for.
            begin: whether its first checkpoints are yet to be written.
        """
        record, form = answer.record, format_of(answer.record, self._call_format)
        trace, recovery = current_trace(), self._recovery
        told = None
        if answer.plans[0].request.params.logprobs is not None:
            told = self._text_logprobs if record.kind == "text" else self._chat_logprobs
        carrier = trace.carrier()
        plans = [
            replace(plan, request=replace(plan.request, trace=carrier)) for plan in answer.plans
        ]
        admitted: AdmittedGeneration | None = None
        try:
            priority = (request.priority or 0) if request is not None else 0
            ticket = await let_in(self._admission, plans, caller, self._retry_after_s, priority)
            generation = Generation(plans, self._client, self._tokenizer, self._info.eos_token_ids)
            trace.watch(lambda: generation.usage)
            if request is not None:
                note_generation(record.head.id, request, generation)
            timeout_s = self._limits.request_timeout_s
            admitted = AdmittedGeneration(generation, ticket, caller, timeout_s)
            first = [recovery.begin(answer)] if recovery is not None and begin else []
            await asyncio.gather(admitted.start(), *first)
            if not record.stream:
                whole = await whole_answer(admitted, form, record.choices, told)
                await admitted.close()
                return whole
        except BaseException as error:
            if admitted is not None:
                await admitted.close()
            new = not any(plan.request.prior_tokens for plan in plans)
            if isinstance(error, ApiError) and recovery is not None and new:
                recovery.discard(answer)
            raise
        start = position or Position.start(record.head.id, record.choices)
        return EventStream(answer_events(admitted, form, record, start, told), admitted.close)
