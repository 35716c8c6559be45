"""Streams of a real server while its workers are killed: texts, usage and pauses."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.server import Server, processes_of

#: Longest wait for all workers to be back. Seconds.
_RETURN_S = 240.0
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Streamed:
    """What a client got.

    Attributes:
        text: of all events.
        usage: of the last one; empty where none came.
        at: of each event with text, on the monotonic clock.
        error: of an error event, or of an answer other than 200; empty where all is well.
    """

    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    at: list[float] = field(default_factory=list)
    error: dict[str, Any] = field(default_factory=dict)

    def pause_s(self, since: float) -> float:
        """The longest time without text that ended after ``since``."""
        gaps = [b - a for a, b in zip(self.at, self.at[1:], strict=False) if b > since]
        return max(gaps, default=0.0)


def stream(
    server: Server, body: dict[str, Any], found: Streamed | None = None, timeout_s: float = 300
) -> Streamed:
    """Ask for a completion and read it to its end; ``found`` grows meanwhile."""
    found = found or Streamed()
    body = {
        "model": server.model,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **body,
    }
    with (
        httpx.Client(base_url=server.url, timeout=timeout_s) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        if answer.status_code != 200:
            found.error = json.loads(answer.read())["error"]
            return found
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            if data == line or data == "[DONE]":  # an id, an empty line, the end
                continue
            event = json.loads(data)
            if "error" in event:
                found.error = event["error"]
            elif event["choices"]:
                found.text += event["choices"][0]["text"]
                found.at.append(time.monotonic())
            else:
                found.usage = event["usage"]
    return found


class Streams:
    """Several streams at the same time."""

    def __init__(
        self, threads: ThreadPoolExecutor, server: Server, bodies: Sequence[dict[str, Any]]
    ) -> None:
        self.found = [Streamed() for _ in bodies]
        self._ends: list[Future[Streamed]] = [
            threads.submit(stream, server, body, found)
            for body, found in zip(bodies, self.found, strict=True)
        ]

    def wait_for(self, events: int, or_end: bool = False) -> None:
        """Wait until each has got so many more events, or has ended where that will do.

        Raises:
            AssertionError: one has ended before.
        """
        wanted = [len(found.at) + events for found in self.found]
        while any(
            len(found.at) < count and not (or_end and end.done())
            for found, count, end in zip(self.found, wanted, self._ends, strict=True)
        ):
            ended = [end for end in self._ends if end.done()]
            assert or_end or not ended, f"a stream ended too early: {ended[0].result().error}"
            time.sleep(0.005)

    def running(self) -> int:
        """How many have not ended."""
        return sum(not end.done() for end in self._ends)

    def results(self) -> list[Streamed]:
        """What all of them got in the end."""
        return [end.result() for end in self._ends]


def workers(server: Server) -> list[int]:
    """Process ids of the workers, those that start included."""
    return [
        pid
        for pid, command in processes_of(server.log.parent).items()
        if command.startswith("ray::ServeReplica:specdec:Worker")
    ]


def busiest(server: Server, watch_s: float = 0.05) -> int:
    """The worker that used most CPU time just now."""
    before = {pid: _cpu_s(pid) for pid in workers(server)}
    time.sleep(watch_s)
    return max(before, key=lambda pid: _cpu_s(pid) - before[pid])


def kill(pid: int, number: int = signal.SIGKILL) -> float:
    """Send a signal; returns the time."""
    now = time.monotonic()
    os.kill(pid, number)
    return now


def serving(server: Server) -> frozenset[str]:
    """Names of the workers that the gateway counts on; none while no worker answers."""
    try:
        report = httpx.get(f"{server.url}/debug/integrity", timeout=10)
    except httpx.HTTPError:
        return frozenset()
    return frozenset(report.json()["workers"]) if report.status_code == 200 else frozenset()


def wait_for_workers(server: Server, count: int, before: frozenset[str] = frozenset()) -> None:
    """Wait until so many serve, and are others than before.

    Raises:
        TimeoutError: they do not.
    """
    until = time.monotonic() + _RETURN_S
    while len(names := serving(server)) != count or names == before:
        if time.monotonic() > until:
            raise TimeoutError(f"{count} workers should serve; these do: {sorted(names)}")
        time.sleep(0.1)


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS
