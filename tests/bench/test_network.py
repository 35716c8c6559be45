"""Hosts in network namespaces: what the cluster's run stands on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from bench.network import Host, hosts, missing

PROBLEM = missing()
pytestmark = pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))


def answer(host: Host, port: int) -> bytes | None:
    try:
        with urllib.request.urlopen(f"http://{host.address}:{port}/name", timeout=1) as found:
            content: bytes = found.read()
            return content
    except OSError:
        return None


def until(host: Host, port: int, wanted: bytes | None) -> None:
    deadline = time.monotonic() + 30
    while answer(host, port) != wanted:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_hosts_have_addresses_folders_and_an_end(tmp_path: Path) -> None:
    """The same port and the same path on two hosts are two; a killed host leaves nothing."""
    seen = tmp_path / "seen"
    seen.mkdir()
    processes = []
    with hosts(2) as (_, machines):
        for host in machines:
            own = tmp_path / host.name
            own.mkdir()
            (own / "name").write_text(host.name)
            command = ["sh", "-c", 'echo $$ > "$0/pid"; exec "$@"', str(seen)]
            command += [sys.executable, "-m", "http.server", "8000", "--directory", str(seen)]
            log = tmp_path / "log"
            processes.append(host.start(command, dict(os.environ), log, (own, seen)))
        for host in machines:
            until(host, 8000, host.name.encode())
        first, second = machines
        assert [(tmp_path / host.name / "pid").read_text() for host in machines] == ["1\n"] * 2
        first.kill()
        assert first.pids() == []
        until(first, 8000, None)
        until(second, 8000, second.name.encode())
    for process in processes:
        process.wait(30)
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert not any(host.name in left for host in machines)
