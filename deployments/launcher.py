"""Starts Ray and the application, and waits for the first healthy answer."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import FrameType

import ray
import yaml
from ray import serve
from ray.exceptions import RayError
from ray.serve import scripts
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from deployments.config import AppConfig
from specdec.config import EngineSettings, validate_settings
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
        url, engines = check_config(config_path)
        if local:  # fetch what is missing here, where its progress can be seen
            for engine in engines:
                resolve_model(engine.model, engine.cache_dir)
    except (OSError, ConfigError, ModelError) as error:
        print(f"specdec: {config_path}: {error}", file=sys.stderr)
        return 2
    print(f"specdec: starting {config_path}", flush=True)
    if local:
        ray.init(
            address="local",
            namespace="serve",
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
        )
    else:
        ray.init(namespace="serve")
    # Not before: Ray sets its own. A shell's background jobs ignore SIGINT unless told otherwise.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    watcher = _Watcher(url, began)
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
    return 0


def check_config(config_path: str) -> tuple[str, list[EngineSettings]]:
    """Check the applications' arguments before anything is started.

    Returns:
        The URL at which the server will be, and the settings of its engines.

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
    engines = [validate_settings(AppConfig, values).engine for values in arguments]
    return f"http://{http.get('host', '127.0.0.1')}:{http.get('port', 8000)}", engines


class _Watcher(threading.Thread):
    """Prints when the server answers; ends the program when its deployment has failed."""

    def __init__(self, url: str, began: float) -> None:
        super().__init__(name="watcher", daemon=True)
        self._url = url.replace("//0.0.0.0", "//127.0.0.1")
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
            with urllib.request.urlopen(f"{self._url}/health", timeout=5) as answer:
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
