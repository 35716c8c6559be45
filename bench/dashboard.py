"""The dashboard and the alerts against a real server and a real Prometheus.

Every query of every panel, and every value that an alert compares, must give data under load; then
faults are made one at a time, and the alert that is meant for each must fire and no other. The
rules are those of k8s/prometheus/rules.yaml with shorter windows (TRIAL), since nobody waits an
hour for a trial, and with room for a slow machine (ROOMY).

    python -m bench.dashboard
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from bench.panels import draw
from bench.prometheus import Prometheus, check_rules
from bench.server import ROOT, Server, get, running_server
from bench.traffic import Traffic, flood, wait_for
from bench.valkey import Valkey
from deployments.metrics import table
from deployments.metrics.views.__main__ import RULES
from deployments.metrics.views.alerts import Thresholds, Timing, alerts, rules
from deployments.metrics.views.panels import ROWS
from deployments.metrics.views.promql import filled
from specdec.config import DEFAULT_MODEL

TRIAL = Timing(short="15s", long="30s", presence="10s", hold="3s", interval="1s")
#: In so short a time acceptance varies by much.
ROOMY = Thresholds(acceptance=0.1, first_token_s=16, waiting=8)
WINDOW = "15s"
_SHIPPED = ROOT / "specdec/heads/shipped/smollm2-135m-instruct"
_FIRE_S = 120.0
#: Answers that hold little of what came before, so that the heads have to draft.
_STORY = "Tell a short story about house number {}."


def settings(store: str | None, heads: str = "auto") -> dict[str, dict[str, Any]]:
    """A server with a small pool and few sequences, so that all there is to see happens."""
    cache = {} if store is None else {"store": {"url": store, "breaker_failures": 2}}
    return {
        "engine": {
            "kv": {"pages": 160},
            "batch": {"max_sequences": 4, "max_waiting": 64},
            "speculation": {"heads": heads},
            "prefix_cache": cache,
        },
        "gateway": {"queue": {"wait_s": 600}},  # a flood waits, and is not turned away
        "metrics": {"report_interval_s": 1, "interval_s": 0.5},
    }


@contextmanager
def watched(server: Server, folder: Path) -> Iterator[Prometheus]:
    """A Prometheus with the trial's rules."""
    present = f"{table.UP.prometheus}{{"  # else the first seconds look as if no worker lived
    wait_for(lambda: present in get(server.metrics_url)[1].decode(), "figures", _FIRE_S)
    prometheus = Prometheus(folder, server.metrics_url, rules(TRIAL, ROOMY))
    try:
        yield prometheus
    finally:
        prometheus.stop()


def queries() -> dict[str, tuple[str, str | None]]:
    """Every query of the dashboard, and every value that an alert compares, by a name; with the
    label that tells its lines apart, if one does.
    """
    found: dict[str, tuple[str, str | None]] = {}
    for row in ROWS:
        for panel in row.panels:
            for query in panel.queries:
                label = re.fullmatch(r"{{(\w+)}}", query.legend)
                found[f"{row.title}: {panel.title}: {query.legend}"] = (
                    filled(query.expression, WINDOW),
                    None if label is None else label[1],
                )
    for alert in alerts(TRIAL, ROOMY):
        found |= {f"{alert.name} {i}": (value, None) for i, value in enumerate(alert.values, 1)}
    return found


def without_data(prometheus: Prometheus) -> list[str]:
    """Names of the queries that give no number now."""
    return [
        name
        for name, (query, label) in queries().items()
        if not _has_number(prometheus.query(query), label)
    ]


def _has_number(series: Sequence[dict[str, Any]], label: str | None) -> bool:
    return any(
        math.isfinite(float(one["value"][1])) and (label is None or one["metric"].get(label))
        for one in series
    )


class Fired:
    """Notes every alert that fires while the block runs."""

    def __init__(self, prometheus: Prometheus) -> None:
        self._prometheus = prometheus
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.names: set[str] = set()

    def __enter__(self) -> Fired:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(0.5):
            self.names |= self._prometheus.firing()


def expect(prometheus: Prometheus, wanted: str, fault: Callable[[], None]) -> float:
    """Make a fault and wait for its alert; seconds that it took to fire.

    Raises:
        AssertionError: it does not fire, or another does.
    """
    assert not prometheus.firing(), f"before anything was done: {prometheus.firing()}"
    with Fired(prometheus) as fired:
        fault()
        seconds = wait_for(lambda: wanted in fired.names, f"{wanted}: {fired.names}", _FIRE_S)
    assert fired.names == {wanted}, f"meant was {wanted}, these fired: {sorted(fired.names)}"
    return seconds


def bad_heads(folder: Path) -> Path:
    """The shipped heads with their weights shuffled, and without the probe that would tell."""
    folder.mkdir(parents=True)
    config = json.loads((_SHIPPED / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"probe": None}))
    weights = load_file(_SHIPPED / "heads.safetensors")
    mixed = {
        name: weight.flip(0).contiguous()
        if weight.is_floating_point() and weight.ndim > 1
        else weight
        for name, weight in weights.items()
    }
    save_file(mixed, folder / "heads.safetensors")
    return folder


def measure(options: argparse.Namespace) -> int:
    """All of it; prints what it sees."""
    print(check_rules(RULES).strip())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        valkey = Valkey(folder)
        with (
            running_server(settings(valkey.url), DEFAULT_MODEL) as server,
            watched(server, folder / "first") as prometheus,
        ):
            with Traffic(server):
                time.sleep(options.seconds)
                seconds = wait_for(lambda: not without_data(prometheus), "data", _FIRE_S)
                print(f"{len(queries())} queries give data ({seconds:.0f} s more were waited)")
                print(f"wrote {draw(prometheus, options.seconds, options.out)}")
                if options.faults:
                    took = expect(prometheus, "SpecdecBreakerOpen", valkey.stop)
                    print(f"store stopped: SpecdecBreakerOpen after {took:.0f} s, no other")
                    valkey.start()
                    wait_for(lambda: not prometheus.firing(), "calm again", _FIRE_S)
            if options.faults:
                with ThreadPoolExecutor(1) as threads:

                    def fill() -> None:
                        threads.submit(flood, server, 48, 100)

                    took = expect(prometheus, "SpecdecQueueGrowth", fill)
                print(f"queue flooded: SpecdecQueueGrowth after {took:.0f} s, no other")
        valkey.stop()
        if options.faults:
            heads = bad_heads(folder / "heads")
            with (
                running_server(settings(None, str(heads)), DEFAULT_MODEL) as server,
                watched(server, folder / "second") as prometheus,
                Traffic(server, clients=1, mistakes=False, question=_STORY),
            ):
                took = expect(prometheus, "SpecdecAcceptanceDrop", lambda: None)
                print(f"bad heads: SpecdecAcceptanceDrop after {took:.0f} s, no other")
    return 0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120, help="of load before the picture")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/dashboard.png")
    parser.add_argument(
        "--faults", action=argparse.BooleanOptionalAction, default=True, help="make them"
    )
    return measure(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
