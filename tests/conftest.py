"""What all tests share."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

with warnings.catch_warnings():  # what Ray warns of at import is Ray's
    warnings.simplefilter("ignore")
    import ray.serve
    import ray.serve.scripts  # noqa: F401

from bench.valkey import Valkey

# Tiny models are slower with more threads, and a second test process may run beside.
torch.set_num_threads(1)


def own_cores() -> None:
    """Keep this test process, and the servers that it starts, off the cores of the others.

    Two torch processes that share cores slow each other tenfold.
    """
    worker, count = (
        os.environ.get("PYTEST_XDIST_WORKER"),
        os.environ.get("PYTEST_XDIST_WORKER_COUNT"),
    )
    if worker is None or count is None:
        return
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= int(count):
        os.sched_setaffinity(0, cores[int(worker.removeprefix("gw")) :: int(count)])


own_cores()


def pytest_addoption(parser: pytest.Parser) -> None:
    """For ``python -m bench.conformance``."""
    group = parser.getgroup("conformance")
    group.addoption("--server", help="URL of a server that already runs, in place of our own")
    group.addoption("--model", help="name under which it serves")
    group.addoption("--differences", type=Path, help="TOML file of what it answers otherwise")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what talks to a real server, and put modules with slow tests first."""
    slow = set()
    for item in items:
        place = item.path.relative_to(item.config.rootpath)
        if item.get_closest_marker("slow") is not None:
            slow.add(item.path)
            if place.parts[1] == "deployments":
                item.add_marker(pytest.mark.served)
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    """A server of the test's own, to be ill-treated."""
    server = Valkey(tmp_path)
    yield server
    server.stop()
