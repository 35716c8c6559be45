"""What the engine has to tell: after each step a few numbers, now and then all its counts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from deployments.metrics import table
from deployments.metrics.definition import Metric
from deployments.metrics.recorder import Recorder
from prefix_cache.breaker import BreakerState
from prefix_cache.stats import CacheStats
from specdec.outputs import RequestOutput, RequestStats
from specdec.policy.measured import MeasuredBudget

if TYPE_CHECKING:
    from specdec.engine import Engine

log = logging.getLogger("ray.serve")


class EngineWatch:
    """Both methods run on the engine's thread. What engine and store have counted since start
    becomes differences here; what is read now becomes gauges.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._told: dict[tuple[Metric, tuple[str, ...]], float] = {}
        self._steps = 0
        self._failed = False

    def after_step(self, engine: Engine, outputs: Sequence[RequestOutput], seconds: float) -> None:
        """Enter a step and the requests that ended with it. Never raises."""
        self._safely(lambda: self._enter_step(engine, outputs, seconds))

    def read(self, engine: Engine) -> None:
        """Enter all that the engine has counted, and how it stands. Never raises."""
        self._safely(lambda: self._read_engine(engine))

    def _safely(self, action: Callable[[], None]) -> None:
        """An error here would end the engine; a figure is not worth that."""
        try:
            action()
        except Exception:  # see above
            if not self._failed:
                self._failed = True
                log.exception("metrics: reading the engine failed; further failures are not told")

    def _enter_step(self, engine: Engine, outputs: Sequence[RequestOutput], seconds: float) -> None:
        ended = 0
        for output in outputs:
            if output.stats is not None and output.finish_reason is not None:
                ended += 1
                self._request_ended(output.stats, output.finish_reason)
        if engine.stats.steps != self._steps:  # else it only waited, or told of an abort
            self._steps = engine.stats.steps
            self._recorder.observe(table.STEP_TIME, seconds)
            self._recorder.observe(table.BATCH, len(engine.scheduler.running) + ended)

    def _read_engine(self, engine: Engine) -> None:
        stats = engine.stats
        for metric, total in (
            (table.STEPS, stats.steps),
            (table.ROWS, stats.rows),
            (table.GENERATED, stats.emitted),
            (table.ROUNDS, stats.rounds),
            (table.DRAFTED, stats.drafted),
            (table.ACCEPTED, stats.accepted),
        ):
            self._grown(metric, total)
        for phase, total_s in stats.phase_s.items():
            self._grown(table.PHASE_TIME, total_s, phase)
        if isinstance(engine.budget, MeasuredBudget):
            self._grown(table.DRAFTS_SKIPPED, engine.budget.skipped)
            self._grown(table.DECODE_TIME, engine.budget.spent_s)
            self._grown(table.PLAIN_TIME, engine.budget.plain_s)
        set_ = self._recorder.set
        scheduler = engine.scheduler
        set_(table.SEQUENCES, len(scheduler.running), "running")
        set_(table.SEQUENCES, len(scheduler.waiting), "waiting")
        set_(table.SEQUENCES, scheduler.loading, "loading")
        set_(table.PAGES, engine.pages_in_use, "used")
        set_(table.PAGES, scheduler.allocator.free_pages, "free")
        stored = engine.blocks.stats()
        if stored is not None:
            self._read_store(stored)

    def _read_store(self, stored: CacheStats) -> None:
        for result, count in (
            ("hit", stored.hits),
            ("miss", stored.misses),
            ("unanswered", stored.unanswered),
            ("written", stored.written),
            ("dropped", stored.dropped),
        ):
            self._grown(table.BLOCKS, count, result)
        for reason, count in stored.rejected.items():
            self._grown(table.BLOCKS_REJECTED, count, reason)
        for fault, count in stored.errors.items():
            self._grown(table.STORE_ERRORS, count, fault)
        for direction, size, latency in (
            ("read", stored.bytes_read, stored.read),
            ("write", stored.bytes_written, stored.write),
        ):
            self._grown(table.STORE_BYTES, size, direction)
            self._grown(table.STORE_CALLS, latency.count, direction)
            self._grown(table.STORE_TIME, latency.total_s, direction)
        for state, count in stored.transitions.items():
            self._grown(table.BREAKER_CHANGES, count, state)
        for state in BreakerState:
            self._recorder.set(table.BREAKER, float(state is stored.breaker), state)
        self._recorder.set(table.STORE_QUEUE, stored.queue_bytes)

    def _grown(self, metric: Metric, total: float, *labels: str) -> None:
        key = (metric, labels)
        self._recorder.add(metric, max(0.0, total - self._told.get(key, 0.0)), *labels)
        self._told[key] = total

    def _request_ended(self, stats: RequestStats, reason: str) -> None:
        add, observe = self._recorder.add, self._recorder.observe
        add(table.ENDED, 1, reason)
        add(table.PROMPT_TOKENS, stats.prompt_tokens, reason)
        add(table.CACHED_TOKENS, stats.cached_tokens - stats.loaded_tokens, "pool", reason)
        add(table.CACHED_TOKENS, stats.loaded_tokens, "store", reason)
        add(table.OUTPUT_TOKENS, stats.completion_tokens, reason)
        add(table.REQUEST_ROUNDS, stats.rounds, reason)
        add(table.REQUEST_ACCEPTED, stats.accepted, reason)
        add(table.PREEMPTIONS, stats.preemptions)
        for metric, by_depth in (
            (table.OFFERED_BY_DEPTH, stats.walked_by_depth),
            (table.ACCEPTED_BY_DEPTH, stats.accepted_by_depth),
        ):
            for depth, count in enumerate(by_depth, 1):
                add(metric, count, str(depth))
        observe(table.QUEUE_TIME, stats.queue_s)
        observe(table.ENGINE_DURATION, stats.total_s)
        if stats.rounds:
            observe(table.TOKENS_PER_ROUND, stats.tokens_per_round)
        if stats.first_token_s is not None:
            observe(table.ENGINE_FIRST_TOKEN, stats.first_token_s)
            if stats.completion_tokens > 1:
                decoding = stats.total_s - stats.first_token_s
                observe(table.ENGINE_PER_TOKEN, decoding / (stats.completion_tokens - 1))
