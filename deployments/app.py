"""``deployments.app:build_app``, the entry point that ``serve_config.yaml`` names."""

# No `from __future__ import annotations` here: Ray Serve validates the arguments only where the
# builder's annotation is a class, not a string.

from typing import Any

from ray import serve
from ray.serve import Application

from deployments.config import AppConfig, ReplicaSettings
from deployments.gateway import Gateway
from deployments.worker import Worker


def build_app(config: AppConfig) -> Application:
    """The gateway in front of its workers.

    Args:
        config: the ``args`` of the application; an unknown or bad key is an error.
    """
    batch = config.engine.batch
    worker = serve.deployment(
        **_common(config.worker, config.worker.num_gpus),
        # What the engine itself can hold and a few more, so that it is the engine that refuses.
        max_ongoing_requests=batch.max_sequences + batch.max_waiting + 8,
        max_queued_requests=config.worker.max_queued_requests,
    )(Worker)
    gateway = serve.deployment(
        **_common(config.gateway),
        # The gateway turns requests away itself, in OpenAI's shape; Ray's proxy would not.
        max_ongoing_requests=100_000,
    )(serve.ingress()(Gateway))
    application: Application = gateway.bind(config, worker.bind(config))
    return application


def _common(settings: ReplicaSettings, num_gpus: float = 0) -> dict[str, Any]:
    return {
        "num_replicas": settings.replicas,
        "ray_actor_options": {"num_cpus": settings.num_cpus, "num_gpus": num_gpus},
        "graceful_shutdown_timeout_s": settings.graceful_shutdown_timeout_s,
        "health_check_period_s": settings.health_check_period_s,
        "health_check_timeout_s": settings.health_check_timeout_s,
    }
