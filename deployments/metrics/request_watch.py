"""The layer around all others of the HTTP side: figures and log of each request, once it ended."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from opentelemetry import trace
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.metrics import table
from deployments.metrics.labels import REJECT_CODES
from deployments.metrics.recorder import Recorder
from deployments.metrics.request import RequestRecord, set_record
from deployments.metrics.request_log import RequestLog

#: https://www.w3.org/TR/trace-context/#traceparent-header; a zero id is none.
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
_MODELS = "/v1/models"
#: Asked for every few seconds by whoever supervises; not in the log.
_PROBES = ("/health", "/ready")


class OpenRequests:
    """How many are under way; read by the publisher."""

    count = 0


class RequestWatch:
    """ASGI middleware. Goes outside of whatever turns errors into answers."""

    def __init__(
        self, app: ASGIApp, recorder: Recorder, log: RequestLog | None, open_requests: OpenRequests
    ) -> None:
        self._app = app
        self._recorder = recorder
        self._log = log
        self._open = open_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and enter what became of it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(
            scope["method"],
            scope["path"],
            trace_id(scope["headers"]),
            self._log is not None and self._log.keeps_text,
        )
        set_record(record)

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        self._open.count += 1
        try:
            await self._app(scope, receive, watch)
        finally:
            record.seconds = time.monotonic() - record.began
            self._open.count -= 1
            count(self._recorder, record)
            if self._log is not None and record.path not in _PROBES:
                self._log.write(record)


def count(recorder: Recorder, record: RequestRecord) -> None:
    """Enter the figures of a request that has ended."""
    endpoint = _MODELS if record.path.startswith(f"{_MODELS}/") else record.path
    recorder.add(table.REQUESTS, 1, endpoint, record.outcome)
    code = "none" if record.error is None else record.error.code or "other"
    if record.error is not None:
        recorder.add(table.ERRORS, 1, code)
        if code in REJECT_CODES:
            recorder.add(table.REJECTS, 1, REJECT_CODES[code])
    operation = _OPERATIONS.get(record.path)
    if operation is None:
        return
    recorder.observe(table.DURATION, record.seconds, operation, code)
    first_token_s = record.first_token_s
    if first_token_s is None or record.generation is None:
        return
    recorder.observe(table.FIRST_TOKEN, first_token_s, operation)
    tokens = record.generation.usage.completion_tokens
    if record.outcome == "ok" and record.generation.choices == 1 and tokens > 1:
        per_token = (record.seconds - first_token_s) / (tokens - 1)
        recorder.observe(table.PER_TOKEN, per_token, operation)


def trace_id(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Of the span that is current, else of the client's ``traceparent``."""
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        return f"{context.trace_id:032x}"
    for name, value in headers:
        if name == b"traceparent" and (found := _TRACEPARENT.fullmatch(value.strip())):
            return found.group(1).decode()
    return None
