"""Errors as HTTP answers in OpenAI's shape."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from deployments.messages import Fault
from specdec.errors import ContextLengthError, RequestError

log = logging.getLogger("ray.serve")


class ApiError(Exception):
    """An answer other than 200.

    Attributes:
        status: HTTP status.
        message: for the person who reads it.
        kind: OpenAI's ``type``.
        param: path of the field at fault, as ``messages[0].content``, or None.
        code: OpenAI's ``code``, or None.
        headers: to send with it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON body, or the data of an SSE error event."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The HTTP answer."""
        return JSONResponse(self.body(), self.status, self.headers)


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """A 400 that blames one field."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, retry_after_s: int) -> ApiError:
    """A 503: nothing is wrong with the request."""
    return ApiError(
        503,
        message,
        kind="server_error",
        code="service_unavailable",
        headers={"Retry-After": str(retry_after_s)},
    )


def conflict(message: str, code: str, retry_after_s: int | None = None) -> ApiError:
    """A 409: somebody else has what the request is about."""
    headers = None if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return ApiError(409, message, code=code, headers=headers)


def internal(request_id: str) -> ApiError:
    """A 500 that tells nothing but the id under which the log has it."""
    return ApiError(
        500,
        f"The server failed on this request; its log has more under {request_id}.",
        kind="server_error",
        code="internal_error",
    )


def poisonous(request_id: str) -> ApiError:
    """A 500 for a request that workers die of, which clients are asked not to send again."""
    return ApiError(
        500,
        "Two workers in a row died while they computed this request; it is not tried again. "
        f"The server's log has more under {request_id}.",
        kind="server_error",
        code="request_kills_workers",
        headers={"x-should-retry": "false"},  # OpenAI's client libraries obey it
    )


def from_fault(fault: Fault, request_id: str, retry_after_s: int) -> ApiError:
    """The answer for a request that a worker turned away or gave up."""
    if fault.kind == "invalid":
        return invalid(fault.param, fault.message)
    if fault.kind == "too_long":
        return invalid(fault.param, fault.message, "context_length_exceeded")
    if fault.kind == "busy":
        return ApiError(
            429,
            f"The server is at its limit ({fault.message}); come again later.",
            kind="rate_limit_error",
            code="server_overloaded",
            headers={"Retry-After": str(retry_after_s)},
        )
    if fault.kind in ("unavailable", "lost", "handover"):
        return unavailable(fault.message, retry_after_s)
    if fault.kind == "superseded":
        return conflict(fault.message, "answer_taken_over")
    log.error("request %s: %s", request_id, fault.message)
    return internal(request_id)


def from_request_error(error: RequestError) -> ApiError:
    """The answer for parameters that the engine's own rules refuse."""
    too_long = isinstance(error, ContextLengthError)
    return invalid(
        error.param, str(error), "context_length_exceeded" if too_long else "invalid_value"
    )


def from_validation(error: ValidationError, data: object) -> ApiError:
    """The answer for a body that does not fit its schema; blames the first fault."""
    fault = error.errors(include_url=False)[0]
    param = field_path(fault["loc"], data)
    if fault["type"] == "extra_forbidden":
        return invalid(param, f"Unknown parameter: '{param}'.", "unknown_parameter")
    if fault["type"] == "missing":
        return invalid(
            param, f"Missing required parameter: '{param}'.", "missing_required_parameter"
        )
    message = fault["msg"].removeprefix("Value error, ").removeprefix("Input ")
    code = "invalid_type" if fault["type"].endswith("_type") else "invalid_value"
    return invalid(param, f"Invalid '{param}': {message} (got {brief(fault['input'])}).", code)


def field_path(location: tuple[int | str, ...], data: object) -> str:
    """``("messages", 0, "content")`` as ``messages[0].content``.

    Parts that name no place in ``data``, such as the members of a union, are left out; the
    last one stays, as it may be a missing field.
    """
    path = ""
    for index, part in enumerate(location):
        inside = isinstance(data, dict | list) and (
            part in data if isinstance(data, dict) else isinstance(part, int) and part < len(data)
        )
        if inside:
            data = data[part]  # type: ignore[index]
        elif not (index == len(location) - 1 and isinstance(data, dict)):
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def brief(value: object) -> str:
    """A value as shown in a message, cut to a line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
