"""One server for all tests of the HTTP side."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.server import Server, running_server
from bench.strict import StrictServer, strict_server
from specdec.config import DEFAULT_MODEL


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of another server: leave out what asks for our own, expect the differences that are known."""
    if config.getoption("--server") is None:
        return
    ours = pytest.mark.skip(reason="asks for our own server")
    for item in items:
        if item.get_closest_marker("own_server"):
            item.add_marker(ours)
    file = config.getoption("--differences")
    if file is not None:
        expect_differences(file, items)


def expect_differences(file: Path, items: list[pytest.Item]) -> None:
    """Mark the tests that a file names as failing.

    Raises:
        pytest.UsageError: it names a test of these modules that does not exist.
    """
    names = {f"{item.path.name}::{item.name}": item for item in items}
    modules = {item.path.name for item in items}
    for entry in tomllib.loads(file.read_text())["difference"]:
        for name in entry["tests"]:
            if name in names:
                run = not entry.get("ends_server", False)
                names[name].add_marker(pytest.mark.xfail(reason=entry["reason"], run=run))
            elif name.partition("::")[0] in modules and len(items) > 1:
                raise pytest.UsageError(f"{file}: no test {name}")


@pytest.fixture(scope="session")
def server(pytestconfig: pytest.Config) -> Iterator[Server]:
    """The default model as it is served by default, on a free port, with room for few; or the
    server that ``--server`` names.

    The pool is small and few sequences run at once, so that requests also wait, and are
    preempted where their pages run out.
    """
    url = pytestconfig.getoption("--server")
    if url is not None:
        yield Server(url, pytestconfig.getoption("--model") or DEFAULT_MODEL, Path("/dev/null"))
        return
    changes: dict[str, dict[str, Any]] = {
        "engine": {
            "model": DEFAULT_MODEL,
            "kv": {"pages": 192},
            "batch": {
                "max_sequences": 12,
                "max_waiting": 48,
                "token_budget": 128,
                "prefill_chunk": 64,
            },
        },
        "gateway": {"debug": True, "queue": {"max_waiting": 40}},
    }
    with running_server(changes, DEFAULT_MODEL) as found:
        yield found


@pytest.fixture(scope="session")
def strict() -> Iterator[StrictServer]:
    """A second server, which asks for a key, with less room and a short queue."""
    with strict_server() as found:
        yield found


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client
