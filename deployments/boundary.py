"""The outermost layer of the HTTP side: every error leaves in OpenAI's shape."""

from __future__ import annotations

import uuid

from ray.exceptions import TaskCancelledError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.errors import ApiError, internal, log
from deployments.metrics.request import note_error


class ErrorBoundary:
    """Answers in place of whatever raised; a traceback goes to the log and nowhere else."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and answer what was raised before an answer began."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = False

        async def watch(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        async def receive_or_leave() -> Message:
            try:
                return await receive()
            except TaskCancelledError:  # so Serve's proxy may tell that the client has left
                return {"type": "http.disconnect"}

        try:
            await self._app(scope, receive_or_leave, watch)
        except ApiError as error:
            note_error(error)
            response = error.response()
        except Exception:  # the last resort  # noqa: BLE001
            request_id = f"req-{uuid.uuid4().hex}"
            log.exception("request %s failed", request_id)
            note_error(internal(request_id))
            response = internal(request_id).response()
        else:
            return
        if not began:
            await response(scope, receive, send)


async def http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    where = f"{request.method} {request.scope['path']}"  # request.url fails for some hosts
    if status == 405:
        message, code = f"Not allowed here: {where:.200}", "method_not_allowed"
    else:
        message, code = f"Unknown path: {where:.200}", "unknown_url"
    answer = ApiError(status, message, code=code, headers=headers)
    note_error(answer)
    return answer.response()
