"""Starts Ray and the application, and waits for the first healthy answer."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import ray
import yaml
from pydantic import BaseModel
from ray import serve
from ray.exceptions import RayError
from ray.serve import scripts
from ray.serve.exceptions import RayServeException
from ray.serve.schema import (
    ApplicationStatus,
    HTTPOptionsSchema,
    LoggingConfig,
    ServeApplicationSchema,
    ServeDeploySchema,
)

from deployments.config import AppConfig
from specdec.config import validate_settings
from specdec.errors import ConfigError, ModelError
from specdec.model.resolve import resolve_model

#: Requests and answers travel through it; 100 MB hold thousands of them.
_OBJECT_STORE_BYTES = 100 * 2**20
_POLL_S = 0.2
#: States of a deployment that hold its application up.
_BROKEN = ("DEPLOY_FAILED", "UNHEALTHY")


def launch(config_path: str, began: float) -> int:
    """Serve until SIGINT or SIGTERM.

    Args:
        config_path: of a configuration of Ray Serve.
        began: ``time.monotonic()`` at the start of the program.

    Returns:
        The exit status.
    """
    local = not os.environ.get("RAY_ADDRESS")
    try:
        address, applications = check_config(config_path)
        if local:  # fetch what is missing here, where its progress can be seen
            check_free(address.host, address.port)
            port = metrics_port(applications)
            if port is not None:
                check_free("", port, "metrics.port")
            for application in applications:
                resolve_model(application.engine.model, application.engine.cache_dir)
    except (OSError, ConfigError, ModelError) as error:
        print(f"specdec: {config_path}: {error}", file=sys.stderr)
        return 2
    print(f"specdec: starting {config_path}", flush=True)
    if local:
        report_ms = min(a.metrics.report_interval_s for a in applications) * 1000
        os.environ.update(RAY_metrics_report_interval_ms=str(int(report_ms)))
        ray.init(
            address="local",
            namespace="serve",
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            _metrics_export_port=port,
        )
    else:
        ray.init(namespace="serve")
    if local and (problem := missing_gpus(applications)) is not None:
        ray.shutdown()
        print(f"specdec: {config_path}: {problem}", file=sys.stderr)
        return 2
    # Not before: Ray sets its own. A shell's background jobs ignore SIGINT unless told otherwise.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    watcher = _Watcher(address, began)
    watcher.start()
    try:
        scripts.cli(["run", config_path], standalone_mode=False)
    except SystemExit:  # `serve run` ends so on Ctrl-C
        pass
    finally:
        watcher.stop()
        ray.shutdown()
    if watcher.problem is not None:
        print(f"specdec: {watcher.problem}", file=sys.stderr)
        return 1
    print("specdec: stopped", flush=True)
    return 0


@dataclass(frozen=True)
class Address:
    """Where the server listens; with TLS where the configuration has a certificate."""

    host: str
    port: int
    tls: bool

    @property
    def url(self) -> str:
        """For a client on this machine."""
        host = self.host.replace("0.0.0.0", "127.0.0.1")
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"


def check_config(config_path: str) -> tuple[Address, list[AppConfig]]:
    """Check a configuration before anything is started.

    Returns:
        Where the server will be, and the arguments of its applications.

    Raises:
        OSError: the file cannot be read.
        ConfigError: names each key at fault.
    """
    try:
        config = yaml.safe_load(Path(config_path).read_text(encoding="utf-8"))
        applications = config["applications"]
        arguments = [application.get("args", {}) for application in applications]
        http = config.get("http_options") or {}
    except (yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"this is no configuration of Ray Serve: {error}") from error
    _check_serve_keys(config)
    settings = [validate_settings(AppConfig, values) for values in arguments]
    address = Address(
        str(http.get("host", "127.0.0.1")),
        int(http.get("port", 8000)),
        bool(http.get("ssl_certfile")),
    )
    return address, settings


def _check_serve_keys(config: dict[str, Any]) -> None:
    """Ray Serve passes over keys that it does not know; a typing error would go unseen.

    Raises:
        ConfigError: names the keys.
    """
    places: list[tuple[str, Any, type[BaseModel]]] = [
        ("", config, ServeDeploySchema),
        ("http_options.", config.get("http_options"), HTTPOptionsSchema),
        ("logging_config.", config.get("logging_config"), LoggingConfig),
    ]
    for number, application in enumerate(config["applications"]):
        places.append((f"applications.{number}.", application, ServeApplicationSchema))
    wrong = [
        f"{prefix}{key}: unknown setting (known: {', '.join(sorted(schema.model_fields))})"
        for prefix, found, schema in places
        for key in found or {}
        if key not in schema.model_fields
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))


def metrics_port(applications: Sequence[AppConfig]) -> int | None:
    """Where Ray is to answer Prometheus: as the first application says that wants it to."""
    ports = [a.metrics.port for a in applications if a.metrics.enabled]
    return ports[0] if ports else None


def check_free(host: str, port: int, setting: str = "http_options.port") -> None:
    """See that nobody listens there: Ray Serve would share a port with another server.

    Args:
        host: an address of this machine; the empty string stands for all of them.
        port: to listen on.
        setting: the one that names the port, for the message.

    Raises:
        ConfigError: somebody does, or the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            raise ConfigError(
                f"{setting}: cannot listen on {host}:{port} ({error.strerror}); stop what "
                f"uses the port, or set another {setting}"
            ) from error


def missing_gpus(applications: Sequence[AppConfig]) -> str | None:
    """What is wrong where a replica asks for more GPUs than this machine has."""
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    present = resources.get("GPU", 0.0)
    wanted = max((application.worker.num_gpus for application in applications), default=0.0)
    if wanted <= present:
        return None
    return (
        f"worker.num_gpus: a replica asks for {wanted:g}, and Ray sees {present:g} GPUs here; "
        "set 0 to compute on the CPU"
    )


class _Watcher(threading.Thread):
    """Prints when the server answers; ends the program when its deployment has failed."""

    def __init__(self, address: Address, began: float) -> None:
        super().__init__(name="watcher", daemon=True)
        self._url = address.url
        self._began = began
        self._stopped = threading.Event()
        self._main = threading.get_ident()
        self.problem: str | None = None

    def run(self) -> None:
        """Wait for either."""
        while not self._stopped.wait(_POLL_S):
            running, self.problem = _state()
            if self.problem is not None:
                signal.pthread_kill(self._main, signal.SIGINT)
                return
            if running and self._healthy():
                seconds = time.monotonic() - self._began
                print(f"specdec ready in {seconds:.1f} s: {self._url}/v1", flush=True)
                return

    def stop(self) -> None:
        """End the wait."""
        self._stopped.set()

    def _healthy(self) -> bool:
        try:
            # the certificate is for the server's name, which this machine may not know itself by
            trust = ssl._create_unverified_context() if self._url.startswith("https") else None
            with urllib.request.urlopen(f"{self._url}/ready", timeout=5, context=trust) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False


def _state() -> tuple[bool, str | None]:
    """Whether all applications run, and why one cannot be deployed, if so."""
    try:
        applications = serve.status().applications
    except (RayError, RayServeException):  # Serve is not up yet
        return False, None
    failed = (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY)
    for name, application in applications.items():
        if application.status in failed:
            reasons = [d.message for d in application.deployments.values() if d.status in _BROKEN]
            why = "\n".join([application.message, *reasons]).strip()
            return False, f"application {name} cannot be served: {why}"
    states = {application.status for application in applications.values()}
    return states == {ApplicationStatus.RUNNING}, None


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
