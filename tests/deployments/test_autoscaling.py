"""How many workers a load asks for. With real Ray: `make bench-autoscale`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig

from deployments.autoscaling import WorkerScaling, serve_autoscaling, wanted
from deployments.config import AppConfig
from specdec.config import validate_settings
from specdec.errors import ConfigError

TARGETS = {"requests": 4.0, "kv": 0.8, "tokens": 1000.0}


def context(requests: float, **figures: list[float]) -> Any:
    return SimpleNamespace(
        total_num_requests=requests,
        aggregated_metrics={
            name: {f"replica{i}": value for i, value in enumerate(values)}
            for name, values in figures.items()
        },
    )


@pytest.mark.parametrize(
    ("stats", "requests", "count", "name"),
    [
        ({"requests": 8, "kv": 0.4, "tokens": 100}, 8, 2.0, "requests"),
        ({"requests": 2, "kv": 1.6, "tokens": 100}, 2, 2.0, "kv"),
        ({"requests": 2, "kv": 0.4, "tokens": 3000}, 2, 3.0, "tokens"),
        # a queue that no worker has seen yet: only Serve counts it
        ({"requests": 2, "kv": 0.1, "tokens": 10}, 20, 5.0, "requests"),
        ({}, 0, 0.0, "requests"),
    ],
)
def test_the_figure_that_asks_for_the_most_counts(
    stats: dict[str, float], requests: float, count: float, name: str
) -> None:
    found, by = wanted(stats, requests, TARGETS)
    assert found == pytest.approx(count)
    assert by == name


def test_figures_of_all_workers_are_added() -> None:
    count, _ = WorkerScaling(**TARGETS)(context(3, kv=[0.9, 0.9, 0.6], tokens=[10, 10, 10]))
    assert count == pytest.approx(3.0)
    # no worker has reported yet, or none is left
    assert WorkerScaling(**TARGETS)(context(0))[0] == 0
    nothing: Any = SimpleNamespace(total_num_requests=8, aggregated_metrics=None)
    assert WorkerScaling(**TARGETS)(nothing)[0] == pytest.approx(2.0)


def test_serve_takes_the_settings_and_the_policy() -> None:
    config = validate_settings(
        AppConfig,
        {
            "engine": {"batch": {"max_sequences": 64}},
            "worker": {"replicas": 2, "autoscaling": {"min_replicas": 0, "max_replicas": 5}},
        },
    )
    told = serve_autoscaling(config)["autoscaling_config"]
    serve = AutoscalingConfig(**told)
    assert (serve.min_replicas, serve.initial_replicas, serve.max_replicas) == (0, 2, 5)
    # as the controller does: unpickle the class, make it with its arguments
    policy = serve.policy.get_policy()(**told["policy"]["policy_kwargs"])
    assert policy(context(96, kv=[0.1]))[0] == pytest.approx(2.0)  # 48 a worker: 3/4 of 64
    assert serve_autoscaling(AppConfig()) == {}


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        ({"autoscaling": {"min_replicas": 3, "max_replicas": 2}}, "min_replicas"),
        ({"replicas": 9, "autoscaling": {"max_replicas": 4}}, "replicas"),
        ({"autoscaling": {"target_kv": 1.5}}, "target_kv"),
        ({"autoscaling": {"target_request": 1}}, "target_request"),
    ],
)
def test_wrong_settings_are_named(worker: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        validate_settings(AppConfig, {"worker": worker})
