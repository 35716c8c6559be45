"""One server for all tests of the HTTP side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bench.server import Server, running_server
from bench.strict import StrictServer, strict_server
from specdec.config import DEFAULT_MODEL


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The default model as it is served by default, on a free port, with room for few.

    The pool is small and few sequences run at once, so that requests also wait, and are
    preempted where their pages run out.
    """
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
