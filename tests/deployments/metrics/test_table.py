"""The table of metrics, and all that is made from it."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics

from bench.prometheus import check_rules
from bench.server import ROOT
from deployments.errors import internal, invalid, unavailable
from deployments.metrics.definition import BASE_LABELS, OTHER, Label, counter, histogram
from deployments.metrics.labels import ERROR_TYPE, PHASE
from deployments.metrics.table import METRICS
from deployments.metrics.views.__main__ import BEGIN, DASHBOARD, DOCS, END, RULES, contents
from deployments.metrics.views.alerts import Timing, alerts, rules
from deployments.metrics.views.promql import filled

BY_NAME = {metric.prometheus: metric for metric in METRICS}
#: Words of PromQL that look like names of ours do not begin with it.
NAME = re.compile(r"\bray_(?:specdec|gen_ai)_\w+")


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return found + [rule["expr"] for rule in group["rules"]]


def base(name: str) -> str:
    """Of a histogram's sample the name in the table."""
    for suffix in ("_bucket", "_sum", "_count"):
        if name.removesuffix(suffix) in BY_NAME:
            return name.removesuffix(suffix)
    return name


def test_names_are_distinct_and_allowed() -> None:
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"[a-z_][a-z0-9_]*", metric.ray)
        assert metric.help.endswith(".")
        assert not set(BASE_LABELS) & {label.prometheus for label in metric.labels}
        for label in metric.labels:
            assert OTHER not in label.values


def test_the_conventions_have_these_names() -> None:
    ours = {metric.name for metric in METRICS if metric.name.startswith("gen_ai.")}
    theirs = {
        gen_ai_metrics.GEN_AI_SERVER_REQUEST_DURATION,
        gen_ai_metrics.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN,
        gen_ai_metrics.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN,
    }
    assert ours == theirs
    assert all(metric.unit == "s" for metric in METRICS if metric.name in ours)


def test_what_is_made_from_the_table_is_up_to_date() -> None:
    for path, text in contents().items():
        assert path.read_text() == text, f"{path.name} is out of date: make views"


def test_the_dashboard_and_the_rules_show_the_metrics_that_exist_and_all_of_them() -> None:
    shown = {base(name) for expression in expressions() for name in NAME.findall(expression)}
    assert shown - set(BY_NAME) == set()
    assert set(BY_NAME) - shown == set()


def test_labels_that_are_asked_for_exist() -> None:
    for expression in expressions():
        labels = (
            {
                label.prometheus
                for name in NAME.findall(expression)
                for label in BY_NAME[base(name)].labels
            }
            | set(BASE_LABELS)
            | {"le"}
        )
        asked = re.findall(r"\bby \((\w+)\)", expression) + re.findall(r'(\w+)[!=]~?"', expression)
        assert set(asked) <= labels, expression
    for metric in METRICS:  # values, too
        for label in metric.labels:
            for expression in expressions():
                for value in re.findall(
                    rf'{metric.prometheus}{{[^}}]*\b{label.prometheus}!?="(\w+)"', expression
                ):
                    assert value in label.values, expression


def test_the_docs_have_the_table() -> None:
    docs = DOCS.read_text()
    assert docs.count(BEGIN) == docs.count(END) == 1
    assert set(NAME.findall(docs[docs.index(BEGIN) : docs.index(END)])) == set(BY_NAME)
    for heading in ("## Metrics", "## Logs", "## Dashboards and alerts"):
        assert f"\n{heading}\n" in docs


def test_each_alert_has_its_paragraph() -> None:
    """Under the very heading that its runbook names."""
    text = (ROOT / "docs/operations.md").read_text()
    section = re.search(r"^## Alerts$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section is not None
    told = dict(re.findall(r"^### (\w+)\n\n(.+?)\n(?:\n|\Z)", section[1], re.MULTILINE | re.DOTALL))
    assert set(told) == {alert.name for alert in alerts()}
    assert all(len(paragraph) > 200 for paragraph in told.values())
    for rule in rules()["groups"][0]["rules"]:
        anchor = rule["annotations"]["runbook"].partition("#")[2]
        assert anchor in {name.lower() for name in told}


def test_prometheus_takes_the_rules(tmp_path: Path) -> None:
    assert f"{len(alerts())} rules found" in check_rules(RULES)
    short = tmp_path / "rules.yaml"
    short.write_text(yaml.safe_dump(dict(rules(Timing("15s", "30s", "10s", "3s", "1s")))))
    check_rules(short)
    broken = rules()
    broken["groups"][0]["rules"][0]["expr"] = "sum(("
    short.write_text(yaml.safe_dump(dict(broken)))
    with pytest.raises(RuntimeError, match="promtool"):
        check_rules(short)


def test_prometheus_can_read_every_query_of_the_dashboard(tmp_path: Path) -> None:
    queries = [filled(expression, "5m") for expression in expressions()]
    recorded = [{"record": f"query_{i}", "expr": query} for i, query in enumerate(queries)]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": recorded}]}, width=10_000))
    assert f"{len(queries)} rules found" in check_rules(path)


def test_the_dashboard_is_one_that_grafana_can_lay_out() -> None:
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text())
    names = [variable["name"] for variable in dashboard["templating"]["list"]]
    assert names == ["datasource", "deployment", "replica", "model"]
    taken: dict[tuple[int, int], int] = {}
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            assert x < 24
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["id"]) == panel["id"], "panels overlap"
        if panel["type"] != "row":
            assert panel["targets"]
            for target in panel["targets"]:
                assert '{deployment=~"$deployment",replica=~"$replica"' in target["expr"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_values_outside_a_closed_set_are_one() -> None:
    metric = counter("specdec.x", "1", "X.", Label("a", ("b",)), Label("c", ("d", "e")))
    assert metric.bounded(("b", "e")) == ("b", "e")
    assert metric.bounded(("B", "\n")) == (OTHER, OTHER)
    with pytest.raises(ValueError, match="zip"):
        metric.bounded(("b",))
    with pytest.raises(ValueError, match="rise"):
        histogram("specdec.y", "s", "Y.", buckets=(2, 1))


def test_the_number_of_series_has_a_bound_that_can_be_paid() -> None:
    for source in ("gateway", "worker"):
        most = sum(metric.series for metric in METRICS if metric.source == source)
        assert most < 1500, f"a {source} may make {most} series"


def test_the_sets_hold_what_the_code_makes() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "deployments").rglob("*.py"))
    codes = set(re.findall(r'code="(\w+)"', sources))
    codes |= {error.code for error in (invalid(None, ""), internal("x"), unavailable("", 1))}
    assert len(codes) > 6
    assert codes <= set(ERROR_TYPE.values), codes - set(ERROR_TYPE.values)
    phases = re.findall(r'phase\("(\w+)"\)', (ROOT / "specdec/engine.py").read_text())
    assert set(phases) == set(PHASE.values)


def test_buckets_rise_at_most_fivefold() -> None:
    """A quantile is known to the width of its bucket, and Ray tells sums no better."""
    for metric in METRICS:
        for low, high in pairwise(metric.buckets):
            assert high / low <= 5, metric.name
