"""Export through Ray's metrics: its agent on each node has the endpoint that Prometheus scrapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ray.serve import metrics as serve_metrics

from deployments.metrics.definition import Metric
from deployments.metrics.recorder import Batch


class RaySink:
    """One of Ray's instruments per metric; in a replica they carry its deployment and id.

    Args:
        metrics: to export.
        model: value of the label of that name.
    """

    def __init__(self, metrics: Iterable[Metric], model: str) -> None:
        self._base = {"model": model}
        self._counters: dict[Metric, serve_metrics.Counter] = {}
        self._gauges: dict[Metric, serve_metrics.Gauge] = {}
        self._histograms: dict[Metric, serve_metrics.Histogram] = {}
        for metric in metrics:
            # Ray's annotation says one tag, its code takes any number
            tags: Any = ("model", *(label.prometheus for label in metric.labels))
            if metric.kind == "counter":
                self._counters[metric] = serve_metrics.Counter(metric.ray, metric.help, tags)
                self._begin(metric)
            elif metric.kind == "gauge":
                self._gauges[metric] = serve_metrics.Gauge(metric.ray, metric.help, tags)
            else:
                self._histograms[metric] = serve_metrics.Histogram(
                    metric.ray, metric.help, list(metric.buckets), tags
                )

    def _begin(self, metric: Metric) -> None:
        """Let all series of a counter exist, at 0: Prometheus' ``rate`` does not see the growth
        that brings a series about, which for an error may be all there is. ``inc`` refuses 0.
        """
        for labels in metric.combinations():
            self._counters[metric]._record(0.0, self._tags(metric, labels))

    def publish(self, batch: Batch) -> None:
        """See Sink. About 5 µs for each series, and for each value of a histogram."""
        for (metric, labels), amount in batch.sums.items():
            self._counters[metric].inc(amount, self._tags(metric, labels))
        for (metric, labels), value in batch.levels.items():
            self._gauges[metric].set(value, self._tags(metric, labels))
        for (metric, labels), values in batch.observations.items():
            tags = self._tags(metric, labels)
            for value in values:
                self._histograms[metric].observe(value, tags)

    def close(self) -> None:
        """Ray exports what it has by itself."""

    def _tags(self, metric: Metric, labels: tuple[str, ...]) -> dict[str, str]:
        own = {label.prometheus: v for label, v in zip(metric.labels, labels, strict=True)}
        return self._base | own
