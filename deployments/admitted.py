"""A generation that was let in: bounded in time, counted for its caller, and let out at its end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from deployments.admission import Admission, Need, NoRoomError, Ticket
from deployments.errors import ApiError
from deployments.generation import ChoicePlan, Generation, Piece
from deployments.responses import Usage
from deployments.security.guard import Caller

#: After a deadline, for an answer to end in good order before its place is taken away. Seconds.
_GRACE_S = 5.0
#: Longest time to come again that a client is told, however slow the server was lately. Seconds.
_LONGEST_RETRY_S = 60.0


class AdmittedGeneration:
    """A ``Generation`` with a deadline. ``close`` it in any case.

    Attributes:
        trace: of the request.
    """

    def __init__(
        self, generation: Generation, ticket: Ticket, caller: Caller, timeout_s: float
    ) -> None:
        self.trace = generation.trace
        self._generation = generation
        self._ticket = ticket
        self._caller = caller
        self._timeout_s = timeout_s
        loop = asyncio.get_running_loop()
        self._deadline = loop.time() + timeout_s
        # A client that does not read keeps a stream from noticing its deadline by itself.
        self._timer = loop.call_at(self._deadline + _GRACE_S, self._expire)
        self._closing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """See Generation.

        Raises:
            ApiError: a worker refused a choice, or the deadline has passed.
        """
        try:
            async with asyncio.timeout_at(self._deadline):
                await self._generation.start()
        except TimeoutError as error:
            raise self._too_late() from error

    async def pieces(self) -> AsyncGenerator[Piece]:
        """See Generation.

        Raises:
            ApiError: a worker gave up, or the deadline has passed.
        """
        async with aclosing(self._generation.pieces()) as pieces:
            while True:
                try:
                    async with asyncio.timeout_at(self._deadline):
                        piece = await anext(pieces)
                except StopAsyncIteration:
                    return
                except TimeoutError as error:
                    raise self._too_late() from error
                yield piece

    async def close(self) -> None:
        """End what still runs, and let somebody else in."""
        self._timer.cancel()
        try:
            await self._generation.close()
        finally:
            self._caller.spent(self.usage.total_tokens)
            self._ticket.release()

    @property
    def resumable(self) -> bool:
        """See Generation."""
        return self._generation.resumable

    @property
    def usage(self) -> Usage:
        """Tokens up to now."""
        return self._generation.usage

    def _expire(self) -> None:
        self._closing = asyncio.create_task(self.close())

    def _too_late(self) -> ApiError:
        return ApiError(
            408,
            f"The answer was not complete within {self._timeout_s:g} s.",
            kind="server_error",
            code="request_timeout",
            headers={"x-should-retry": "false"},
        )


async def let_in(
    admission: Admission,
    plans: Sequence[ChoicePlan],
    caller: Caller,
    retry_after_s: int,
    priority: int = 0,
) -> Ticket:
    """Wait until the choices of a request may start; those of a lower ``priority`` come first.

    Raises:
        ApiError: 429 or 503, with the time to come again.
    """
    prompts = {id(plan.request.prompt_tokens): plan.request.prompt_tokens for plan in plans}
    tokens = sum(map(len, prompts.values()))
    tokens += sum(plan.request.params.max_tokens for plan in plans)
    caller.reserve(tokens)
    try:
        return await admission.admit(Need(len(plans), tokens), priority)
    except NoRoomError as error:
        raise no_room(error, retry_after_s) from error


def no_room(error: NoRoomError, retry_after_s: int) -> ApiError:
    """The answer to a request that was turned away."""
    told = min(error.retry_s or 0.0, _LONGEST_RETRY_S)
    seconds = max(retry_after_s, told)
    headers = {"Retry-After": str(math.ceil(seconds))}
    message = f"The server is at its limit ({error}); come again later."
    if error.waited:
        return ApiError(
            503, message, kind="server_error", code="service_unavailable", headers=headers
        )
    return ApiError(
        429, message, kind="rate_limit_error", code="server_overloaded", headers=headers
    )
