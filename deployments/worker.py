"""The worker: one engine behind a Ray Serve deployment. Tokens in, tokens out."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from deployments.config import AppConfig
from deployments.engine_thread import EngineThread
from deployments.messages import Event, GenerateRequest, IntegrityReport, WorkerInfo
from specdec.config import EngineSettings
from specdec.errors import IntegrityError

if TYPE_CHECKING:
    from specdec.engine import Engine

log = logging.getLogger("ray.serve")


class Worker:
    """Loads the model when made; from then on the engine thread does the work."""

    def __init__(self, config: AppConfig) -> None:
        """Raises:
        ModelError: the model cannot be found, loaded or served right.
        """
        began = time.monotonic()
        from specdec.engine import Engine  # imports torch, which nobody else needs to wait for

        engine = Engine.from_settings(with_all_threads(config.engine))
        self._info = WorkerInfo(engine.max_model_length, frozenset(engine.runner.eos_token_ids))
        self._thread = EngineThread(engine, config.worker.stall_timeout_s)
        log.info("engine ready after %.1f s: %s", time.monotonic() - began, config.engine.model)

    async def info(self) -> WorkerInfo:
        """What the gateway needs to know of the model."""
        return self._info

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event]:
        """The events of a request, see messages.Event. Ends in the engine with its caller."""
        async with aclosing(self._thread.generate(request)) as events:
            async for event in events:
                yield event

    async def integrity(self) -> IntegrityReport:
        """Check that pages and owners agree, between two steps.

        Raises:
            EngineDownError: there is no engine any more.
        """
        return await self._thread.call(inspect)

    def check_health(self) -> None:
        """Raises:
        EngineDownError: the engine has failed or hangs; Ray Serve replaces this replica.
        """
        self._thread.check()

    def __del__(self) -> None:
        thread = getattr(self, "_thread", None)
        if thread is not None:
            thread.close()


def inspect(engine: Engine, open_requests: int) -> IntegrityReport:
    """The engine's state after its own check."""
    problem: str | None = None
    try:
        engine.check_integrity()
    except IntegrityError as error:
        problem = str(error)
    return IntegrityReport(
        problem, open_requests, engine.pages_in_use, engine.has_work, engine.stats
    )


def with_all_threads(settings: EngineSettings) -> EngineSettings:
    """Spell out the number of CPU threads where the settings leave it open.

    Ray sets OMP_NUM_THREADS to the CPUs that it has set aside, and a fraction becomes 1, so
    that torch's own choice would be a single thread.
    """
    if settings.threads is not None:
        return settings
    return settings.model_copy(update={"threads": len(os.sched_getaffinity(0))})
