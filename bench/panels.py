"""A picture of the dashboard's panels, from a real Prometheus: there is no Grafana to render it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from bench.prometheus import Prometheus
from deployments.metrics.views.panels import ROWS, Panel
from deployments.metrics.views.promql import filled

_COLUMNS = 4
_WINDOW = "15s"


def draw(prometheus: Prometheus, seconds: float, path: Path) -> Path:
    """Draw each panel over the last seconds, row by row as in the dashboard."""
    lines = [
        (row.title, row.panels[i : i + _COLUMNS])
        for row in ROWS
        for i in range(0, len(row.panels), _COLUMNS)
    ]
    figure, axes = plt.subplots(
        len(lines), _COLUMNS, figsize=(4.2 * _COLUMNS, 2.6 * len(lines)), squeeze=False
    )
    for (title, panels), places in zip(lines, axes, strict=True):
        places[0].text(
            -0.12, 1.2, title, transform=places[0].transAxes, fontsize=11, fontweight="bold"
        )
        for place in places[len(panels) :]:
            place.axis("off")
        for panel, place in zip(panels, places, strict=False):
            _draw(prometheus, panel, place, seconds)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    plt.close(figure)
    return path


def _draw(prometheus: Prometheus, panel: Panel, place: Axes, seconds: float) -> None:
    place.set_title(f"{panel.title} [{panel.unit}]", fontsize=8)
    place.tick_params(labelsize=6)
    for query in panel.queries:
        found = prometheus.range(
            filled(query.expression, _WINDOW), seconds, max(1.0, seconds / 120)
        )
        for series in found:
            values = [(float(at), float(value)) for at, value in series["values"]]
            if not values or (len(found) > 6 and not any(v for _, v in values)):
                continue  # of many lines, those that lie flat at 0 say nothing
            end = values[-1][0]
            label = _legend(query.legend, series["metric"])
            place.plot([at - end for at, _ in values], [v for _, v in values], lw=1, label=label)
    place.set_ylim(bottom=0)
    if place.lines:
        place.legend(fontsize=5, loc="upper left", framealpha=0.6)


def _legend(pattern: str, labels: dict[str, Any]) -> str:
    return re.sub(r"{{(\w+)}}", lambda found: str(labels.get(found[1], "")), pattern)
