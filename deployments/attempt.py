"""One sending of a request to a worker; Ray's errors as faults."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ray.exceptions import ActorDiedError, RayError, TaskCancelledError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
)

from deployments.messages import Event, Fault, FaultKind

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentResponseGenerator

log = logging.getLogger("ray.serve")


class Attempt:
    """The events of one sending, as long as anybody wants them. ``close`` it, whatever happens."""

    def __init__(self, responses: DeploymentResponseGenerator[Event]) -> None:
        self._responses = responses
        self._pending: asyncio.Task[Event] | None = None
        self._ended = False

    async def next(self, timeout_s: float) -> Event:
        """The next event; whatever goes wrong is a Fault, and the last one.

        Raises:
            TimeoutError: none came; the next call waits for the same one.
        """
        if self._pending is None:
            self._pending = asyncio.create_task(self._receive())
        done, _ = await asyncio.wait({self._pending}, timeout=timeout_s)
        if not done:
            raise TimeoutError
        event, self._pending = self._pending.result(), None
        self._ended = self._ended or isinstance(event, Fault)
        return event

    def end(self) -> None:
        """Note that all events have come."""
        self._ended = True

    def close(self) -> None:
        """End the request in the engine if it still runs there. What it yet sends goes nowhere."""
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        if not self._ended:
            self._ended = True
            self._responses.cancel()  # type: ignore[no-untyped-call]

    async def _receive(self) -> Event:
        try:
            return await anext(self._responses)
        except TaskCancelledError as error:
            # Serve ends all calls of a client that has left: its answer ends, and goes nowhere else
            raise asyncio.CancelledError from error
        except StopAsyncIteration:
            return Fault("lost", "the worker ended the answer before its end")
        except (RayError, RayServeException) as error:
            return fault_of(error)


def fault_of(error: Exception) -> Fault:
    """What an error of Ray means for a request."""
    if isinstance(error, BackPressureError):
        return Fault("busy", "too many requests wait for a worker")
    if isinstance(error, DeploymentUnavailableError):
        return Fault("unavailable", "no worker could be started")
    log.warning("a worker failed: %s: %s", type(error).__name__, error)
    # where the engine is an actor of its own, its death comes as a RayTaskError that is one too
    kind: FaultKind = "lost" if isinstance(error, ActorDiedError) else "unavailable"
    return Fault(kind, "the worker failed; the request may be sent again")
