"""The real server with an API key and narrow limits, for what tries to break it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.server import Server, running_server
from specdec.api_keys import ApiKey, digest_of, new_secret
from specdec.config import DEFAULT_MODEL

_SETTLE_S = 120.0


@dataclass(frozen=True)
class StrictServer:
    """A running server and a key for it.

    Attributes:
        server: where it is.
        key: good for everything.
        limited_key: good for 5 requests and 400 tokens per minute, 2 requests at once.
        other_key: not for the model that is served.
        expired_key: no longer good.
    """

    server: Server
    key: str
    limited_key: str
    other_key: str
    expired_key: str

    @property
    def headers(self) -> dict[str, str]:
        """Of a request that may come in."""
        return {"Authorization": f"Bearer {self.key}"}

    def integrity(self) -> dict[str, Any]:
        """The engine's own report."""
        answer = httpx.get(f"{self.server.url}/debug/integrity", headers=self.headers, timeout=60)
        report: dict[str, Any] = answer.json()
        return report

    def check_rest(self) -> None:
        """Wait until nothing runs.

        Raises:
            AssertionError: something is left, or does not add up.
        """
        deadline = time.monotonic() + _SETTLE_S
        report = self.integrity()
        while (report["has_work"] or report["open_requests"]) and time.monotonic() < deadline:
            time.sleep(0.1)
            report = self.integrity()
        left = (report["problem"], report["has_work"], report["open_requests"])
        assert left == (None, False, 0), report
        assert report["pages_in_use"] == 0, report
        assert httpx.get(f"{self.server.url}/ready", timeout=30).status_code == 200


@contextmanager
def strict_server(**queue: float) -> Iterator[StrictServer]:
    """The default model with room for few.

    Args:
        queue: settings of ``gateway.queue``, in place of a short one.
    """
    secrets = [new_secret() for _ in range(4)]
    names = ("all", "limited", "other", "expired")
    digests = dict(zip(names, map(digest_of, secrets), strict=True))
    keys = [
        ApiKey("all", digests["all"]),
        ApiKey(
            "limited",
            digests["limited"],
            requests_per_minute=5,
            tokens_per_minute=400,
            concurrent_requests=2,
        ),
        ApiKey("other", digests["other"], models=frozenset({"another-model"})),
    ]
    lines = [key.line() for key in keys] + [f"expired:sha256:{digests['expired'].hex()}:2020-01-01"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "keys")
        file.write_text("\n".join(lines) + "\n")
        changes: dict[str, dict[str, Any]] = {
            "engine": {
                "model": DEFAULT_MODEL,
                "kv": {"pages": 128},
                "batch": {"max_sequences": 8, "token_budget": 128, "prefill_chunk": 64},
            },
            "gateway": {
                "debug": True,
                "limits": {"default_max_tokens": 8, "body_bytes": 2**18, "body_timeout_s": 5},
                "queue": {"max_waiting": 16, "wait_s": 20, **queue},
                "security": {"keys": {"file": str(file)}},
            },
        }
        with running_server(changes, DEFAULT_MODEL) as server:
            yield StrictServer(server, *secrets)
