"""The real server as a subprocess: its own Ray, its own port, and no process left behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import yaml

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Server:
    """Where it answers.

    Attributes:
        url: without a path.
        metrics_url: what Prometheus scrapes.
        model: the name under which it serves.
        log: its console.
    """

    url: str
    model: str
    log: Path
    metrics_url: str = ""


@contextmanager
def running_server(
    changes: Mapping[str, Mapping[str, Any]],
    model: str,
    import_path: str = "deployments.app:build_app",
) -> Iterator[Server]:
    """serve_config.yaml as it ships, with some arguments changed, for the time of the block.

    Args:
        changes: arguments to change, by section.
        model: the name that clients use.
        import_path: of the application; another one to inject faults.
    """
    _end_in_order_when_told_to()
    # Ray's sockets lie below this folder and their paths may have 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="sd"))
    port = free_port()
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    config["http_options"]["port"] = port
    config["applications"][0]["import_path"] = import_path
    arguments = config["applications"][0]["args"]
    arguments["metrics"] = {"port": free_port(), "report_interval_s": 1}
    for section, values in changes.items():
        arguments.setdefault(section, {}).update(values)
    config_path = folder / "serve.yaml"
    config_path.write_text(yaml.safe_dump(config))
    log_path = folder / "console.log"
    with log_path.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "deployments", str(config_path)],
            cwd=ROOT,
            env={**os.environ, "RAY_TMPDIR": str(folder)},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until_ready(process, log_path)
        metrics_url = f"http://127.0.0.1:{arguments['metrics']['port']}/metrics"
        yield Server(f"http://127.0.0.1:{port}", model, log_path, metrics_url)
    finally:
        stop(process, folder)
        shutil.rmtree(folder, ignore_errors=True)


def _end_in_order_when_told_to() -> None:
    """Have SIGTERM end this program as an exception, so that it stops its server before."""
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread may set a handler
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def wait_until_ready(process: subprocess.Popen[bytes], log_path: Path) -> None:
    """Until its console says so.

    Raises:
        AssertionError: it ended, or took too long; with the end of the console.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while "specdec ready in" not in log_path.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"the server did not start:\n{log_path.read_text()[-8000:]}")
        time.sleep(0.2)


def stop(process: subprocess.Popen[bytes], folder: Path) -> None:
    """As Ctrl-C does; whatever is left then is a failure."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"processes were left: {sorted(left.values())}"


def processes_of(folder: Path) -> dict[int, str]:
    """Processes started under this RAY_TMPDIR: pid to command line."""
    mark = f"RAY_TMPDIR={folder}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                if command:  # else it is a zombie
                    found[int(entry.name)] = command.decode(errors="replace")
        except OSError:
            continue
    return found


def ray_address(server: Server) -> str:
    """Where a server's own cluster listens, for RAY_ADDRESS.

    Without it Ray joins any cluster that it finds on this machine, another test's as well.

    Raises:
        AssertionError: none runs.
    """
    flag = "--gcs-address="
    for command in processes_of(server.log.parent).values():
        for word in command.split():
            if word.startswith(flag):
                return word.removeprefix(flag)
    raise AssertionError(f"no process of {server.url} names its cluster")


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def get(url: str) -> tuple[int, bytes]:
    """Status and body of a GET."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.status, answer.read()
