"""Figures, log, dashboard, alerts and ``specdec top`` of a real server under mixed traffic."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.dashboard import expect, settings, watched, without_data
from bench.prometheus import Prometheus
from bench.server import ROOT, Server, running_server
from bench.traffic import Tally, Traffic, wait_for
from bench.valkey import Valkey
from deployments.metrics import table
from deployments.metrics.definition import Metric
from specdec.cli.scrape import Series, Window, fetch
from specdec.cli.top import frame
from specdec.config import DEFAULT_MODEL

pytestmark = pytest.mark.slow

#: Enough for every panel, and for each of three clients to make every kind of request.
LOAD_S = 15.0
SETTLED_S = 120.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("observed")


@pytest.fixture(scope="module")
def store(folder: Path) -> Iterator[Valkey]:
    store = Valkey(folder)
    yield store
    store.stop()


@pytest.fixture(scope="module")
def observed(store: Valkey, folder: Path) -> Iterator[Server]:
    changes: dict[str, dict[str, Any]] = settings(store.url)
    changes["engine"]["kv"] = {"pages": 400}  # none is preempted, so that rounds can be counted
    with running_server({**changes, "logs": {"folder": str(folder / "logs")}}, DEFAULT_MODEL) as s:
        yield s


@pytest.fixture(scope="module")
def prometheus(observed: Server, folder: Path) -> Iterator[Prometheus]:
    with watched(observed, folder / "prometheus") as found:
        yield found


def read(server: Server) -> Window:
    """All figures since the start."""
    window = Window(1e9)
    window.add(time.monotonic(), fetch(server.metrics_url))
    return window


def told(window: Window, metric: Metric, **labels: str) -> float:
    return window.now(metric.prometheus, **labels)


def finished(window: Window, metric: Metric) -> float:
    """Of choices that came to their end."""
    return sum(told(window, metric, finish_reason=reason) for reason in ("stop", "length"))


def series(found: Series) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    """All but the gauges', which come and go with the reports."""
    kept = ("_total", "_bucket", "_sum", "_count")
    return {
        (name, labels)
        for name, by_labels in found.items()
        for labels in by_labels
        if name.endswith(kept)
    }


@pytest.fixture(scope="module")
def tally(observed: Server, prometheus: Prometheus) -> Tally:
    """Of the traffic that all tests look at; under it every query gives data."""
    with Traffic(observed) as traffic:
        time.sleep(LOAD_S)
        missing: list[str] = []

        def complete() -> bool:
            missing[:] = without_data(prometheus)
            return not missing and traffic.tally.aborted > 0 and traffic.tally.errors > 0

        try:
            wait_for(complete, "data", SETTLED_S)
        except AssertionError:
            pytest.fail(f"no data: {missing}")
    return traffic.tally


def test_every_panel_and_every_alert_has_data_and_nothing_fires(
    tally: Tally, prometheus: Prometheus
) -> None:
    assert tally.answers > 3
    assert prometheus.firing() == set()
    names = {s["metric"]["__name__"] for s in prometheus.query('{__name__=~"ray_specdec_.*"}')}
    assert names >= {
        m.prometheus
        for m in table.METRICS
        if m.kind == "counter" and m.prometheus.startswith("ray_specdec")
    }


def test_figures_equal_what_clients_were_told(observed: Server, tally: Tally) -> None:
    def settled() -> bool:
        window = read(observed)
        return (
            told(window, table.ENDED, finish_reason="abort") == tally.aborted
            and finished(window, table.ENDED) == tally.answers
            and told(window, table.GENERATED) == told(window, table.OUTPUT_TOKENS)
            and told(window, table.REQUESTS, outcome="client_error") == tally.errors
            and told(window, table.OPEN) == 0
        )

    wait_for(settled, f"figures as told: {tally}", SETTLED_S)
    window = read(observed)
    assert finished(window, table.OUTPUT_TOKENS) == tally.completion
    assert finished(window, table.PROMPT_TOKENS) == tally.prompt
    assert finished(window, table.CACHED_TOKENS) == tally.cached > 0
    assert finished(window, table.REQUEST_ACCEPTED) == tally.accepted > 0
    # the first token of an answer comes with its prefill; each round gives one and what it accepts
    rounds = tally.completion - tally.accepted - tally.answers
    assert finished(window, table.REQUEST_ROUNDS) == rounds
    for live, ended in (
        (table.ROUNDS, table.REQUEST_ROUNDS),
        (table.ACCEPTED, table.REQUEST_ACCEPTED),
        (table.ACCEPTED, table.ACCEPTED_BY_DEPTH),
    ):
        assert told(window, live) == told(window, ended), ended.name
    assert told(window, table.DRAFTED) >= tally.drafted
    chats = {"endpoint": "/v1/chat/completions"}
    assert told(window, table.REQUESTS, outcome="ok", **chats) == tally.answers
    assert told(window, table.REQUESTS, outcome="aborted", **chats) == tally.aborted
    assert told(window, table.ERRORS) == tally.errors
    assert told(window, table.OPEN) == 0
    for metric, count in (
        (table.FIRST_TOKEN, tally.answers + tally.aborted),
        (table.QUEUE_TIME, tally.answers + tally.aborted),
        (table.DURATION, tally.answers + tally.aborted + tally.errors),
    ):
        assert window.now(f"{metric.prometheus}_count") == count, metric.name


def test_the_log_has_a_line_for_each_request(tally: Tally, folder: Path) -> None:
    (file,) = (folder / "logs").glob("requests_*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    chats = [line for line in lines if line["endpoint"] == "/v1/chat/completions"]
    assert Counter(line["outcome"] for line in chats) == {
        "ok": tally.answers,
        "aborted": tally.aborted,
        "client_error": tally.errors,
    }
    whole = [line for line in chats if line["outcome"] == "ok"]
    assert sum(line["completion_tokens"] for line in whole) == tally.completion
    assert sum(line["accepted_tokens"] for line in whole) == tally.accepted
    assert sum(line["cached_tokens"] for line in whole) == tally.cached
    assert all(0 < line["first_token_s"] <= line["total_s"] for line in whole)
    assert "Count from" not in file.read_text()


def test_random_requests_bring_no_new_series(observed: Server, tally: Tally) -> None:
    rng = random.Random(5)

    def ask(http: httpx.Client, word: str) -> None:
        body = {"model": word, "messages": [{"role": "user", "content": word}], "max_tokens": 1}
        headers = {"traceparent": f"00-{rng.getrandbits(128):032x}-{1:016x}-01", "X-Id": word}
        for path, changes in (
            ("/v1/chat/completions", {}),
            ("/v1/chat/completions", {word: 1}),
            ("/v1/completions", {"prompt": word, "messages": 1}),
            (f"/v1/models/{word}", {}),
            (f"/{word}", {}),
        ):
            answer = http.post(path, json={**body, **changes}, headers=headers)
            assert answer.status_code in (400, 404, 405)

    def counted() -> float:
        window = read(observed)
        return told(window, table.REQUESTS, outcome="client_error")

    with httpx.Client(base_url=observed.url, timeout=60) as http:
        began = counted()
        ask(http, "word")
        wait_for(lambda: counted() >= began + 5, "errors counted", SETTLED_S)
        before = series(fetch(observed.metrics_url))
        for _ in range(60):
            ask(http, f"w{rng.random()}")
        wait_for(lambda: counted() >= began + 305, "errors counted", SETTLED_S)
    assert series(fetch(observed.metrics_url)) <= before


def test_top_shows_it(observed: Server, tally: Tally) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "specdec.cli.main", "top", observed.metrics_url, "--once"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "", "COLUMNS": "200", "PYTHONPATH": str(ROOT)},
    )
    for words in ("Traffic", "Speculation", "Batch", "Prefix cache", "workers 1", "1 closed"):
        assert words in done.stdout, done.stdout
    from rich.console import Console

    window = read(observed)
    window._readings.appendleft((time.monotonic() - 60, {}))  # all since the start
    console = Console(width=220, record=True, file=io.StringIO())
    console.print(frame(window, observed.metrics_url))
    shown = console.export_text()
    rounds, accepted = (told(window, metric) for metric in (table.ROUNDS, table.ACCEPTED))
    assert f"{accepted / rounds + 1:.2f}" in shown
    assert "kept at depth 1" in shown
    wrong = subprocess.run(
        [sys.executable, "-m", "specdec.cli.main", "top", observed.url, "--once"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "", "PYTHONPATH": str(ROOT)},
    )
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("specdec top: http")
    assert "Traceback" not in wrong.stderr


def test_a_store_that_stops_fires_its_alert_and_no_other(
    observed: Server, tally: Tally, prometheus: Prometheus, store: Valkey
) -> None:
    """The short form of `make dashboard`, which makes the other faults too."""
    with Traffic(observed, clients=2, mistakes=False, seed=9):
        expect(prometheus, "SpecdecBreakerOpen", store.stop)
    window = read(observed)
    assert told(window, table.BREAKER_CHANGES, state="open") >= 1
    assert told(window, table.STORE_ERRORS) >= 1
    assert told(window, table.BREAKER, state="closed") == 0
