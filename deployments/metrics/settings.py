"""Settings of metrics and logs."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, HttpUrl

from specdec.config import Settings


class MetricsSettings(Settings):
    """Figures for Prometheus and, where an endpoint is set, by OTLP.

    Attributes:
        enabled: count and export.
        port: where ``python -m deployments`` lets Ray answer Prometheus, on all addresses of
            this machine; in a cluster it is ``ray start --metrics-export-port`` that says so.
        interval_s: seconds between two publications of a process.
        report_interval_s: seconds between two reports of a process to Ray's agent, for a Ray
            that ``python -m deployments`` starts; Ray itself takes 10.
        otlp_endpoint: URL with path, as ``http://collector:4318/v1/metrics``; None exports
            nothing by OTLP.
        otlp_interval_s: seconds between two exports by OTLP.
        otlp_timeout_s: of one of them.
    """

    enabled: bool = True
    port: int = Field(9464, ge=1, le=65535)
    interval_s: float = Field(1.0, gt=0)
    report_interval_s: float = Field(5.0, ge=1)
    otlp_endpoint: HttpUrl | None = None
    otlp_interval_s: float = Field(10.0, gt=0)
    otlp_timeout_s: float = Field(5.0, gt=0)


class LogSettings(Settings):
    """The log of requests: a line of JSON for each, when it has ended.

    Attributes:
        requests: write it.
        folder: where; None takes Ray Serve's own folder of logs.
        text: also write prompts and answers. They are the users', so this is off.
        text_characters: most of each.
        max_bytes: a file that is larger is moved aside.
        backups: files moved aside that are kept.
    """

    requests: bool = True
    folder: Path | None = None
    text: bool = False
    text_characters: int = Field(10_000, ge=1)
    max_bytes: int = Field(100 * 2**20, ge=10_000)
    backups: int = Field(5, ge=0)
