"""The dashboard as Grafana reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deployments.metrics import table
from deployments.metrics.views.panels import Panel, Row

#: The grid is 24 wide.
_WIDTH, _HEIGHT = 8, 8
_PER_ROW = 24 // _WIDTH
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard(rows: Sequence[Row]) -> dict[str, Any]:
    """All rows, with variables for data source, deployment, replica and model."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        place = {"h": 1, "w": 24, "x": 0, "y": y}
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": place,
                "panels": [],
            }
        )
        y += 1
        for index, panel in enumerate(row.panels):
            x = index % _PER_ROW * _WIDTH
            place = {"h": _HEIGHT, "w": _WIDTH, "x": x, "y": y + index // _PER_ROW * _HEIGHT}
            panels.append(_panel(panel, len(panels) + 1, place))
        y += -(-len(row.panels) // _PER_ROW) * _HEIGHT
    return {
        "uid": "specdec",
        "title": "specdec",
        "tags": ["specdec", "ray"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 8}},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def _variables() -> list[dict[str, Any]]:
    source = {"name": "datasource", "label": "Data source", "type": "datasource"}
    labels = [
        {
            "name": name,
            "label": name.capitalize(),
            "type": "query",
            "datasource": _SOURCE,
            # each worker and each gateway has one of these, busy or idle
            "query": {
                "query": f'label_values({{__name__=~"{table.UP.prometheus}|'
                f'{table.OPEN.prometheus}"}}, {name})',
                "refId": name,
            },
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }
        for name in ("deployment", "replica", "model")
    ]
    return [source | {"query": "prometheus"}, *labels]
