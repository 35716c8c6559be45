"""Answers that outlive their worker: what it has sent is kept, and another one goes on with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from deployments.attempt import Attempt
from deployments.errors import from_fault, internal, poisonous
from deployments.failover_policy import FailoverPolicy
from deployments.messages import Accepted, Alive, Event, Fault, GenerateRequest
from deployments.probation import CLEARED_AFTER, Turn
from deployments.tracing.request import current_trace
from specdec.outputs import RequestOutput

log = logging.getLogger("ray.serve")

#: Longest wait for an event before a stream looks around. Seconds.
_TICK_S = 0.5
#: A worker that dies later than this after it was taken out of service was stopped. One that just
#: died may also have been taken out before its streams hear of it. Seconds.
_STOPPED_S = 2.0


class TokenStream:
    """The outputs of one choice, whichever workers they come from. ``close`` it, whatever happens.

    No token comes twice and none is left out: an attempt begins with all tokens that came before
    it, and nothing of the attempts before is listened to any more.
    """

    def __init__(
        self,
        request: GenerateRequest,
        send: Callable[[GenerateRequest], Attempt],
        policy: FailoverPolicy,
    ) -> None:
        self._request = request
        self._send = send
        self._policy = policy
        self._tokens: list[int] = list(request.prior_tokens)
        self._ended = False
        self._turn: Turn | None = None
        self._suspect = False
        self._failures = 0  # in a row, without CLEARED_AFTER tokens between them
        self._detours = 0  # sendings that were nobody's fault, likewise
        self._lost_at: float | None = None  # since when no worker gives it tokens
        self._before = (0, 0)  # drafted and accepted by earlier attempts
        self._cached: int | None = None
        self._sent = request
        self._worker: str | None = None
        self._fresh = 0  # tokens of this attempt
        self._drafted = (0, 0)  # by this attempt, and accepted
        self._silent_s = 0.0
        self._attempt = send(request)

    async def accepted(self) -> None:
        """Wait until an engine has the request.

        Raises:
            ApiError: no worker takes it.
        """
        while not isinstance(await self._next(), Accepted):
            pass

    async def outputs(self) -> AsyncGenerator[RequestOutput]:
        """All outputs, the last one finished.

        Raises:
            ApiError: no worker could bring it to its end.
        """
        while not self._ended:
            event = await self._next()
            if isinstance(event, RequestOutput):
                yield event

    def close(self) -> None:
        """End the request in the engine if it still runs there."""
        self._ended = True
        self._leave_turn()
        self._attempt.close()

    async def _next(self) -> Event:
        """The next event that is no fault."""
        while True:
            event = await self._wait()
            if isinstance(event, RequestOutput):
                return self._enter(event)
            if not isinstance(event, Fault):
                return event
            try:
                await self._recover(event)
            except BaseException:
                self.close()
                raise

    async def _wait(self) -> Event:
        """The next event, or a fault where none comes or none is to be waited for."""
        while True:
            if self._is_due():
                return Fault("handover", "its worker stops")
            try:
                event = await self._attempt.next(_TICK_S)
            except TimeoutError:
                # not by the clock: while this process itself stands still, nobody is to blame
                self._silent_s += _TICK_S
                fault = self._silence()
                if fault is not None:
                    return fault
            else:
                self._silent_s = 0.0
                if isinstance(event, Alive) and event.worker:
                    self._worker = event.worker
                if not isinstance(event, Alive):
                    self._judge(event)
                    return event
                if self._turn is not None:
                    self._policy.probation.begin(self._turn)

    def _judge(self, event: Event) -> None:
        """Whether the worker is of use to others."""
        if self._worker is None:
            return
        if not isinstance(event, Fault):
            self._policy.fleet.serves(self._worker)
        elif event.kind in ("lost", "unavailable"):
            self._policy.fleet.avoid(self._worker)

    def _silence(self) -> Fault | None:
        """What it means that nothing comes, if it has lasted too long."""
        policy, silent = self._policy, self._silent_s
        waits = self._worker is None and not policy.fleet.usable()
        limit = policy.settings.recovery_timeout_s if waits else policy.settings.wedge_timeout_s
        if silent <= limit:
            return None
        if waits:
            return Fault("unavailable", "no worker could take the request in time")
        place = self._worker or policy.fleet.choice(self._sent.attempt_id)
        if place is not None:
            log.warning("worker %s gave no sign of life for %.0f s", place, silent)
            policy.fleet.avoid(place)
        return Fault("unavailable", "the worker gave no sign of life")

    def _is_due(self) -> bool:
        """Whether the worker is about to be stopped, and another is there."""
        policy, worker = self._policy, self._worker
        left = None if worker is None else policy.fleet.left(worker)
        if worker is None or left is None:
            return False
        return policy.clock() - left >= policy.handover_s and policy.fleet.others(worker)

    async def _recover(self, fault: Fault) -> None:
        """Send the request on after a fault.

        Raises:
            ApiError: it is of no use, or has been of none too often.
        """
        policy, resumed = self._policy, self._sent is not self._request
        name = self._request.request_id
        self._attempt.close()
        if self._ended:  # closed meanwhile: nobody listens
            raise internal(name)
        if fault.kind == "superseded":  # it is this stream that is too old
            raise from_fault(fault, name, policy.retry_after_s)
        if fault.kind in ("invalid", "too_long", "internal") and resumed:
            log.error("request %s cannot go on: %s", name, fault.message)
            raise internal(name)
        if fault.kind in ("invalid", "too_long", "internal") or (
            fault.kind == "busy" and not resumed
        ):
            raise from_fault(fault, name, policy.retry_after_s)
        left = None if self._worker is None else policy.fleet.left(self._worker)
        stopped = left is not None and policy.clock() - left > _STOPPED_S
        alone = self._turn is not None and self._turn.alone
        if fault.kind == "lost" and not stopped and alone:
            log.error("request %s is given up: two workers in a row died with it", name)
            policy.counted("poisonous")
            raise poisonous(name)
        self._leave_turn()
        free = stopped or fault.kind in ("handover", "busy")
        # also where Ray does not yet know of a death, and only finds nobody there
        self._suspect = self._suspect or not free
        self._count_failure(fault, free)
        if fault.kind != "busy":
            done = len(self._tokens)
            log.warning(
                "request %s goes on elsewhere after %d tokens: %s", name, done, fault.message
            )
            policy.counted("handover" if free else "resumed")
            current_trace().recovered(self._sent.attempt + 1, done)
        if self._failures or self._detours:
            await asyncio.sleep(policy.backoff.wait_s(self._failures + self._detours))
        if self._suspect:
            await self._take_turn(fault)
        if self._ended:
            raise internal(name)
        self._before = (self._before[0] + self._drafted[0], self._before[1] + self._drafted[1])
        prior, attempt = tuple(self._tokens), self._sent.attempt + 1
        self._sent = replace(self._request, prior_tokens=prior, attempt=attempt)
        self._worker, self._fresh, self._drafted = None, 0, (0, 0)
        self._silent_s = 0.0
        self._attempt = self._send(self._sent)

    async def _take_turn(self, fault: Fault) -> None:
        """Raises:
        ApiError: it did not come in time.
        """
        waited = self._policy.clock() - (self._lost_at or 0.0)
        try:
            async with asyncio.timeout(self._policy.settings.recovery_timeout_s - waited):
                self._turn = await self._policy.probation.enter()
        except TimeoutError:
            self._policy.counted("failed")
            raise from_fault(fault, self._request.request_id, self._policy.retry_after_s) from None

    def _count_failure(self, fault: Fault, free: bool) -> None:
        """Raises:
        ApiError: there were too many.
        """
        policy, now = self._policy, self._policy.clock()
        if self._lost_at is None:
            self._lost_at = now
        if free:
            self._detours += 1
        else:
            self._failures += 1
        given_up = (
            self._failures > policy.settings.retries
            or now - self._lost_at > policy.settings.recovery_timeout_s
            or not (free or policy.budget.take())
        )
        if given_up:
            policy.counted("failed")
            raise from_fault(fault, self._request.request_id, policy.retry_after_s)

    def _enter(self, output: RequestOutput) -> RequestOutput:
        """Take an output; returns it with the counts of all attempts."""
        self._tokens += output.new_tokens
        self._fresh += len(output.new_tokens)
        self._lost_at = None
        if self._fresh >= CLEARED_AFTER or output.finished:
            self._leave_turn()
            self._suspect = False
            self._failures = self._detours = 0
        if output.finished:
            self._ended = True
            self._attempt.end()
        if self._cached is None:
            self._cached = output.cached_tokens
        self._drafted = output.drafted, output.accepted
        drafted = self._before[0] + output.drafted
        accepted = self._before[1] + output.accepted
        stats = output.stats and replace(
            output.stats, drafted=drafted, accepted=accepted, cached_tokens=self._cached
        )
        return replace(
            output, drafted=drafted, accepted=accepted, cached_tokens=self._cached, stats=stats
        )

    def _leave_turn(self) -> None:
        if self._turn is not None:
            self._policy.probation.leave(self._turn)
            self._turn = None
