"""Bars of tokens per second, one group per case."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Protocol

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


class Measured(Protocol):
    """What is drawn of an arm in a case."""

    speeds: list[float]


def plot_cases(results: Mapping[str, Mapping[str, Measured]], path: Path) -> Path:
    """Draw medians with the range over blocks, and write them to ``path``."""
    count = max(1, len(results))
    figure, axes = plt.subplots(1, count, figsize=(4 * count, 4), squeeze=False)
    for axis, (case, outcomes) in zip(axes[0], results.items(), strict=False):
        names = list(outcomes)
        middles = [median(outcomes[name].speeds) for name in names]
        low = [m - min(outcomes[n].speeds) for m, n in zip(middles, names, strict=True)]
        high = [max(outcomes[n].speeds) - m for m, n in zip(middles, names, strict=True)]
        axis.bar(range(len(names)), middles, yerr=[low, high], capsize=3)
        axis.set_xticks(range(len(names)), names, rotation=60, ha="right")
        axis.set_title(case)
        axis.set_ylabel("tokens/s")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
