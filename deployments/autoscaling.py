"""How many workers the load asks for: queue, KV pressure and tokens in flight, as Serve sees them.

Ray Serve asks each worker for its figures (``record_autoscaling_stats``), averages them, and asks
``WorkerScaling`` in its controller, where this module is passed by value: it may import nothing of
this project when it runs there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

    from deployments.config import AppConfig
    from specdec.engine import Engine

#: Of ``batch.max_sequences``: what a worker is to have where ``target_requests`` says nothing.
_USUAL_LOAD = 0.75


class ScalingStats(TypedDict):
    """Figures of one worker. Numbers only: Ray Serve takes nothing else.

    Attributes:
        requests: running and waiting, in the engine.
        kv: share of the KV pages in use, 0 to 1.
        tokens: prompt and emitted tokens of these requests.
    """

    requests: float
    kv: float
    tokens: float


def scaling_stats(engine: Engine, open_requests: int) -> ScalingStats:
    """The engine's figures, between two steps."""
    scheduler = engine.scheduler
    sequences = (*scheduler.running, *scheduler.waiting)
    return {
        "requests": float(open_requests),
        "kv": engine.pages_in_use / scheduler.allocator.num_pages,
        "tokens": float(sum(len(sequence.tokens) for sequence in sequences)),
    }


def wanted(
    stats: Mapping[str, float], requests: float, targets: Mapping[str, float]
) -> tuple[float, str]:
    """How many workers the load asks for, and the figure that asks for the most.

    Args:
        stats: sums of the workers' ScalingStats.
        requests: that Ray Serve counts, those that wait in a gateway for a worker included.
        targets: per worker, by figure.
    """
    load = {**stats, "requests": max(requests, stats.get("requests", 0.0))}
    asked = {name: load.get(name, 0.0) / target for name, target in targets.items()}
    name = max(asked, key=lambda name: asked[name])
    return asked[name], name


class WorkerScaling:
    """Ray Serve's autoscaling policy for the workers. Bounds and delays are applied by Serve."""

    def __init__(self, **targets: float) -> None:
        self._targets = targets

    def __call__(self, ctx: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """How many workers there should be."""
        recorded = ctx.aggregated_metrics or {}
        stats = {name: sum(recorded.get(name, {}).values()) for name in self._targets}
        count, _ = wanted(stats, float(ctx.total_num_requests), self._targets)
        return count, {}


def serve_autoscaling(config: AppConfig) -> dict[str, Any]:
    """What ``serve.deployment`` is told of autoscaling; nothing where it is off."""
    settings = config.worker.autoscaling
    if settings is None:
        return {}
    requests = settings.target_requests or _USUAL_LOAD * config.engine.batch.max_sequences
    targets = {"requests": requests, "kv": settings.target_kv}
    if settings.target_tokens is not None:
        targets["tokens"] = settings.target_tokens
    return {
        "num_replicas": None,
        "autoscaling_config": {
            "min_replicas": settings.min_replicas,
            "initial_replicas": config.worker.replicas,
            "max_replicas": settings.max_replicas,
            "upscale_delay_s": settings.upscale_delay_s,
            "downscale_delay_s": settings.downscale_delay_s,
            "downscale_to_zero_delay_s": settings.downscale_to_zero_delay_s,
            "look_back_period_s": settings.look_back_s,
            "policy": {
                "policy_function": "deployments.autoscaling:WorkerScaling",
                "policy_kwargs": targets,
            },
        },
    }
