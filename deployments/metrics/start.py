"""From settings to a running publisher."""

from __future__ import annotations

from collections.abc import Callable

from ray import serve
from ray.serve.exceptions import RayServeException

from deployments.metrics.definition import Source
from deployments.metrics.publisher import Publisher, Sink
from deployments.metrics.ray_sink import RaySink
from deployments.metrics.recorder import Recorder
from deployments.metrics.settings import MetricsSettings
from deployments.metrics.table import METRICS


def start_publisher(
    settings: MetricsSettings,
    recorder: Recorder,
    source: Source,
    model: str,
    prepare: Callable[[], None] = lambda: None,
) -> Publisher | None:
    """Export what ``recorder`` counts, in the ways that the settings ask for; None for none.

    Args:
        settings: see there.
        recorder: of this process.
        source: what this process is.
        model: the name under which the model is served.
        prepare: see Publisher.
    """
    if not settings.enabled:
        return None
    metrics = [metric for metric in METRICS if metric.source == source]
    sinks: list[Sink] = [RaySink(metrics, model)]
    if settings.otlp_endpoint is not None:
        from deployments.metrics.otlp import OtlpSink  # the SDK, where it is asked for

        sinks.append(
            OtlpSink(
                metrics,
                str(settings.otlp_endpoint),
                settings.otlp_interval_s,
                settings.otlp_timeout_s,
                {"service.name": "specdec", "service.instance.id": replica_id() or source},
                model,
            )
        )
    return Publisher(recorder, sinks, settings.interval_s, prepare)


def replica_id() -> str | None:
    """Of the replica that this process is; None outside of one."""
    try:
        return str(serve.get_replica_context().replica_tag)
    except RayServeException:
        return None
