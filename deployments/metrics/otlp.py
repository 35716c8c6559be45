"""Export by OTLP over HTTP. The SDK's own thread sends: an endpoint that is dead or slow costs a
log line now and then, and what was to be sent is sent with the next export, as sums go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from deployments.metrics.definition import Metric
from deployments.metrics.recorder import Batch

_CLOSE_MS = 2_000


class OtlpSink:
    """Instruments of a meter provider of its own; the process's global one is left alone.

    Args:
        metrics: to export.
        endpoint: URL with path, as ``http://collector:4318/v1/metrics``.
        interval_s: between two exports.
        timeout_s: of an export.
        resource: attributes of this process.
        model: value of the attribute of that name.
    """

    def __init__(
        self,
        metrics: Iterable[Metric],
        endpoint: str,
        interval_s: float,
        timeout_s: float,
        resource: Mapping[str, str],
        model: str,
    ) -> None:
        reader = PeriodicExportingMetricReader(
            OTLPMetricExporter(endpoint=endpoint, timeout=timeout_s),
            export_interval_millis=interval_s * 1000,
            export_timeout_millis=timeout_s * 1000,
        )
        self._provider = MeterProvider(
            [reader], Resource.create(dict(resource)), shutdown_on_exit=False
        )
        self._base = {"model": model}
        meter = self._provider.get_meter("specdec")
        self._counters, self._gauges, self._histograms = {}, {}, {}
        for metric in metrics:
            about = {"unit": metric.unit, "description": metric.help}
            if metric.kind == "counter":
                self._counters[metric] = meter.create_counter(metric.name, **about)
            elif metric.kind == "gauge":
                self._gauges[metric] = meter.create_gauge(metric.name, **about)
            else:
                self._histograms[metric] = meter.create_histogram(
                    metric.name, **about, explicit_bucket_boundaries_advisory=metric.buckets
                )

    def publish(self, batch: Batch) -> None:
        """See Sink."""
        for (metric, labels), amount in batch.sums.items():
            self._counters[metric].add(amount, self._attributes(metric, labels))
        for (metric, labels), value in batch.levels.items():
            self._gauges[metric].set(float(value), self._attributes(metric, labels))
        for (metric, labels), values in batch.observations.items():
            attributes = self._attributes(metric, labels)
            for value in values:
                self._histograms[metric].record(value, attributes)

    def close(self) -> None:
        """See Sink."""
        self._provider.shutdown(_CLOSE_MS)

    def _attributes(self, metric: Metric, labels: tuple[str, ...]) -> dict[str, str]:
        own = {label.name: value for label, value in zip(metric.labels, labels, strict=True)}
        return self._base | own
