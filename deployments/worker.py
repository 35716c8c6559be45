"""The worker: one engine behind a Ray Serve deployment. Tokens in, tokens out."""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from ray import serve

from deployments.affinity import MOST_BLOCKS, RoutingStats, summary_of
from deployments.autoscaling import ScalingStats, scaling_stats
from deployments.checkpointing import Checkpointer
from deployments.config import AppConfig, RecoverySettings
from deployments.engine_thread import EngineDownError, EngineThread
from deployments.health import ErrorStorm
from deployments.messages import (
    Alive,
    Event,
    Fault,
    GenerateRequest,
    IntegrityReport,
    WorkerInfo,
)
from deployments.metrics import table
from deployments.metrics.engine_watch import EngineWatch
from deployments.metrics.recorder import Recorder
from deployments.metrics.start import start_publisher
from deployments.tracing.setup import Tracing
from prefix_cache.checkpoints.guarded import open_checkpoints
from prefix_cache.errors import StoreConfigError
from specdec.config import EngineSettings
from specdec.errors import ConfigError, IntegrityError, RequestError, SpecdecError

if TYPE_CHECKING:
    from specdec.engine import Engine

log = logging.getLogger("ray.serve")


class Worker:
    """Loads the model when made; from then on the engine thread does the work."""

    def __init__(self, config: AppConfig) -> None:
        """Raises:
        ModelError: the model cannot be found, loaded or served right.
        ConfigError: a system prompt cannot be read or computed.
        """
        began = time.monotonic()
        # they import torch, which nobody else needs to wait for
        from specdec.engine import Engine
        from specdec.warm import read_system_prompts, warm

        engine = Engine.from_settings(with_all_threads(config.engine))
        paths = config.engine.prefix_cache.system_prompts
        for path, text in zip(paths, read_system_prompts(paths), strict=True):
            try:
                done = warm(engine, text)
            except SpecdecError as error:
                raise ConfigError(f"prefix_cache.system_prompts: {path}: {error}") from error
            log.info("%s: %d tokens, %d of them found", path, done.tokens, done.cached)
        self._tracing = Tracing(config.traces, "worker")
        engine.observer = self._tracing.observer()
        runner, pages = engine.runner, engine.scheduler.allocator
        self._info = WorkerInfo(
            engine.max_model_length,
            frozenset(runner.eos_token_ids),
            runner.vocab_size,
            pages.num_pages * pages.page_size,
        )
        self._weights = config.weights
        self._name = serve.get_replica_context().replica_id.unique_id
        failover = config.worker.failover
        self.recorder = Recorder(config.metrics.enabled)
        self._watch = EngineWatch(self.recorder)
        self._thread = EngineThread(
            engine,
            config.worker.stall_timeout_s,
            after_step=self._watch.after_step,
            heartbeat_s=failover.heartbeat_s,
            storm=ErrorStorm(failover.failed_requests),
        )
        self._checkpoints = open_checkpointer(config.recovery, self._thread)
        self._publisher = start_publisher(
            config.metrics, self.recorder, "worker", config.model_name, self._read_figures
        )
        try:
            engine.grammars.prepare()
        except RequestError as error:
            log.warning("requests with grammars will be refused: %s", error)
        log.info("engine ready after %.1f s: %s", time.monotonic() - began, config.engine.model)

    async def info(self) -> WorkerInfo:
        """What the gateway needs to know of the model."""
        return self._info

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event]:
        """The events of a request, see messages.Event. Ends in the engine with its caller."""
        yield Alive(self._name)
        if request.model not in ("", self._weights):  # in the midst of a change of the model
            yield Fault("unavailable", "this worker serves another model")
            return
        async with aclosing(self._thread.generate(request)) as events:
            async for event in events:
                yield Alive(self._name) if isinstance(event, Alive) else event

    async def integrity(self) -> IntegrityReport:
        """Check that pages and owners agree, between two steps.

        Raises:
            EngineDownError: there is no engine any more.
        """
        return await self._thread.call(inspect)

    async def record_routing_stats(self) -> RoutingStats:
        """What the router is to know of the blocks in this engine's pool. Called by Ray Serve."""
        return await self._thread.call(summarise)

    async def record_autoscaling_stats(self) -> ScalingStats:
        """What the number of workers depends on. Called by Ray Serve where that may change."""
        return await self._thread.call(scaling_stats)

    def check_health(self) -> None:
        """Raises:
        EngineDownError: the engine has failed or hangs; Ray Serve replaces this replica.
        """
        self._thread.check()

    def _read_figures(self) -> None:
        """On the publisher's thread; what the engine's then reads goes with the next batch."""
        try:
            self._thread.check()
        except EngineDownError:
            self.recorder.set(table.UP, 0)
        else:
            self.recorder.set(table.UP, 1)
            self._thread.post(self._watch.read)

    def __del__(self) -> None:
        publisher = getattr(self, "_publisher", None)
        if publisher is not None:
            publisher.close()
        thread = getattr(self, "_thread", None)
        if thread is not None:
            thread.close()
        checkpoints = getattr(self, "_checkpoints", None)
        if checkpoints is not None:
            checkpoints.close()
        tracing = getattr(self, "_tracing", None)
        if tracing is not None:
            tracing.close()


def open_checkpointer(settings: RecoverySettings, thread: EngineThread) -> Checkpointer | None:
    """Have checkpoints written of what the thread runs, where the settings name a store.

    Raises:
        ConfigError: the store's settings are wrong.
    """
    if settings.store is None:
        return None
    owner = f"worker {socket.gethostname()} {os.getpid()} {uuid.uuid4().hex[:8]}"
    try:
        store = open_checkpoints(settings.store)
    except StoreConfigError as error:
        raise ConfigError(f"recovery.store: {error}") from error
    checkpoints = Checkpointer(store, settings, owner, thread.lose)
    thread.recorder = checkpoints
    return checkpoints


def summarise(engine: Engine, open_requests: int) -> RoutingStats:
    """What the engine has to do, and the blocks in its pool."""
    return summary_of(
        open_requests, engine.identity, engine.scheduler.allocator.recent_keys(MOST_BLOCKS)
    )


def inspect(engine: Engine, open_requests: int) -> IntegrityReport:
    """The engine's state after its own check."""
    problem: str | None = None
    try:
        engine.check_integrity()
    except IntegrityError as error:
        problem = str(error)
    return IntegrityReport(
        problem,
        open_requests,
        engine.pages_in_use,
        engine.has_work,
        engine.stats,
        engine.blocks.stats(),
    )


def with_all_threads(settings: EngineSettings) -> EngineSettings:
    """Spell out the number of CPU threads where the settings leave it open.

    Ray sets OMP_NUM_THREADS to the CPUs that it has set aside, and a fraction becomes 1, so
    that torch's own choice would be a single thread.
    """
    if settings.threads is not None:
        return settings
    return settings.model_copy(update={"threads": len(os.sched_getaffinity(0))})
