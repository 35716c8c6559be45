"""Hosts on one machine: network namespaces on a bridge of their own, each with its own address,
processes and shared memory.

Needs root and iproute2. Names and addresses carry the process id, so that two runs do not meet;
nothing leaves the machine.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_PREFIX = 24


def _ip(*arguments: str) -> str:
    found = subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    return found.stdout


def missing() -> str | None:
    """What keeps this process from making hosts; None where nothing does."""
    if os.geteuid() != 0:
        return "hosts are network namespaces: run it as root"
    for tool, package in (("ip", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(tool) is None:
            return f"hosts need {tool}: apt-get install {package}"
    name = f"sdprobe{os.getpid()}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"this machine allows no network namespaces: {error.stderr.strip()}"
    return None


class Host:
    """A namespace with an address, and the processes in it."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address

    def start(
        self, command: Sequence[str], env: dict[str, str], log: Path, private: tuple[Path, Path]
    ) -> subprocess.Popen[bytes]:
        """Run a command there, as a container would: the first process, which sees no other host's.

        Ray looks among the processes that it sees for a cluster that it could be part of; a head
        that comes back would find the other hosts' nodes and refuse to start.

        Args:
            command: to run.
            env: its environment.
            log: its console, appended to.
            private: a folder, and the path under which it alone sees it.
        """
        own, seen = private
        script = (
            "set -e; mount -t tmpfs -o mode=1777 shm /dev/shm; "
            'mount --bind "$0" "$1"; shift; exec "$@"'
        )
        with log.open("ab") as console:
            return subprocess.Popen(
                [
                    *("ip", "netns", "exec", self.name),
                    *("unshare", "--mount", "--pid", "--fork", "--mount-proc"),
                    *("sh", "-c", script, str(own), str(seen)),
                    *command,
                ],
                env=env,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def pids(self) -> list[int]:
        """Processes that run there, as this machine counts them."""
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]

    def kill(self) -> None:
        """End them all at once, as a power cut does."""
        deadline = time.monotonic() + 30
        while pids := self.pids():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name}: {pids} do not end")
            time.sleep(0.05)


@contextmanager
def hosts(count: int) -> Iterator[tuple[str, list[Host]]]:
    """A bridge with this machine's own address on it, and ``count`` hosts; removed at the end.

    Raises:
        RuntimeError: this process cannot make them; says what is missing.
    """
    if (problem := missing()) is not None:
        raise RuntimeError(problem)
    number = os.getpid() % 250
    bridge, net = f"sdbr{os.getpid()}", f"10.77.{number}"
    made: list[Host] = []
    _ip("link", "add", bridge, "type", "bridge")
    try:
        _ip("addr", "add", f"{net}.1/{_PREFIX}", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for index in range(count):
            name, outside = f"sd{os.getpid()}h{index}", f"sdv{os.getpid() % 10**6}{index}"
            host = Host(name, f"{net}.{index + 2}")
            _ip("netns", "add", name)
            made.append(host)
            _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", outside, "master", bridge, "up")
            for command in (
                ("addr", "add", f"{host.address}/{_PREFIX}", "dev", "eth0"),
                ("link", "set", "eth0", "up"),
                ("link", "set", "lo", "up"),
                ("route", "add", "default", "via", f"{net}.1"),
            ):
                _ip("-n", name, *command)
        yield f"{net}.1", made
    finally:
        for host in made:
            host.kill()
            _ip("netns", "del", host.name)
        _ip("link", "del", bridge)
