"""The thread that takes what was counted to those who export it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from deployments.metrics.recorder import Batch, Recorder
from prefix_cache.priority import give_way

log = logging.getLogger("ray.serve")


class Sink(Protocol):
    """Exports. Called by the publisher's thread alone."""

    def publish(self, batch: Batch) -> None:
        """Take over a batch. Must not wait for a network."""

    def close(self) -> None:
        """Export what is left, within a few seconds."""


class Publisher:
    """Publishes every so many seconds until closed. A sink that raises loses its batch, no more.

    Args:
        recorder: which counts.
        sinks: to publish to; closed with this.
        interval_s: between two publications.
        prepare: called before each, for what is read and not counted.
    """

    def __init__(
        self,
        recorder: Recorder,
        sinks: Sequence[Sink],
        interval_s: float,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self._recorder = recorder
        self._sinks = sinks
        self._interval_s = interval_s
        self._prepare = prepare
        self._failing: set[str] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish what is left and end."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._thread.join(5.0)
        self._publish()
        for sink in self._sinks:
            self._try(sink.close, f"closing {type(sink).__name__}")

    def _run(self) -> None:
        give_way()
        while not self._stopped.wait(self._interval_s):
            self._publish()

    def _publish(self) -> None:
        self._try(self._prepare, "reading figures")
        batch = self._recorder.drain()
        for number, sink in enumerate(self._sinks, 1):
            self._try(partial(sink.publish, batch), f"{type(sink).__name__} ({number})")

    def _try(self, action: Callable[[], None], name: str) -> None:
        """Whatever goes wrong with figures must not touch requests; it is told once."""
        try:
            action()
        except Exception:  # see above
            if name not in self._failing:
                self._failing.add(name)
                log.exception("metrics: %s failed; further failures are not told", name)
        else:
            self._failing.discard(name)
