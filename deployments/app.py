"""``deployments.app:build_app``, the entry point that ``serve_config.yaml`` names."""

# No `from __future__ import annotations` here: Ray Serve validates the arguments only where the
# builder's annotation is a class, not a string.

from typing import Any

from ray import serve
from ray.serve import Application

from deployments.autoscaling import serve_autoscaling
from deployments.config import AppConfig, ReplicaSettings
from deployments.gateway import Gateway
from deployments.worker import Worker


def build_app(config: AppConfig) -> Application:
    """The gateway in front of its workers.

    Args:
        config: the ``args`` of the application; an unknown or bad key is an error.
    """
    return application(config, Worker)


def application(config: AppConfig, worker_class: type[Worker]) -> Application:
    """The same with another kind of worker."""
    batch, routing = config.engine.batch, config.worker.routing
    worker = serve.deployment(
        **(_common(config.worker, config.worker.num_gpus) | serve_autoscaling(config)),
        # What the engine itself can hold and a few more, so that it is the engine that refuses.
        max_ongoing_requests=batch.max_sequences + batch.max_waiting + 8,
        max_queued_requests=config.worker.max_queued_requests,
        request_router_config={
            "request_router_class": "deployments.router.PrefixRouter",
            "request_router_kwargs": {"factor": routing.factor, "slack": routing.slack},
            "request_routing_stats_period_s": routing.stats_period_s,
        },
    )(worker_class)
    gateway = serve.deployment(
        **_common(config.gateway),
        # The gateway turns requests away itself, in OpenAI's shape; Ray's proxy would not.
        max_ongoing_requests=100_000,
    )(serve.ingress()(Gateway))
    bound: Application = gateway.bind(config, worker.bind(config))
    return bound


def _common(settings: ReplicaSettings, num_gpus: float = 0) -> dict[str, Any]:
    return {
        "num_replicas": settings.replicas,
        "ray_actor_options": {"num_cpus": settings.num_cpus, "num_gpus": num_gpus},
        "graceful_shutdown_timeout_s": settings.graceful_shutdown_timeout_s,
        "health_check_period_s": settings.health_check_period_s,
        "health_check_timeout_s": settings.health_check_timeout_s,
    }
