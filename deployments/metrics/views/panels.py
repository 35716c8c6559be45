"""The panels of the dashboard: which figures are shown, and how."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.metrics import table as t
from deployments.metrics.definition import Metric
from deployments.metrics.views.promql import quantile, rate, ratio, total


@dataclass(frozen=True)
class Query:
    """A line of a panel, or several where the query keeps labels.

    Attributes:
        legend: with ``{{label}}`` for the value of a label.
        expression: in PromQL.
    """

    legend: str
    expression: str


@dataclass(frozen=True)
class Panel:
    """One graph.

    Attributes:
        title: of the panel.
        unit: in Grafana's names.
        about: what to read from it.
        queries: of its lines.
    """

    title: str
    unit: str
    about: str
    queries: tuple[Query, ...]


@dataclass(frozen=True)
class Row:
    """Panels that belong together."""

    title: str
    panels: tuple[Panel, ...]


def _panel(title: str, unit: str, about: str, **lines: str) -> Panel:
    """Lines by legend; of a legend, ``_`` stands for a blank and ``by_x`` for a label's value."""
    queries = [
        Query(f"{{{{{name[3:]}}}}}" if name.startswith("by_") else name.replace("_", " "), line)
        for name, line in lines.items()
    ]
    return Panel(title, unit, about, tuple(queries))


def _quantiles(metric: Metric) -> dict[str, str]:
    return {"p50": quantile(0.5, metric), "p95": quantile(0.95, metric)}


def _mean(metric: Metric) -> str:
    """Of a histogram. Ray knows sums only to the width of a bucket."""
    return ratio(rate(metric, part="_sum"), rate(metric, part="_count"))


TRAFFIC = Row(
    "Traffic and errors",
    (
        _panel("Requests by outcome", "reqps", "", by_outcome=rate(t.REQUESTS, "outcome")),
        _panel("Requests by endpoint", "reqps", "", by_endpoint=rate(t.REQUESTS, "endpoint")),
        _panel(
            "Errors by type",
            "reqps",
            "The code that clients were told.",
            by_error_type=rate(t.ERRORS, "error_type"),
        ),
        _panel(
            "Turned away",
            "reqps",
            "Before any work was done.",
            by_reason=rate(t.REJECTS, "reason"),
        ),
        _panel(
            "Open requests",
            "short",
            "Waiting ones have not been handed to a worker yet.",
            open=total(t.OPEN),
            waiting=total(t.WAITING),
        ),
        _panel(
            "Choices by end",
            "reqps",
            "In the engine; abort is a client that left.",
            by_finish_reason=rate(t.ENDED, "finish_reason"),
        ),
        _panel(
            "Tokens",
            "short",
            "Per second. Generated tokens as they come, prompts when their request ends.",
            generated=rate(t.GENERATED),
            prompt=rate(t.PROMPT_TOKENS),
        ),
        _panel(
            "Output tokens by end",
            "short",
            "Per second. Those of aborted requests were computed for nobody.",
            by_finish_reason=rate(t.OUTPUT_TOKENS, "finish_reason"),
        ),
    ),
)

LATENCY = Row(
    "Latency",
    (
        _panel(
            "Time to first token",
            "s",
            "At the gateway, as clients see it, and in the engine.",
            **_quantiles(t.FIRST_TOKEN),
            p95_in_the_engine=quantile(0.95, t.ENGINE_FIRST_TOKEN),
        ),
        _panel(
            "Time per output token",
            "s",
            "After the first one.",
            **_quantiles(t.PER_TOKEN),
            p95_in_the_engine=quantile(0.95, t.ENGINE_PER_TOKEN),
        ),
        _panel(
            "Request duration",
            "s",
            "",
            **_quantiles(t.DURATION),
            p95_in_the_engine=quantile(0.95, t.ENGINE_DURATION),
        ),
        _panel(
            "Queue time", "s", "In the engine, before the first step.", **_quantiles(t.QUEUE_TIME)
        ),
        _panel("Step duration", "s", "", **_quantiles(t.STEP_TIME)),
        _panel(
            "Step by phase",
            "s",
            "Mean time of a step in each phase.",
            by_phase=f"{rate(t.PHASE_TIME, 'phase')} / on () group_left () {rate(t.STEPS)}",
        ),
    ),
)

SPECULATION = Row(
    "Speculation",
    (
        _panel(
            "Tokens per round",
            "short",
            "Accepted tokens plus one by rounds: the acceptance length. 1 is plain decoding.",
            all=f"1 + {ratio(rate(t.ACCEPTED), rate(t.ROUNDS))}",
            median_of_requests=quantile(0.5, t.TOKENS_PER_ROUND),
            slowest_tenth=quantile(0.1, t.TOKENS_PER_ROUND),
        ),
        _panel(
            "Acceptance by depth",
            "percentunit",
            "Of the rounds that offered a candidate of that depth, the share that kept one.",
            by_depth=ratio(rate(t.ACCEPTED_BY_DEPTH, "depth"), rate(t.OFFERED_BY_DEPTH, "depth")),
        ),
        _panel(
            "Verified candidates that were kept",
            "percentunit",
            "Accepted tokens by drafted nodes. Wide trees lower it without harm.",
            kept=ratio(rate(t.ACCEPTED), rate(t.DRAFTED)),
        ),
        _panel(
            "Budget",
            "short",
            "Candidates verified per round, and the share of steps without the heads.",
            candidates_per_round=ratio(rate(t.DRAFTED), rate(t.ROUNDS)),
            steps_without_heads=ratio(rate(t.DRAFTS_SKIPPED), rate(t.STEPS)),
        ),
        _panel(
            "Speed-up",
            "short",
            "Estimated time of plain decoding by time taken, of steps without prefill.",
            speed_up=ratio(rate(t.PLAIN_TIME), rate(t.DECODE_TIME)),
        ),
        _panel(
            "Tokens per round by end",
            "short",
            "Of choices that ended.",
            by_finish_reason="1 + "
            + ratio(
                rate(t.REQUEST_ACCEPTED, "finish_reason"), rate(t.REQUEST_ROUNDS, "finish_reason")
            ),
        ),
    ),
)

CACHE = Row(
    "Prefix cache",
    (
        _panel(
            "Hit ratio by tier",
            "percentunit",
            "Prompt tokens whose KV was found in the pool or loaded from the store.",
            by_tier=f"{rate(t.CACHED_TOKENS, 'tier')} / on () group_left () "
            f"{rate(t.PROMPT_TOKENS)}",
        ),
        _panel("Blocks of the store", "short", "Per second.", by_result=rate(t.BLOCKS, "result")),
        _panel("Bytes moved", "Bps", "", by_direction=rate(t.STORE_BYTES, "direction")),
        _panel(
            "Latency of the store",
            "s",
            "Mean of the calls that it answered.",
            by_direction=ratio(rate(t.STORE_TIME, "direction"), rate(t.STORE_CALLS, "direction")),
        ),
        _panel(
            "Blocks not believed",
            "short",
            "Per second. Anything above 0 is a fault or an attack.",
            by_reason=rate(t.BLOCKS_REJECTED, "reason"),
        ),
        _panel(
            "Failed calls", "short", "Per second.", by_error_type=rate(t.STORE_ERRORS, "error_type")
        ),
        _panel("Waiting to be written", "bytes", "", queue=total(t.STORE_QUEUE)),
        _panel(
            "Circuit breaker",
            "short",
            "Replicas whose breaker is in this state.",
            by_state=total(t.BREAKER, "state"),
        ),
        _panel(
            "Breaker's changes",
            "short",
            "Per second, by the state entered.",
            by_state=rate(t.BREAKER_CHANGES, "state"),
        ),
    ),
)

KV = Row(
    "KV and batch",
    (
        _panel("KV pages", "short", "", by_state=total(t.PAGES, "state")),
        _panel(
            "KV pool in use",
            "percentunit",
            "",
            used=ratio(total(t.PAGES, more='state="used"'), total(t.PAGES)),
        ),
        _panel("Sequences", "short", "Unfinished ones.", by_state=total(t.SEQUENCES, "state")),
        _panel(
            "Batch size",
            "short",
            "Sequences running in a step.",
            **_quantiles(t.BATCH),
            mean=_mean(t.BATCH),
        ),
        _panel(
            "Steps and their rows",
            "short",
            "",
            steps_per_second=rate(t.STEPS),
            rows_per_step=ratio(rate(t.ROWS), rate(t.STEPS)),
        ),
        _panel("Preemptions", "short", "Per second.", preemptions=rate(t.PREEMPTIONS)),
    ),
)

RECOVERY = Row(
    "Recovery",
    (
        _panel("Workers", "short", "Replicas whose engine lives.", workers=total(t.UP)),
        _panel(
            "Choices taken over",
            "short",
            "Per second, from workers that failed.",
            by_outcome=rate(t.RECOVERIES, "outcome"),
        ),
    ),
)

ROWS: tuple[Row, ...] = (TRAFFIC, LATENCY, SPECULATION, CACHE, KV, RECOVERY)
