"""``python -m deployments.metrics.views``: writes what is made from the table of metrics.

``k8s/grafana/specdec.json``, ``k8s/prometheus/rules.yaml`` and the table in
``docs/observability.md``. With ``--check`` it only says which of them are out of date.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import yaml

from deployments.metrics.definition import Metric
from deployments.metrics.table import METRICS
from deployments.metrics.views.alerts import rules
from deployments.metrics.views.grafana import dashboard
from deployments.metrics.views.panels import ROWS

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD = ROOT / "k8s/grafana/specdec.json"
RULES = ROOT / "k8s/prometheus/rules.yaml"
DOCS = ROOT / "docs/observability.md"
BEGIN, END = "<!-- metrics: made by `make views` -->", "<!-- /metrics -->"


def contents() -> dict[Path, str]:
    """What each file is to hold."""
    docs = DOCS.read_text(encoding="utf-8")
    before, _, rest = docs.partition(BEGIN)
    _, _, after = rest.partition(END)
    return {
        DASHBOARD: json.dumps(dashboard(ROWS), indent=1) + "\n",
        RULES: "# Made by `make views` from deployments/metrics/views/alerts.py.\n"
        + yaml.safe_dump(rules(), sort_keys=False, width=10_000),
        DOCS: f"{before}{BEGIN}\n{markdown()}{END}{after}",
    }


def markdown() -> str:
    """The table for the docs."""
    lines = ["| Prometheus | kind | labels | what |", "| --- | --- | --- | --- |"]
    lines += [f"| {' | '.join(_cells(metric))} |" for metric in METRICS]
    return "\n".join(lines) + "\n"


def _cells(metric: Metric) -> list[str]:
    labels = ", ".join(f"`{label.prometheus}`" for label in metric.labels)
    return [f"`{metric.prometheus}`", metric.kind, labels, metric.help]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    stale = [
        (path, text)
        for path, text in contents().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path, text in stale:
        print(f"{path.relative_to(ROOT)}: {'out of date' if options.check else 'written'}")
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
