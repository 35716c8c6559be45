"""The gateway's way to the workers."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.attempt import Attempt, fault_of
from deployments.config import AppConfig
from deployments.errors import from_fault
from deployments.failover import TokenStream
from deployments.failover_policy import FailoverPolicy
from deployments.messages import GenerateRequest, IntegrityReport, WorkerInfo
from deployments.metrics import table
from deployments.metrics.recorder import Recorder

if TYPE_CHECKING:
    from deployments.worker import Worker

log = logging.getLogger("ray.serve")

_ASK_AGAIN_S = 10.0


class WorkerClient:
    """Talks to the workers through their deployment's handle.

    Args:
        handle: of the deployment.
        config: of the application.
        recorder: counts what was sent again.
    """

    def __init__(
        self, handle: DeploymentHandle[Worker], config: AppConfig, recorder: Recorder
    ) -> None:
        self._handle = handle
        self._streams = handle.options(stream=True)
        self._weights = config.weights
        self._retry_after_s = config.gateway.retry_after_s
        settings = config.gateway.failover
        self._failover = FailoverPolicy(
            settings,
            max(0.0, config.worker.graceful_shutdown_timeout_s - settings.handover_margin_s),
            self._retry_after_s,
            counted=lambda outcome: recorder.add(table.RECOVERIES, 1, outcome),
        )

    def start(self, request: GenerateRequest) -> TokenStream:
        """Send a choice to a worker. Await ``accepted`` of the stream next."""
        return TokenStream(replace(request, model=self._weights), self._send, self._failover)

    def workers_ready(self) -> frozenset[str]:
        """Workers that take requests, as far as this gateway knows; with none it is not ready.

        It asks nobody, so that it may be called as often as one likes.
        """
        return self._failover.fleet.usable()

    def _send(self, request: GenerateRequest) -> Attempt:
        responses: Any = self._streams.generate.remote(request)
        return Attempt(responses)

    async def info(self) -> WorkerInfo:
        """The model that the workers serve."""
        info: WorkerInfo = await self._handle.info.remote()
        return info

    async def first_info(self) -> WorkerInfo:
        """The same at the start, for as long as it takes until a worker is ready.

        Asked anew from time to time: a question to a worker whose node is lost, before Ray knows
        it, may never be answered.
        """
        while True:
            try:
                return await asyncio.wait_for(self.info(), _ASK_AGAIN_S)
            except TimeoutError:
                log.info("no worker has answered within %g s; asked again", _ASK_AGAIN_S)

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
