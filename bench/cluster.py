"""A Ray cluster of several hosts on one machine, as KubeRay would run it: a head without replicas,
workers, the head's tables in a Valkey of its own, token authentication.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from bench.network import Host, hosts
from bench.valkey import Valkey

ROOT = Path(__file__).resolve().parent.parent
_GCS_PORT, _DASHBOARD_PORT, SERVE_PORT = 6379, 8265, 8000
_LIMIT_S = 180.0


class Cluster:
    """Hosts, of which the first is the head; see :func:`cluster`."""

    def __init__(self, folder: Path, machines: list[Host], valkey: str, password: str) -> None:
        self.folder = folder
        self.head, *self.workers = machines
        self._token = secrets.token_hex(32)
        self._valkey, self._password = valkey, password
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.seen = folder / "t"
        self.seen.mkdir()

    def start_head(self) -> None:
        """Start the head; after a loss it finds its tables in Valkey."""
        self._start(
            self.head,
            [
                "--head",
                f"--port={_GCS_PORT}",
                f"--dashboard-host={self.head.address}",
                f"--dashboard-port={_DASHBOARD_PORT}",
                "--num-cpus=0",
                f"--redis-password={self._password}",
            ],
        )
        self.wait(lambda: self._dashboard("/api/version") is not None, "the head answers")

    def start_worker(self, host: Host, cpus: int) -> None:
        """Start a node that takes replicas."""
        self._start(host, [f"--address={self.head.address}:{_GCS_PORT}", f"--num-cpus={cpus}"])

    def terminate(self, host: Host) -> subprocess.Popen[bytes]:
        """Ask a node to stop, as Kubernetes does: it drains first."""
        process = self._processes[host.name]
        # the host's first process is the only child of what made the host for it
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        (first,) = map(int, children.split())
        os.kill(first, signal.SIGTERM)
        return process

    def deploy(self, config: dict[str, Any]) -> None:
        """``serve deploy``, again where the head is not yet ready for it, as KubeRay does.

        Raises:
            TimeoutError: it is refused for too long.
        """
        path = self.folder / "serve.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        address = f"http://{self.head.address}:{_DASHBOARD_PORT}"
        command = [sys.executable, "-m", "ray.serve.scripts", "deploy", str(path), "-a", address]

        def deployed() -> bool:
            with (self.folder / "deploy.log").open("ab") as console:
                return (
                    subprocess.run(
                        command, env=self._env(), cwd=ROOT, stdout=console, stderr=console
                    ).returncode
                    == 0
                )

        self.wait(deployed, "serve deploy")

    def status(self) -> dict[str, Any]:
        """What the dashboard says of Serve; nothing where it does not answer."""
        return self._dashboard("/api/serve/applications/") or {}

    def replicas(self, deployment: str) -> list[tuple[str, str]]:
        """Replicas of a deployment: the address of the host, and the state."""
        applications = self.status().get("applications") or {}
        found = []
        for application in applications.values():
            described = (application.get("deployments") or {}).get(deployment) or {}
            found += [
                (str(replica.get("node_ip")), str(replica.get("state")))
                for replica in described.get("replicas") or ()
            ]
        return found

    def running(self, deployment: str) -> list[str]:
        """Addresses of the hosts where replicas of a deployment run."""
        return [host for host, state in self.replicas(deployment) if state == "RUNNING"]

    def deployed(self) -> object:
        """The configuration of the application, as Serve knows it; None where it does not."""
        applications = self.status().get("applications") or {}
        return [application.get("deployed_app_config") for application in applications.values()]

    def logged(self, host: Host, deployment: str, text: str) -> int:
        """How many lines a deployment's replicas on a host have logged with ``text`` in them."""
        logs = (self.folder / host.name).glob(f"session_2*/logs/serve/replica_*_{deployment}_*.log")
        return sum(path.read_text(errors="replace").count(text) for path in logs)

    def url(self, host: Host) -> str:
        """The door of a host's proxy."""
        return f"http://{host.address}:{SERVE_PORT}"

    def healthy(self, host: Host) -> bool:
        """Whether a host's proxy takes requests."""
        try:
            with urllib.request.urlopen(f"{self.url(host)}/-/healthz", timeout=2) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def wait(self, condition: Callable[[], bool], what: str, limit_s: float = _LIMIT_S) -> float:
        """Seconds until a condition holds.

        Raises:
            TimeoutError: it takes too long; with the end of the consoles.
        """
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > limit_s:
                found = [
                    *self.folder.glob("*.log"),
                    *self.folder.glob("*/session_2*/logs/serve/*.log"),
                ]
                logs = "\n".join(
                    f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}"
                    for path in sorted(found)
                )
                raise TimeoutError(f"not within {limit_s:g} s: {what}\n{self.status()}\n{logs}")
            time.sleep(0.2)
        return time.monotonic() - began

    def _start(self, host: Host, arguments: list[str]) -> None:
        own = self.folder / host.name
        own.mkdir(exist_ok=True)
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        self._processes[host.name] = host.start(
            [
                *ray,
                *arguments,
                f"--node-ip-address={host.address}",
                f"--temp-dir={self.seen}",
                "--object-store-memory=100000000",
                "--disable-usage-stats",
            ],
            self._env(),
            self.folder / f"{host.name}.log",
            (own, self.seen),
        )

    def _env(self) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
            "RAY_REDIS_ADDRESS": self._valkey,
            "RAY_external_storage_namespace": "specdec",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "60",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "RAY_raylet_start_wait_time_s": "120",
        }

    def _dashboard(self, path: str) -> dict[str, Any] | None:
        request = urllib.request.Request(
            f"http://{self.head.address}:{_DASHBOARD_PORT}{path}",
            headers={"Authorization": f"Bearer {self._token}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except (OSError, urllib.error.URLError, ValueError):
            return None


@contextmanager
def cluster(workers: int) -> Iterator[Cluster]:
    """Hosts for a head and ``workers`` nodes, and the Valkey; no Ray runs there yet."""
    folder = Path(tempfile.mkdtemp(prefix="sd"))  # short: Ray's sockets lie below it
    password = secrets.token_hex(16)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        bridge, machines = stack.enter_context(hosts(workers + 1))
        options = ("--requirepass", password, "--bind", bridge, "127.0.0.1")
        valkey = Valkey(folder, *options)
        stack.callback(valkey.stop)
        yield Cluster(folder, machines, f"{bridge}:{valkey.port}", password)
