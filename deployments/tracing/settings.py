"""The section ``traces`` of the settings."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator

from specdec.config import Settings
from specdec.tracing.rules import Detail, TraceRules


class TraceSettings(Settings):
    """What is traced, and where the spans go. See docs/observability.md.

    Attributes:
        enabled: make spans at all.
        endpoint: of an OTLP receiver; with ``http/protobuf`` the base URL, without ``/v1/traces``.
        protocol: of the endpoint.
        headers: sent with each export, for instance ``authorization``.
        timeout_s: longest time that an export, its retries included, may take.
        sample_ratio: share of the traces that are kept where the client has not decided by the
            sampled flag of its ``traceparent``.
        detail: whether rounds are ``spans``, ``events`` of the worker's span, or ``off``.
        slow_s: requests that take as long are kept, sampled or not; failed ones always are.
        most_steps: rounds and prefill chunks of a request that are remembered until its end;
            beyond, those in the middle are dropped and counted.
        capture_text: put prompts and answers on the gateway's span.
        service_name: ``service.name`` of all spans.
        baggage: entries of a client's ``baggage`` that are written on spans.
    """

    enabled: bool = False
    endpoint: str = "http://localhost:4318"
    protocol: Literal["http/protobuf", "grpc"] = "http/protobuf"
    headers: dict[str, SecretStr] = Field(default_factory=dict)
    timeout_s: float = Field(5, gt=0)
    sample_ratio: float = Field(0.01, ge=0, le=1)
    detail: Detail = "spans"
    slow_s: float = Field(10, gt=0)
    most_steps: int = Field(512, ge=2)
    capture_text: bool = False
    service_name: str = Field("specdec", min_length=1)
    baggage: tuple[str, ...] = ()

    @field_validator("endpoint")
    @classmethod
    def _is_url(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be a URL that begins with http:// or https://")
        return value

    @property
    def rules(self) -> TraceRules:
        """What gateway and worker decide by."""
        return TraceRules(self.detail, self.slow_s, self.most_steps, self.baggage)
