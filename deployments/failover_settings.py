"""Settings of what happens when workers are lost. See docs/recovery.md."""

from __future__ import annotations

from pydantic import Field

from specdec.config import Settings


class FailoverSettings(Settings):
    """What a gateway does with answers whose worker is lost.

    Attributes:
        retries: times that an answer is sent on without having got any further, before the
            client gets a 503; 0 turns failover off.
        recovery_timeout_s: how long an answer may stand still for want of a worker.
        wedge_timeout_s: a worker that gives no sign of life for so long is taken for lost.
        retry_burst: retries of all answers together at once …
        retries_per_s: … and those that are added each second.
        handover_margin_s: before the end of a stopping worker's grace time, see
            ``worker.graceful_shutdown_timeout_s``: what it has not finished then is sent on.
    """

    retries: int = Field(4, ge=0)
    recovery_timeout_s: float = Field(180, gt=0)
    wedge_timeout_s: float = Field(12, gt=0)
    retry_burst: int = Field(1000, ge=1)
    retries_per_s: float = Field(20, gt=0)
    handover_margin_s: float = Field(20, ge=0)


class WorkerFailoverSettings(Settings):
    """What a worker does so that its loss is noticed.

    Attributes:
        heartbeat_s: seconds between two signs of life for a request that gets no tokens.
        failed_requests: requests that end with non-finite numbers within half a minute, and no
            more that end well, before the replica is replaced.
    """

    heartbeat_s: float = Field(3, gt=0)
    failed_requests: int = Field(8, ge=1)
