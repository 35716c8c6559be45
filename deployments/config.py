"""The settings of the whole application: one tree, read from ``serve_config.yaml``."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

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
    """

    body_bytes: int = Field(4 * 2**20, ge=1024)
    default_max_tokens: int = Field(1024, ge=1)
    max_output_tokens: int | None = Field(None, ge=1)
    choices: int = Field(16, ge=1)
    stop_strings: int = Field(16, ge=0)
    stop_characters: int = Field(1000, ge=1)


class GatewaySettings(ReplicaSettings):
    """The HTTP side: text in, text out.

    Attributes:
        model_name: the name that clients use; None takes the engine's own, of a folder the
            last part.
        retry_after_s: seconds after which a client that was turned away may come again.
        debug: serve ``/debug/integrity``, which tells of the engine's insides.
        limits: of a request.
    """

    model_name: str | None = Field(None, min_length=1)
    retry_after_s: int = Field(1, ge=1)
    debug: bool = False
    limits: LimitSettings = LimitSettings()


class WorkerSettings(ReplicaSettings):
    """The engine's side: tokens in, tokens out; one engine per replica.

    Attributes:
        num_cpus: see ReplicaSettings.
        num_gpus: accelerators of each replica; 0 runs on the CPU.
        max_queued_requests: requests that wait in a gateway while all workers are full.
        stall_timeout_s: a step that takes longer means that the engine hangs, and the
            replica is replaced.
    """

    num_cpus: float = Field(0.5, ge=0)
    num_gpus: float = Field(0, ge=0)
    max_queued_requests: int = Field(256, ge=0)
    stall_timeout_s: float = Field(300, gt=0)


class AppConfig(Settings):
    """Arguments of the application in ``serve_config.yaml``."""

    engine: EngineSettings = EngineSettings()
    gateway: GatewaySettings = GatewaySettings()
    worker: WorkerSettings = WorkerSettings()

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

    @property
    def model_name(self) -> str:
        """The name under which the model is served."""
        if self.gateway.model_name is not None:
            return self.gateway.model_name
        model = self.engine.model
        return Path(model).name if model.startswith((".", "/", "~")) else model
