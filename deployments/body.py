"""Reads the JSON body of a request."""

from __future__ import annotations

import asyncio
import json

from starlette.requests import ClientDisconnect, Request

from deployments.errors import ApiError


async def read_body(request: Request, limit: int, timeout_s: float) -> bytes:
    """The body of a request.

    Args:
        request: to read.
        limit: most bytes.
        timeout_s: for all of it to arrive.

    Raises:
        ApiError: 413 for a body over the limit, 408 for one that takes too long.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise _too_large(limit)
    except ClientDisconnect as error:
        raise ApiError(400, "The client left before its request was complete.") from error
    except TimeoutError as error:
        message = f"The body of the request did not arrive within {timeout_s:g} s."
        raise ApiError(408, message, code="request_timeout") from error
    return bytes(body)


def parse_object(body: bytes) -> dict[str, object]:
    """The JSON object in a body.

    NaN and infinities pass, so that the check of the field that holds one can name it.

    Raises:
        ApiError: 400 for what is no JSON object in UTF-8.
    """
    try:
        data = json.loads(body.decode())
        if b"\\u" in body:  # an escape can spell half of a surrogate pair, which is no text
            json.dumps(data, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise _malformed(f"it is no UTF-8 at byte {error.start}") from error
    except UnicodeEncodeError as error:
        raise _malformed("a string holds half of a surrogate pair") from error
    except RecursionError as error:
        raise _malformed("it is nested too deeply") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise _malformed(f"{error.msg} at {where}") from error
    except ValueError as error:  # a number of more digits than Python converts
        raise _malformed(str(error)) from error
    if not isinstance(data, dict):
        raise _malformed("it must be a JSON object")
    return data


def _malformed(why: str) -> ApiError:
    return ApiError(400, f"The body of the request cannot be read: {why}.", code="invalid_json")


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"The body of the request is larger than {limit} bytes.",
        code="request_too_large",
    )
