"""The gateway's way to a worker: tokens of one choice as they come, Ray's errors as ours."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
)
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from deployments.errors import from_fault
from deployments.messages import (
    Event,
    Fault,
    GenerateRequest,
    IntegrityReport,
    WorkerInfo,
)
from specdec.outputs import RequestOutput

if TYPE_CHECKING:
    from deployments.worker import Worker

log = logging.getLogger("ray.serve")


class TokenStream:
    """The outputs of one accepted choice. ``close`` it, whatever happens."""

    def __init__(
        self, responses: DeploymentResponseGenerator[Event], request_id: str, retry_after_s: int
    ) -> None:
        self._responses = responses
        self._request_id = request_id
        self._retry_after_s = retry_after_s
        self._ended = False

    async def accepted(self) -> None:
        """Wait until the engine has the request.

        Raises:
            ApiError: no worker takes it.
        """
        await self._next()

    async def outputs(self) -> AsyncGenerator[RequestOutput]:
        """All outputs, the last one finished.

        Raises:
            ApiError: the worker gave up.
        """
        while not self._ended:
            event = await self._next()
            if isinstance(event, RequestOutput):
                self._ended = event.finished
                yield event

    def close(self) -> None:
        """End the request in the engine if it still runs there."""
        if not self._ended:
            self._ended = True
            self._responses.cancel()  # type: ignore[no-untyped-call]

    async def _next(self) -> Event:
        event: Event
        try:
            event = await anext(self._responses)
        except StopAsyncIteration:
            event = Fault("unavailable", "the worker ended the answer before its end")
        except (RayError, RayServeException) as error:
            event = fault_of(error)
        if isinstance(event, Fault):
            self._ended = True
            raise from_fault(event, self._request_id, self._retry_after_s)
        return event


class WorkerClient:
    """Talks to the workers through their deployment's handle."""

    def __init__(self, handle: DeploymentHandle[Worker], retry_after_s: int) -> None:
        self._handle = handle
        self._streams = handle.options(stream=True)
        self._retry_after_s = retry_after_s

    def start(self, request: GenerateRequest) -> TokenStream:
        """Send a choice to a worker. Await ``accepted`` of the stream next."""
        responses: Any = self._streams.generate.remote(request)
        return TokenStream(responses, request.request_id, self._retry_after_s)

    async def info(self) -> WorkerInfo:
        """The model that the workers serve."""
        info: WorkerInfo = await self._handle.info.remote()
        return info

    async def integrity(self) -> IntegrityReport:
        """The insides of one worker.

        Raises:
            ApiError: 503 where there is no live worker.
        """
        try:
            report: IntegrityReport = await self._handle.integrity.remote()
        except (RayError, RayServeException) as error:
            raise from_fault(fault_of(error), "integrity", self._retry_after_s) from error
        return report


def fault_of(error: Exception) -> Fault:
    """What an error of Ray means for a request."""
    if isinstance(error, BackPressureError):
        return Fault("busy", "too many requests wait for a worker")
    if isinstance(error, DeploymentUnavailableError):
        return Fault("unavailable", "no worker could be started")
    log.warning("a worker failed: %s: %s", type(error).__name__, error)
    return Fault("unavailable", "the worker failed; the request may be sent again")
