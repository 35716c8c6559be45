"""The application with simulated workers in a Ray of its own, and counted streams from it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.server import free_port
from bench.small_model import make_small_model

APP, WORKER = "specdec", "SimulatedWorker"
#: Serve's figures travel this often, in seconds; by default every 10, too seldom for a short ramp.
_PUSH_S = "1"


@dataclass(frozen=True)
class LocalApp:
    """Where it answers, and the name of its model."""

    url: str
    model: str


@contextmanager
def local_app(arguments: Mapping[str, Any], step_s: float) -> Iterator[LocalApp]:
    """Serve the small model for the time of the block.

    Args:
        arguments: of the application, by section.
        step_s: how long a step takes.
    """
    folder = Path(tempfile.mkdtemp(prefix="sd"))  # short: Ray's sockets lie below it
    os.environ.update(
        RAY_TMPDIR=str(folder),
        RAY_USAGE_STATS_ENABLED="0",
        RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S=_PUSH_S,
        RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S=_PUSH_S,
    )
    import ray  # reads them
    from ray import serve

    from bench.simulated import SimulatedConfig, build_app
    from specdec.config import validate_settings

    model = make_small_model(folder / "small")
    engine = {"model": str(model), "threads": 1, "dtype": "float32", "self_check": False}
    merged = {**arguments, "step_s": step_s, "engine": {**engine, **arguments.get("engine", {})}}
    config = validate_settings(SimulatedConfig, merged)
    ray.init(
        address="local",
        namespace="serve",
        include_dashboard=False,
        num_cpus=16,  # logical: steps sleep
        object_store_memory=100 * 2**20,
        log_to_driver=False,
    )
    try:
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build_app(config), name=APP, route_prefix="/")
        yield LocalApp(f"http://127.0.0.1:{port}", config.model_name)
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def replicas() -> int:
    """Workers that run now."""
    from ray import serve
    from ray.serve._private.common import ReplicaState

    states = serve.status().applications[APP].deployments[WORKER].replica_states
    return int(states.get(ReplicaState.RUNNING, 0))


@dataclass
class Tally:
    """What streams came to.

    Attributes:
        done: streams that ended as they should.
        failed: what went wrong, one text a stream.
        tokens: received, those of streams that have not ended included.
        first_s: seconds to the first token, of each stream.
    """

    done: int = 0
    failed: list[str] = field(default_factory=list)
    tokens: int = 0
    first_s: list[float] = field(default_factory=list)


class Streams:
    """Keeps a number of streams open until it is stopped, and counts what they bring.

    Args:
        app: to ask.
        tokens: of each answer.
    """

    def __init__(self, app: LocalApp, tokens: int) -> None:
        self._app = app
        self._tokens = tokens
        self._lock = threading.Lock()
        self._wanted = 0
        self._threads: list[threading.Thread] = []
        self.tally = Tally()

    def keep(self, count: int) -> None:
        """From now on keep ``count`` streams open; surplus ones end with their answer."""
        self._wanted = count
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        for number in range(count):
            if number >= len(self._threads):
                thread = threading.Thread(target=self._run, args=(number,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def stop(self) -> None:
        """Let them end."""
        self._wanted = 0
        for thread in self._threads:
            thread.join(120)

    def _run(self, number: int) -> None:
        with httpx.Client(timeout=120) as client:
            while number < self._wanted:
                self._one(client, number)

    def _one(self, client: httpx.Client, number: int) -> None:
        body = {
            "model": self._app.model,
            "prompt": f"w{number} w{number % 7} w1 w2",
            "max_tokens": self._tokens,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "temperature": 1.0,
            "speculation": {"enabled": False},
        }
        began, first, tokens, ended = time.monotonic(), None, 0, False
        try:
            with client.stream("POST", f"{self._app.url}/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    raise httpx.HTTPError(f"{answer.status_code}: {answer.read().decode()[:200]}")
                for line in answer.iter_lines():
                    if line.startswith('data: {"error"'):
                        raise httpx.HTTPError(line)
                    if line == "data: [DONE]":
                        ended = True
                    elif line.startswith("data: "):
                        first = first or time.monotonic() - began
                        usage = json.loads(line.removeprefix("data: "))["usage"]
                        with self._lock:
                            self.tally.tokens += usage["completion_tokens"] - tokens
                        tokens = usage["completion_tokens"]
            if not ended:
                raise httpx.HTTPError("the stream broke off")
            if tokens != self._tokens:
                raise httpx.HTTPError(f"{tokens} tokens, not {self._tokens}")
        except httpx.HTTPError as error:
            with self._lock:
                self.tally.failed.append(f"{type(error).__name__}: {error}")
            time.sleep(0.2)
            return
        with self._lock:
            self.tally.done += 1
            self.tally.first_s.append(first or 0.0)
