"""A span for each request to the model, from its arrival to the end of its answer."""

from __future__ import annotations

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanKind
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.tracing.request import RequestTrace
from deployments.tracing.setup import Tracing
from specdec.tracing import names
from specdec.tracing.carrier import baggage_attributes, unpack

_HEADERS = ("traceparent", "tracestate", "baggage")
#: Operation by path; what is asked for elsewhere is not worth a trace.
_OPERATIONS = {"/v1/chat/completions": names.CHAT, "/v1/completions": names.TEXT_COMPLETION}


class TraceRequests:
    """The outermost layer of the HTTP side where traces are on.

    Args:
        app: what is inside.
        tracing: of this process.
        model: the name that is served.
    """

    def __init__(self, app: ASGIApp, tracing: Tracing, model: str) -> None:
        self._app = app
        self._tracing = tracing
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; its span ends when the answer does, or the client has left."""
        operation = _operation(scope)
        if operation is None:
            await self._app(scope, receive, send)
            return
        status: int | None = None
        completed = False

        async def watch(message: Message) -> None:
            nonlocal status, completed
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                completed = not message.get("more_body", False)

        request = self._begin(scope, operation)
        token = otel_context.attach(request.context)
        try:
            await self._app(scope, receive, watch)
        finally:
            otel_context.detach(token)
            request.end(status, completed)

    def _begin(self, scope: Scope, operation: str) -> RequestTrace:
        caller, links = caller_of(scope)
        span = self._tracing.tracer.start_span(
            f"{operation} {self._model}",
            caller,
            SpanKind.SERVER,
            {
                names.OPERATION: operation,
                names.PROVIDER: names.PROVIDER_SPECDEC,
                names.HTTP_METHOD: scope["method"],
                names.HTTP_ROUTE: scope["path"],
                **baggage_attributes(caller, self._tracing.settings.baggage),
            },
            links,
        )
        context = trace.set_span_in_context(span, caller)
        return RequestTrace(self._tracing.tracer, span, context, self._tracing.settings)


def caller_of(scope: Scope) -> tuple[Context, list[Link]]:
    """Below which span a request's own span goes, and to which others it is related.

    That is the client's, as its headers say. If Ray Serve traces, this process has a span of
    Serve's around the request; it comes between if it is part of the client's trace, or the client
    has none. Without a traced proxy it is neither: it began a trace of its own.
    """
    headers: dict[str, str] = {}
    for raw, value in scope["headers"]:
        name = raw.decode("latin-1")
        if name in _HEADERS:  # one that is sent twice is a list, of which traceparent is none
            before = f"{headers[name]}," if name in headers else ""
            headers[name] = before + value.decode("latin-1")
    client = unpack(headers)
    client_span = trace.get_current_span(client).get_span_context()
    around = trace.get_current_span()
    around_span = around.get_span_context()
    if not around_span.is_valid:
        return client, []
    if not client_span.is_valid or client_span.trace_id == around_span.trace_id:
        return trace.set_span_in_context(around, client), []
    return client, [Link(around_span)]


def _operation(scope: Scope) -> str | None:
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    path: str = scope["path"]
    return _OPERATIONS.get(path.removeprefix(scope.get("root_path", "")))
