"""A thread beside the engine's that makes the spans of requests which have ended."""

from __future__ import annotations

import logging
import queue
import threading
import time
from itertools import islice

from prefix_cache.priority import give_way
from prefix_cache.quiet_log import QuietLog
from specdec.tracing.record import RequestRecord
from specdec.tracing.rules import TraceRules
from specdec.tracing.spans import SpanSink, request_spans

log = logging.getLogger(__name__)

#: Requests that may wait to be written; each holds up to ``most_steps`` tuples.
_MOST_WAITING = 64
#: So many spans are made at a time (some 0.3 ms); then others have the interpreter for a while.
#: In one go, the spans of a long answer would hold up the engine's thread for milliseconds.
_AT_A_TIME, _REST_S = 48, 0.001


class SpanWriter:
    """Makes spans with the times that were recorded.

    Args:
        sink: takes them.
        rules: how much is told.
        most_waiting: requests that wait from which on further ones are dropped.
    """

    def __init__(
        self, sink: SpanSink, rules: TraceRules, most_waiting: int = _MOST_WAITING
    ) -> None:
        self._sink = sink
        self._rules = rules
        self._queue: queue.Queue[RequestRecord | None] = queue.Queue(most_waiting)
        self._closing = False
        self._quiet = QuietLog(log)
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="trace-writer", daemon=True)
        self._thread.start()

    def put(self, record: RequestRecord) -> None:
        """Have it written, or dropped where too many wait. Never blocks."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1
            self._quiet.warn("dropped", "more traces than can be written: some are dropped")

    def close(self, timeout_s: float) -> None:
        """Write what waits, as far as the time allows."""
        end = time.monotonic() + timeout_s
        self._closing = True
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(max(0.0, end - time.monotonic()))

    def _run(self) -> None:
        give_way()
        while (record := self._queue.get()) is not None:
            try:
                self._write(record)
            except Exception:  # a trace is lost, and nothing else
                log.exception("the trace of %s is lost", record.sequence.request_id)

    def _write(self, record: RequestRecord) -> None:
        spans = request_spans(record, self._rules)
        while batch := list(islice(spans, _AT_A_TIME)):
            for span in batch:
                self._sink.put(span)
            if not self._closing:
                time.sleep(_REST_S)
