"""PromQL over the metrics of the table. The window of a rate is written ``$__rate_interval``,
which Grafana fills in; others use :func:`filled`.
"""

from __future__ import annotations

import re

from deployments.metrics.definition import Metric

WINDOW = "$__rate_interval"
#: Narrows a panel to what the dashboard's variables choose.
CHOSEN = 'deployment=~"$deployment",replica=~"$replica",model=~"$model"'


def selector(metric: Metric, more: str = "", part: str = "") -> str:
    """A metric's series, as chosen.

    Args:
        metric: whose.
        more: further matchers.
        part: of a histogram: ``_bucket``, ``_sum`` or ``_count``.
    """
    matchers = ",".join(filter(None, (CHOSEN, more)))
    return f"{metric.prometheus}{part}{{{matchers}}}"


def rate(metric: Metric, by: str = "", more: str = "", part: str = "") -> str:
    """Growth per second, summed; ``by`` names the labels kept."""
    return f"sum{_by(by)}(rate({selector(metric, more, part)}[{WINDOW}]))"


def total(metric: Metric, by: str = "", more: str = "") -> str:
    """A gauge, summed over replicas."""
    return f"sum{_by(by)}({selector(metric, more)})"


def ratio(above: str, below: str) -> str:
    """A quotient."""
    return f"({above}) / ({below})"


def quantile(share: float, metric: Metric) -> str:
    """Of a histogram, over all its series."""
    if metric.kind != "histogram":
        raise ValueError(f"{metric.name} is no histogram")
    return f"histogram_quantile({share}, {rate(metric, 'le', part='_bucket')})"


def filled(query: str, window: str) -> str:
    """The query for all deployments, replicas and models, with that window."""
    chosen = re.sub(r"\$(deployment|replica|model)\b", ".*", query)
    return chosen.replace(WINDOW, window)


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""
