"""The gateway's side of recovery: first checkpoints of answers, and answers from checkpoints."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from deployments.answers import (
    Answer,
    AnswerRecord,
    RequestRecord,
    read_answer,
    read_request,
)
from deployments.config import AppConfig, RecoverySettings
from deployments.errors import ApiError, conflict, invalid, unavailable
from deployments.event_ids import Position
from deployments.generation import ChoicePlan
from deployments.idempotency import in_progress, reused
from deployments.messages import GenerateRequest, Ticket
from deployments.progress import Progress
from prefix_cache.checkpoints.guarded import open_checkpoints
from prefix_cache.checkpoints.record import FIRST_FENCE, Checkpoint
from prefix_cache.checkpoints.store import CheckpointStore, Found
from prefix_cache.errors import (
    CheckpointTooLarge,
    LeaseHeldError,
    StoreConfigError,
    StoreError,
)
from specdec.errors import ConfigError

log = logging.getLogger("ray.serve")

ResultT = TypeVar("ResultT")

#: Calls to the store at the same time.
_CALLERS = 8
#: Tries to begin an answer whose key another has just let go of.
_TRIES = 3


class Recovery:
    """Calls the store in threads of its own. One that fails costs its deadline at most, and but
    for those who want the rest of an answer nobody hears of it.

    Args:
        store: closed with this.
        settings: deadlines and lease.
        weights: of the model served, see ``AppConfig.weights``; answers of others are not gone on
            with.
        retry_after_s: for clients that are turned away.
    """

    def __init__(
        self, store: CheckpointStore, settings: RecoverySettings, weights: str, retry_after_s: int
    ) -> None:
        assert settings.store is not None
        self.weights = weights
        self._store = store
        self._lease_s = settings.store.lease_s
        self._deadline_s = settings.store.read_deadline_ms / 1000
        self._retry_after_s = retry_after_s
        self._owner = f"gateway {socket.gethostname()} {os.getpid()} {uuid.uuid4().hex[:8]}"
        self._threads = ThreadPoolExecutor(_CALLERS, thread_name_prefix="recovery")

    @classmethod
    def open(cls, config: AppConfig) -> Recovery | None:
        """As the settings say; None where they name no store.

        Raises:
            ConfigError: they are wrong.
        """
        settings = config.recovery
        if settings.store is None:
            return None
        try:
            store = open_checkpoints(settings.store)
            return cls(store, settings, config.weights, config.gateway.retry_after_s)
        except StoreConfigError as error:
            raise ConfigError(f"recovery.store: {error}") from error

    def ticketed(self, answer: Answer) -> Answer:
        """With tickets, by which workers write checkpoints."""
        data = answer.record.model_dump_json().encode()
        return replace(
            answer,
            plans=tuple(
                replace(plan, request=_with_ticket(plan.request, FIRST_FENCE, data))
                for plan in answer.plans
            ),
        )

    async def begin(self, answer: Answer) -> None:
        """Write the first checkpoints of a new answer, so that it can be resumed from its first
        event on. Returns whatever comes of it.
        """
        try:
            await self._call(lambda: [self._create(plan) for plan in answer.plans])
        except (StoreError, CheckpointTooLarge) as error:
            log.debug("answer %s without a first checkpoint: %s", answer.record.head.id, error)

    async def begin_once(self, answer: Answer) -> Answer:
        """Begin an answer that must not be begun twice.

        Returns:
            The answer, or what there is of the first one of its key. Without a promise where the
            store cannot be asked: better twice than not at all.

        Raises:
            ApiError: 422, its key was used for something else; 409, somebody else has it now.
        """
        try:
            return await self._call(lambda: self._begin_once(answer))
        except (StoreError, CheckpointTooLarge) as error:
            log.warning("answer %s may be given twice: %s", answer.record.head.id, error)
            return without_tickets(answer)

    def discard(self, answer: Answer) -> None:
        """Remove the checkpoints of an answer that no worker took; returns at once."""

        def remove() -> None:
            try:
                for plan in answer.plans:
                    if plan.request.ticket is not None:
                        self._store.remove(
                            [plan.request.request_id], plan.request.ticket.fence, self._deadline_s
                        )
            except StoreError as error:
                log.debug("checkpoints left to their TTL: %s", error)

        self._threads.submit(remove)

    async def resume(self, position: Position, tenant: bytes) -> Answer:
        """Take over an answer; whoever had it loses it.

        Args:
            position: up to which the client has it.
            tenant: who asks.

        Raises:
            ApiError: 404, there is none of that id and tenant; 409, another connection has just
                taken it over, or the id is none that was sent; 503, the store cannot be asked.
        """
        try:
            return await self._call(lambda: self._resume(position, tenant))
        except ValueError as error:
            log.warning("answer %s: %s", position.answer_id, error)
            raise _gone() from error
        except StoreError as error:
            raise unavailable(
                "The store of answers cannot be reached; come again later.", self._retry_after_s
            ) from error

    def close(self) -> None:
        """Let go of the store."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._store.close()

    async def _call(self, function: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    def _create(self, plan: ChoicePlan) -> Checkpoint | None:
        request = plan.request
        assert request.ticket is not None
        checkpoint = Checkpoint(
            request_id=request.request_id,
            prompt=request.prompt_tokens,
            emitted=request.prior_tokens,
            request=request.ticket.request,
            answer=request.ticket.answer,
            owner=self._owner,
            written_at=time.time(),
        )
        return self._store.create(checkpoint, self._lease_s, self._deadline_s)

    def _begin_once(self, answer: Answer) -> Answer:
        for _ in range(_TRIES):
            plans: list[ChoicePlan] = []
            for plan in answer.plans:
                created = self._create(plan)
                if created is None:
                    break
                data = plan.request.ticket.answer if plan.request.ticket else b""
                request = _with_ticket(plan.request, created.fence, data)
                plans.append(replace(plan, request=request))
            if len(plans) == len(answer.plans):
                return replace(answer, plans=tuple(plans))
            found = self._store.get(answer.record.request_id(0), self._deadline_s)
            if found is not None:
                record = read_answer(found.checkpoint.answer)
                if record.body != answer.record.body:
                    raise reused()
                if found.lease_left_s > 0:
                    raise in_progress(self._retry_after_s)
                start = Position.start(record.head.id, record.choices)
                return self._taken(record, found, start)
        raise in_progress(self._retry_after_s)

    def _resume(self, position: Position, tenant: bytes) -> Answer:
        found = self._store.get(f"{position.answer_id}-0", self._deadline_s)
        record = None if found is None else read_answer(found.checkpoint.answer)
        if found is None or record is None or record.tenant != tenant.hex() or not record.stream:
            raise _gone()
        if len(position.cursors) != record.choices:
            raise invalid("Last-Event-ID", "Last-Event-ID is no event of this answer.")
        return self._taken(record, found, position)

    def _taken(self, record: AnswerRecord, first: Found, position: Position) -> Answer:
        """All choices of an answer, this gateway's from now on."""
        if record.weights != self.weights:
            raise conflict(
                "The answer is of a model that is not served any more.", "answer_differs"
            )
        plans: list[ChoicePlan] = []
        for index, cursor in enumerate(position.cursors):
            name = record.request_id(index)
            found = first if index == 0 else self._store.get(name, self._deadline_s)
            if found is None:
                raise _gone()
            try:
                fence = found.checkpoint.fence
                owned = self._store.claim(
                    name, self._owner, self._lease_s, self._deadline_s, supersede=fence
                )
            except LeaseHeldError as error:
                raise conflict(
                    "Another connection has just taken this answer over.",
                    "answer_taken_over",
                    self._retry_after_s,
                ) from error
            if owned is None:
                raise _gone()
            stored = read_request(owned.request)
            earlier = index - index % record.per_prompt  # of the same prompt, which counts once
            prompt = plans[earlier].request.prompt_tokens if earlier < index else owned.prompt
            request = GenerateRequest(
                name,
                tuple(prompt),
                stored.params,
                stored.scope,
                tuple(owned.emitted),
                ticket=Ticket(owned.fence, owned.request, owned.answer),
            )
            progress = Progress.decode(owned.progress)
            plans.append(ChoicePlan(request, record.continues, cursor, progress))
        return Answer(record, tuple(plans))


def without_tickets(answer: Answer) -> Answer:
    """An answer of which no checkpoints are written: its id may be another's in the store."""
    return replace(
        answer,
        plans=tuple(
            replace(plan, request=replace(plan.request, ticket=None)) for plan in answer.plans
        ),
    )


def _with_ticket(request: GenerateRequest, fence: int, answer: bytes) -> GenerateRequest:
    kept = RequestRecord.of(request).model_dump_json().encode()
    return replace(request, ticket=Ticket(fence, kept, answer))


def _gone() -> ApiError:
    return ApiError(
        404,
        "There is no such answer any more, or it is not yours.",
        param="Last-Event-ID",
        code="answer_not_found",
    )
