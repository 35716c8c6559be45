"""The settings of the whole application: one tree, read from ``serve_config.yaml``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from deployments.failover_settings import FailoverSettings, WorkerFailoverSettings
from deployments.metrics.settings import LogSettings, MetricsSettings
from deployments.security.settings import SecuritySettings
from deployments.tracing.settings import TraceSettings
from prefix_cache.checkpoints.settings import CheckpointSettings
from specdec.config import EngineSettings, Settings


class ReplicaSettings(Settings):
    """What Ray Serve is told of a deployment.

    Attributes:
        replicas: processes of this kind.
        num_cpus: logical CPUs that Ray sets aside for each; it reserves, it does not limit.
        graceful_shutdown_timeout_s: how long a replica that is to stop may finish its answers.
        health_check_period_s: seconds between two checks.
        health_check_timeout_s: a check that takes longer has failed.
    """

    replicas: int = Field(1, ge=1)
    num_cpus: float = Field(0.1, ge=0)
    graceful_shutdown_timeout_s: float = Field(60, ge=0)
    health_check_period_s: float = Field(5, gt=0)
    health_check_timeout_s: float = Field(30, gt=0)


class LimitSettings(Settings):
    """What a single HTTP request may ask for. Beyond it: a 4xx answer.

    Attributes:
        body_bytes: size of a body.
        default_max_tokens: output tokens of a chat that names no number.
        max_output_tokens: most output tokens of a choice; None leaves the model's length.
        choices: choices of a request, ``n`` times the number of prompts.
        stop_strings: number of stop strings.
        stop_characters: length of a stop string.
        prompt_tokens: tokens of a prompt; None leaves the model's length.
        tools: functions that a request may offer.
        request_timeout_s: from when a request is let in to the end of its answer.
        body_timeout_s: for a body to arrive.
    """

    body_bytes: int = Field(4 * 2**20, ge=1024)
    default_max_tokens: int = Field(1024, ge=1)
    max_output_tokens: int | None = Field(None, ge=1)
    choices: int = Field(16, ge=1)
    stop_strings: int = Field(16, ge=0)
    stop_characters: int = Field(1000, ge=1)
    prompt_tokens: int | None = Field(None, ge=1)
    tools: int = Field(128, ge=0)
    request_timeout_s: float = Field(600, gt=0)
    body_timeout_s: float = Field(30, gt=0)


class QueueSettings(Settings):
    """Who waits in a gateway while the workers have enough to do.

    Attributes:
        max_waiting: requests that wait; further ones get 429 at once.
        wait_s: how long one may wait; then it gets 503. Where throughput says that a request would
            wait longer, it gets 429 at once.
        kv_overcommit: KV that admitted requests may need at most, in pools. More than 1, as few
            answers get as long as they may; where the pool runs out, engines preempt.
    """

    max_waiting: int = Field(256, ge=1)
    wait_s: float = Field(30, gt=0)
    kv_overcommit: float = Field(2, gt=0)


class ToolSettings(Settings):
    """How a model is told of functions, and how its calls are read.

    Attributes:
        parser: format of the calls in the model's text; see deployments/tools/.
        prompt: ``auto`` has the model's chat template present the functions where it can, and else
            a system prompt of our own; ``template`` refuses tools where the template cannot.
    """

    parser: Literal["hermes"] = "hermes"
    prompt: Literal["auto", "template"] = "auto"


class GatewaySettings(ReplicaSettings):
    """The HTTP side: text in, text out.

    Attributes:
        model_name: the name that clients use; None takes the engine's own, of a folder the
            last part.
        retry_after_s: seconds after which a client that was turned away may come again.
        debug: serve ``/debug/integrity``, which tells of the engine's insides.
        docs: serve ``/docs`` and ``/openapi.json``.
        limits: of a request.
        failover: where a worker is lost.
        graceful_shutdown_timeout_s: its streams cannot be handed over, so it is longer here.
        queue: of requests.
        security: keys, rates and CORS.
        tools: how models call functions.
    """

    graceful_shutdown_timeout_s: float = Field(600, ge=0)
    model_name: str | None = Field(None, min_length=1)
    retry_after_s: int = Field(1, ge=1)
    debug: bool = False
    docs: bool = True
    limits: LimitSettings = LimitSettings()
    failover: FailoverSettings = FailoverSettings()
    queue: QueueSettings = QueueSettings()
    security: SecuritySettings = SecuritySettings()
    tools: ToolSettings = ToolSettings()


class RoutingSettings(Settings):
    """Which worker gets a request: the one that holds most of its prompt, unless it is too busy.

    Attributes:
        factor: a worker is too busy if it has more than so many times the requests of the least
            busy one …
        slack: … plus so many.
        stats_period_s: seconds between two reports of what a worker holds.
    """

    factor: float = Field(1.5, ge=1)
    slack: int = Field(4, ge=0)
    stats_period_s: float = Field(2, gt=0)


class AutoscalingSettings(Settings):
    """How many workers there are, by what they have to do; see deployments/autoscaling.py.

    Of the numbers of workers that the targets ask for, the largest counts.

    Attributes:
        min_replicas: at least so many; 0 lets an idle server give up its last worker, and the
            next request waits for the start of one.
        max_replicas: at most so many.
        target_requests: running and waiting requests per worker; None takes three quarters of
            ``engine.batch.max_sequences``.
        target_kv: share of a worker's KV pages in use.
        target_tokens: tokens of running and waiting requests per worker; None leaves them out.
        upscale_delay_s: the targets must be exceeded for so long before workers are added.
        downscale_delay_s: fewer must do for so long before a worker is taken away.
        downscale_to_zero_delay_s: the same for the last one.
        look_back_s: figures are means over so long.
    """

    min_replicas: int = Field(1, ge=0)
    max_replicas: int = Field(4, ge=1)
    target_requests: float | None = Field(None, gt=0)
    target_kv: float = Field(0.8, gt=0, le=1)
    target_tokens: float | None = Field(None, gt=0)
    upscale_delay_s: float = Field(10, ge=0)
    downscale_delay_s: float = Field(300, ge=0)
    downscale_to_zero_delay_s: float = Field(1800, ge=0)
    look_back_s: float = Field(15, gt=0)

    @model_validator(mode="after")
    def _range_is_one(self) -> AutoscalingSettings:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas ({self.min_replicas}) is above max_replicas ({self.max_replicas})"
            )
        return self


class WorkerSettings(ReplicaSettings):
    """The engine's side: tokens in, tokens out; one engine per replica.

    Attributes:
        replicas: see ReplicaSettings; with ``autoscaling``, how many there are at the start.
        num_cpus: see ReplicaSettings.
        num_gpus: accelerators of each replica; 0 runs on the CPU.
        max_queued_requests: requests that wait in a gateway while all workers are full.
        stall_timeout_s: a step that takes longer means that the engine hangs, and the
            replica is replaced.
        routing: of requests to replicas.
        failover: signs of life.
        autoscaling: the number of replicas follows the load; None leaves it at ``replicas``.
    """

    num_cpus: float = Field(0.5, ge=0)
    num_gpus: float = Field(0, ge=0)
    max_queued_requests: int = Field(256, ge=0)
    stall_timeout_s: float = Field(300, gt=0)
    routing: RoutingSettings = RoutingSettings()
    failover: WorkerFailoverSettings = WorkerFailoverSettings()
    autoscaling: AutoscalingSettings | None = None

    @model_validator(mode="after")
    def _starts_within_range(self) -> WorkerSettings:
        scale = self.autoscaling
        if scale is not None and not scale.min_replicas <= self.replicas <= scale.max_replicas:
            raise ValueError(
                f"replicas ({self.replicas}), the number at the start, must lie between "
                f"autoscaling.min_replicas ({scale.min_replicas}) and "
                f"autoscaling.max_replicas ({scale.max_replicas})"
            )
        return self


class RecoverySettings(Settings):
    """Checkpoints of answers under way, so that they outlive gateways and restarts.

    Attributes:
        store: where they are kept; None keeps none, and then a client that lost its connection
            cannot have the rest of its answer, and an Idempotency-Key has no effect.
        every_rounds: a running request's checkpoint is written after so many rounds …
        every_tokens: … or so many tokens, whichever comes first.
    """

    store: CheckpointSettings | None = None
    every_rounds: int = Field(16, ge=1)
    every_tokens: int = Field(64, ge=1)


class AppConfig(Settings):
    """Arguments of the application in ``serve_config.yaml``."""

    engine: EngineSettings = EngineSettings()
    gateway: GatewaySettings = GatewaySettings()
    worker: WorkerSettings = WorkerSettings()
    recovery: RecoverySettings = RecoverySettings()
    traces: TraceSettings = TraceSettings()
    metrics: MetricsSettings = MetricsSettings()
    logs: LogSettings = LogSettings()

    @model_validator(mode="after")
    def _default_fits_limit(self) -> AppConfig:
        limits = self.gateway.limits
        most = limits.max_output_tokens
        if most is not None and limits.default_max_tokens > most:
            raise ValueError(
                f"gateway.limits.default_max_tokens ({limits.default_max_tokens}) is above "
                f"gateway.limits.max_output_tokens ({most})"
            )
        return self

    @model_validator(mode="after")
    def _stores_are_apart(self) -> AppConfig:
        blocks, checkpoints = self.engine.prefix_cache.store, self.recovery.store
        if blocks is None or checkpoints is None or blocks.url != checkpoints.url:
            return self
        if checkpoints.url.get_secret_value().startswith("lmdb:"):
            raise ValueError(
                "recovery.store.url: an LMDB folder of its own is wanted, not that of "
                "engine.prefix_cache.store.url"
            )
        if blocks.namespace == checkpoints.namespace:
            raise ValueError(
                "recovery.store.namespace: must differ from engine.prefix_cache.store.namespace, "
                "as both use one server"
            )
        return self

    @model_validator(mode="after")
    def _silence_is_longer_than_a_heartbeat(self) -> AppConfig:
        silence, beat = self.gateway.failover.wedge_timeout_s, self.worker.failover.heartbeat_s
        if silence < 2 * beat:
            raise ValueError(
                f"gateway.failover.wedge_timeout_s ({silence:g}) must be at least twice "
                f"worker.failover.heartbeat_s ({beat:g})"
            )
        return self

    @property
    def weights(self) -> str:
        """What numbers the model computes with; tokens of one are not continued by another."""
        return f"{self.engine.model} {self.engine.dtype}"

    @property
    def model_name(self) -> str:
        """The name under which the model is served."""
        if self.gateway.model_name is not None:
            return self.gateway.model_name
        model = self.engine.model
        return Path(model).name if model.startswith((".", "/", "~")) else model
