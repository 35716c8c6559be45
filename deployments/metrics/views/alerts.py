"""The alerts: when somebody is to look, with a paragraph each in docs/operations.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deployments.metrics import table as t
from deployments.metrics.definition import Metric

RUNBOOK = "docs/operations.md"


@dataclass(frozen=True)
class Timing:
    """Windows in Prometheus' notation. Shorter ones are for trials.

    Attributes:
        short: over which a fault must show.
        long: over which it must have cost enough.
        presence: for which a gauge's last value counts, as reports may come late.
        hold: how long a state must last.
        interval: between two evaluations.
    """

    short: str = "5m"
    long: str = "1h"
    presence: str = "1m"
    hold: str = "1m"
    interval: str = "15s"


@dataclass(frozen=True)
class Thresholds:
    """What counts as bad.

    Attributes:
        acceptance: least share of rounds with a candidate that keep the first one; half of what
            the shipped heads reach.
        low_load: running sequences per worker up to which drafting should pay on any machine.
        first_token_s: in which the first token should come, a bucket of its histogram …
        slow_share: … and the share of requests that may take longer.
        slow_burn: multiple of that share which alerts.
        error_share: share of requests that may fail through the server's fault.
        error_burn: multiple of that share which alerts.
        waiting: requests that may wait per worker.
    """

    acceptance: float = 0.25
    low_load: float = 1.5
    first_token_s: float = 2
    slow_share: float = 0.05
    slow_burn: float = 6
    error_share: float = 0.005
    error_burn: float = 14.4
    waiting: float = 16


_TIMING, _LIMITS = Timing(), Thresholds()


@dataclass(frozen=True)
class Alert:
    """A rule.

    Attributes:
        name: of the alert, and the heading of its paragraph.
        severity: ``page`` wakes somebody, ``ticket`` waits for the morning.
        summary: one line.
        expression: of the rule; it gives something only while there is something wrong.
        values: what the rule compares; these give something at any time.
        hold: how long it must be so.
    """

    name: str
    severity: str
    summary: str
    expression: str
    values: tuple[str, ...]
    hold: str


def alerts(timing: Timing = _TIMING, limits: Thresholds = _LIMITS) -> tuple[Alert, ...]:
    """All rules."""
    if limits.first_token_s not in t.FIRST_TOKEN.buckets:
        raise ValueError(f"first_token_s: {limits.first_token_s} is no bucket of the histogram")
    short, long = timing.short, timing.long
    offered = _growth(t.OFFERED_BY_DEPTH, short, 'depth="1"')
    kept = _growth(t.ACCEPTED_BY_DEPTH, short, 'depth="1"')
    acceptance = f"{kept} / {offered}"
    # steps without heads count as if nothing had been kept; at low load only, as others are right
    drafting = f"{kept} / ({offered} + {_growth(t.DRAFTS_SKIPPED, short)})"
    load = f'sum(avg_over_time({t.SEQUENCES.prometheus}{{state="running"}}[{short}]))'
    workers = f"(sum(max_over_time({t.UP.prometheus}[{timing.presence}])) or vector(0))"
    queued = (
        f"(sum(avg_over_time({t.WAITING.prometheus}[{short}])) or vector(0)) + on () "
        f'(sum(avg_over_time({t.SEQUENCES.prometheus}{{state="waiting"}}[{short}])) or vector(0))'
    )
    waiting = f"({queued}) / on () clamp_min({workers}, 1)"
    queue = f"{waiting} > {limits.waiting}"
    slow = [_slow(window, limits.first_token_s) for window in (short, long)]
    failed = [_failed(window) for window in (short, long)]
    most_slow, most_failed = (
        f"{limits.slow_share * limits.slow_burn:.4g}",
        f"{limits.error_share * limits.error_burn:.4g}",
    )
    not_closed = f'{t.BREAKER.prometheus}{{state!="closed"}}'
    broken = f"max by (replica) (max_over_time({not_closed}[{timing.presence}]))"
    return (
        Alert(
            "SpecdecAcceptanceDrop",
            "ticket",
            "Drafts are hardly accepted any more: answers come as slowly as without speculation.",
            f"{acceptance} < {limits.acceptance} or "
            f"({drafting} < {limits.acceptance} and on () {load} / on () clamp_min({workers}, 1) "
            f"<= {limits.low_load})",
            (acceptance, drafting, load),
            timing.hold,
        ),
        Alert(
            "SpecdecSlowFirstToken",
            "page",
            f"Too many requests wait longer than {limits.first_token_s:g} s for their first "
            "token, and no queue explains it.",
            f"({slow[0]} > {most_slow} and on () {slow[1]} > {most_slow}) unless on () ({queue})",
            tuple(slow),
            timing.hold,
        ),
        Alert(
            "SpecdecErrorBudgetBurn",
            "page",
            "Too many requests fail through the server's fault.",
            f"{failed[0]} > {most_failed} and on () {failed[1]} > {most_failed}",
            tuple(failed),
            timing.hold,
        ),
        Alert(
            "SpecdecBreakerOpen",
            "ticket",
            "The prefix cache's store fails; prompts are computed that it may hold.",
            f"{broken} > 0",
            (broken,),
            timing.hold,
        ),
        Alert(
            "SpecdecNoCapacity",
            "page",
            "No worker has a living engine: every request is turned away.",
            f"{workers} < 1",
            (workers,),
            timing.hold,
        ),
        Alert(
            "SpecdecQueueGrowth",
            "page",
            f"More than {limits.waiting:g} requests per worker wait, in gateways and engines.",
            queue,
            (waiting,),
            timing.hold,
        ),
    )


def rules(timing: Timing = _TIMING, limits: Thresholds = _LIMITS) -> Mapping[str, Any]:
    """The rules as Prometheus reads them, in YAML."""
    return {
        "groups": [
            {
                "name": "specdec",
                "interval": timing.interval,
                "rules": [
                    {
                        "alert": alert.name,
                        "expr": alert.expression,
                        "for": alert.hold,
                        "labels": {"severity": alert.severity},
                        "annotations": {
                            "summary": alert.summary,
                            "runbook": f"{RUNBOOK}#{alert.name.lower()}",
                        },
                    }
                    for alert in alerts(timing, limits)
                ],
            }
        ]
    }


def _growth(metric: Metric, window: str, matchers: str = "") -> str:
    return f"sum(rate({metric.prometheus}{{{matchers}}}[{window}]))"


def _slow(window: str, seconds: float) -> str:
    """Share of first tokens that took longer."""
    name = t.FIRST_TOKEN.prometheus
    in_time = f'sum(rate({name}_bucket{{le="{float(seconds)}"}}[{window}]))'
    return f"(1 - {in_time} / sum(rate({name}_count[{window}])))"


def _failed(window: str) -> str:
    """Share of requests that ended in a server error."""
    name = t.REQUESTS.prometheus
    bad = f'sum(rate({name}{{outcome="server_error"}}[{window}]))'
    return f"({bad} / sum(rate({name}[{window}])))"
