"""``specdec top``: a running server at a glance."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from specdec.cli.scrape import ScrapeError, Window, fetch

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

#: Where ``python -m deployments`` lets Prometheus scrape.
_URL = "http://127.0.0.1:9464"
_WINDOW_S = 30.0
_BAR = 24
_ENGINE, _REQUEST, _STORE = "ray_specdec_engine_", "ray_specdec_request_", "ray_specdec_store_"
_GATEWAY, _GEN_AI = "ray_specdec_gateway_", "ray_gen_ai_server_"


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command's arguments."""
    parser = subparsers.add_parser("top", help="watch a running server")
    parser.add_argument("url", nargs="?", default=_URL, help=f"of its metrics (default: {_URL})")
    parser.add_argument("--interval", type=_seconds, default=2.0, help="seconds between readings")
    parser.add_argument("--once", action="store_true", help="read twice, print once, and end")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Read and draw until interrupted."""
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError as error:
        raise ScrapeError('needs rich: pip install "specdec[serve]"') from error
    window = Window(_WINDOW_S)
    window.add(time.monotonic(), fetch(options.url))
    if options.once:
        time.sleep(options.interval)
        window.add(time.monotonic(), fetch(options.url))
        Console().print(frame(window, options.url))
        return 0
    with Live(frame(window, options.url), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(options.interval)
            try:
                window.add(time.monotonic(), fetch(options.url))
            except ScrapeError as error:
                live.update(f"{error}\nstill trying; Ctrl-C ends", refresh=True)
            else:
                live.update(frame(window, options.url), refresh=True)


def frame(window: Window, url: str) -> RenderableType:
    """What is shown of a window."""
    from rich.columns import Columns
    from rich.console import Group

    workers = window.now("ray_specdec_worker_up")
    head = (
        f"[bold]specdec[/] {url}   workers {workers:.0f}   "
        f"last {window.seconds:.0f} s   {time.strftime('%H:%M:%S')}"
    )
    parts = [_traffic(window), _latency(window), _speculation(window), _batch(window)]
    return Group(head, Columns([*parts, _cache(window)], padding=(0, 2)))


def _traffic(window: Window) -> Table:
    table = _table("Traffic", "per s")
    outcomes = window.grown_by(f"{_GATEWAY}requests_total", "outcome")
    for outcome in ("ok", "aborted", "rejected", "client_error", "server_error"):
        name = outcome.replace("_", " ")
        table.add_row(f"requests {name}", _per_second(outcomes.get(outcome, 0), window))
    table.add_row("tokens generated", f"{window.rate(f'{_ENGINE}generated_tokens_total'):.1f}")
    table.add_row("prompt tokens", f"{window.rate(f'{_REQUEST}prompt_tokens_total'):.1f}")
    table.add_row("choices taken over", f"{window.rate(f'{_GATEWAY}recoveries_total'):.2f}")
    for state in ("open", "waiting"):
        table.add_row(f"requests {state}", f"{window.now(f'{_GATEWAY}{state}'):.0f}")
    return table


def _latency(window: Window) -> Table:
    table = _table("Latency", "p50", "p95")
    for name, metric in (
        ("first token", f"{_GEN_AI}time_to_first_token_seconds"),
        ("per token", f"{_GEN_AI}time_per_output_token_seconds"),
        ("request", f"{_GEN_AI}request_duration_seconds"),
        ("queue", f"{_REQUEST}queue_duration_seconds"),
        ("step", f"{_ENGINE}step_duration_seconds"),
    ):
        table.add_row(name, *(_seconds_of(window.quantile(q, metric)) for q in (0.5, 0.95)))
    return table


def _speculation(window: Window) -> Table:
    table = _table("Speculation", "", "")
    rounds = window.grown(f"{_ENGINE}rounds_total")
    accepted = window.grown(f"{_ENGINE}accepted_tokens_total")
    drafted = window.grown(f"{_ENGINE}drafted_nodes_total")
    plain, spent = (window.grown(f"{_ENGINE}{n}_time_seconds_total") for n in ("plain", "decode"))
    table.add_row("tokens per round", f"{accepted / rounds + 1:.2f}" if rounds else "-", "")
    table.add_row("candidates per round", f"{drafted / rounds:.2f}" if rounds else "-", "")
    table.add_row("speed-up, estimated", f"{plain / spent:.2f}" if spent else "-", "")
    offered = window.grown_by(f"{_REQUEST}offered_by_depth_total", "depth")
    kept = window.grown_by(f"{_REQUEST}accepted_by_depth_total", "depth")
    depths = sorted((d for d, count in offered.items() if count and d.isdecimal()), key=int)
    for depth in depths:
        share = kept.get(depth, 0.0) / offered[depth]
        table.add_row(f"kept at depth {depth}", f"{share:.0%}", _bar(share))
    return table


def _batch(window: Window) -> Table:
    table = _table("Batch", "", "")
    for state in ("running", "waiting", "loading"):
        table.add_row(state, f"{window.now(f'{_ENGINE}sequences', state=state):.0f}", "")
    pages = window.now("ray_specdec_kv_pages")
    used = window.now("ray_specdec_kv_pages", state="used") / pages if pages else 0.0
    table.add_row("KV pages in use", f"{used:.0%}", _bar(used))
    steps = window.grown(f"{_ENGINE}steps_total")
    table.add_row("steps per s", f"{steps / window.seconds:.1f}" if window.seconds else "-", "")
    rows = window.grown(f"{_ENGINE}rows_total")
    table.add_row("rows per step", f"{rows / steps:.1f}" if steps else "-", "")
    phases = window.grown_by(f"{_ENGINE}phase_time_seconds_total", "phase")
    whole = sum(phases.values())
    for phase, seconds in sorted(phases.items(), key=lambda item: -item[1]):
        if steps and seconds:
            mean = _seconds_of(seconds / steps)
            table.add_row(f"  {phase}", mean, _bar(seconds / whole))
    return table


def _cache(window: Window) -> Table:
    table = _table("Prefix cache", "", "")
    prompts = window.grown(f"{_REQUEST}prompt_tokens_total")
    tiers = window.grown_by(f"{_REQUEST}cached_tokens_total", "tier")
    for tier in ("pool", "store"):
        share = tiers.get(tier, 0.0) / prompts if prompts else 0.0
        table.add_row(f"tokens found in the {tier}", f"{share:.0%}", _bar(share))
    states = ("closed", "half_open", "open")
    told = {state: window.now(f"{_STORE}breaker", state=state) for state in states}
    if not any(told.values()):
        table.add_row("store", "none", "")
        return table
    table.add_row("breaker", " ".join(f"{n:.0f} {state}" for state, n in told.items() if n), "")
    for direction in ("read", "write"):
        size = window.rate(f"{_STORE}transfer_bytes_total", direction=direction)
        table.add_row(f"{direction}, MB/s", f"{size / 1e6:.2f}", "")
        calls = window.grown(f"{_STORE}calls_total", direction=direction)
        taken = window.grown(f"{_STORE}time_seconds_total", direction=direction)
        table.add_row(f"{direction}, mean", _seconds_of(taken / calls if calls else None), "")
    table.add_row("blocks not believed", f"{window.grown(f'{_STORE}rejected_total'):.0f}", "")
    return table


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="left" if not column else "right")
    return table


def _bar(share: float) -> str:
    return "█" * round(min(1.0, max(0.0, share)) * _BAR)


def _per_second(count: float, window: Window) -> str:
    return f"{count / window.seconds:.2f}" if window.seconds else "-"


def _seconds_of(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _seconds(text: str) -> float:
    """Half a second or more; ValueError otherwise, which argparse tells."""
    seconds = float(text)
    if not 0.5 <= seconds <= 3600:
        raise ValueError(text)
    return seconds
