"""``Idempotency-Key``: the same key and body give the same generation, once.

https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from starlette.requests import Request

from deployments.errors import ApiError, conflict, invalid

_LONGEST = 255


@dataclass(frozen=True)
class Idempotency:
    """A key as it came with a request.

    Attributes:
        key: of the caller's choice.
        body: digest of the request's body, in hex.
    """

    key: str
    body: str

    def answer_id(self, prefix: str, tenant: bytes) -> str:
        """The id of the one answer that this key gives to a tenant."""
        digest = hashlib.sha256(tenant.ljust(32, b"\0") + self.key.encode()).hexdigest()
        return f"{prefix}-{digest[:32]}"


def idempotency_of(request: Request, body: dict[str, object]) -> Idempotency | None:
    """The key of a request, if it has one.

    Raises:
        ApiError: 400 for a key that is none.
    """
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    if not (0 < len(key) <= _LONGEST and key.isascii() and key.isprintable()):
        raise invalid(
            "Idempotency-Key",
            f"Idempotency-Key must be 1 to {_LONGEST} printable ASCII characters.",
        )
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return Idempotency(key, hashlib.sha256(canonical.encode()).hexdigest())


def reused() -> ApiError:
    """The key has been used for something else."""
    return ApiError(
        422,
        "This Idempotency-Key was used with another body; use a new key for a new request.",
        param="Idempotency-Key",
        code="idempotency_key_reused",
    )


def in_progress(retry_after_s: int) -> ApiError:
    """The answer is on its way to somebody else."""
    return conflict(
        "The request with this Idempotency-Key is being answered; come again when it is done.",
        "idempotency_in_progress",
        retry_after_s,
    )
