"""The ASGI layer through which every request comes: who calls, and whether it may now."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.errors import ApiError
from deployments.scope import tenant_of
from deployments.security.keys import KeyRing
from deployments.security.rates import Accounts, Lease, OverLimit, Rates, Standing
from deployments.security.settings import RateSettings
from specdec.api_keys import ApiKey

#: What anybody may ask: whether the server lives, and how to talk to it.
OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/openapi.json", "/docs"})
OPEN_PREFIX = "/docs/"
#: Paths that count against the rates: those that cost more than an answer from memory.
COUNTED_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"})
_ANYBODY = "anonymous"


@dataclass(frozen=True)
class Caller:
    """Who sent a request.

    Attributes:
        name: of the key; None where no key is asked for.
        tenant: whose prompts share what is computed of them.
        lease: on the caller's limits; None where the path does not count.
    """

    name: str | None
    tenant: bytes
    key: ApiKey | None = None
    lease: Lease | None = None

    def check_model(self, model: str) -> None:
        """Raises:
        ApiError: 403, the key is not for this model.
        """
        if self.key is not None and self.key.models is not None and model not in self.key.models:
            raise ApiError(
                403,
                f"This API key may not use the model {model!r:.200}.",
                param="model",
                code="model_not_allowed",
            )

    def reserve(self, tokens: int) -> None:
        """Count the tokens that a request may use at most.

        Raises:
            ApiError: 429, they are too many.
        """
        if self.lease is not None:
            try:
                self.lease.reserve(tokens)
            except OverLimit as error:
                raise over_limit(error) from error

    def spent(self, tokens: int) -> None:
        """Tell how many tokens the request has used up to now."""
        if self.lease is not None:
            self.lease.spent(tokens)


class Guard:
    """Puts a ``Caller`` into the scope of each request, or turns it away.

    Its rate headers are on every answer to a counted path, errors included.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing | None, rates: RateSettings) -> None:
        self._app = app
        self._keys = keys
        self._rates = Rates(**rates.model_dump())
        self._accounts = Accounts()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its caller.

        Raises:
            ApiError: 401 or 429.
        """
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path in OPEN_PATHS or path.startswith(OPEN_PREFIX):
            await self._app(scope, receive, send)
            return
        caller = self._caller(Headers(scope=scope))
        if path not in COUNTED_PATHS:
            await self._app(_with(scope, caller), receive, send)
            return
        account = self._accounts.of(caller.name or _ANYBODY, self._rates_of(caller))
        try:
            lease = account.enter()
        except OverLimit as error:
            raise over_limit(error, account.standings()) from error
        caller = Caller(caller.name, caller.tenant, caller.key, lease)

        async def with_rates(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(rate_headers(account.standings()))
            await send(message)

        try:
            await self._app(_with(scope, caller), receive, with_rates)
        except ApiError as error:
            error.headers.update(rate_headers(account.standings()))
            raise
        finally:
            lease.release()

    def _caller(self, headers: Headers) -> Caller:
        if self._keys is None:
            return Caller(None, tenant_of(headers.get("authorization", "")))
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise _unauthorized("No API key came with the request: send it as a bearer token.")
        key: ApiKey | Literal["expired"] | None = self._keys.find(secret.strip())
        if key == "expired":
            raise _unauthorized("This API key has expired.", "expired_api_key")
        if key is None:
            raise _unauthorized("This API key is not known here.")
        tenant = hashlib.sha256(b"key\0" + key.name.encode()).digest()
        return Caller(key.name, tenant, key)

    def _rates_of(self, caller: Caller) -> Rates:
        key, rates = caller.key, self._rates
        if key is None:
            return rates
        return Rates(
            key.requests_per_minute or rates.requests_per_minute,
            key.tokens_per_minute or rates.tokens_per_minute,
            key.concurrent_requests or rates.concurrent_requests,
        )


def caller_of(scope: Scope) -> Caller:
    """Who sent the request that came through the guard."""
    caller = scope["specdec.caller"]
    assert isinstance(caller, Caller)
    return caller


def over_limit(error: OverLimit, standings: Mapping[str, Standing] | None = None) -> ApiError:
    """The 429 of a caller that is over its limits."""
    headers = rate_headers(standings or {})
    if error.retry_s is None:
        headers["x-should-retry"] = "false"  # clients of OpenAI's heed it
        when = "it can never pass"
    else:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_s)))
        when = f"try again in {headers['Retry-After']} s"
    return ApiError(
        429,
        f"Rate limit reached: {error.what}; {when}.",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers=headers,
    )


def rate_headers(standings: Mapping[str, Standing]) -> dict[str, str]:
    """OpenAI's headers: what is allowed, what is left, and when all of it will be again."""
    headers = {}
    for name, standing in standings.items():
        headers[f"x-ratelimit-limit-{name}"] = str(standing.limit)
        headers[f"x-ratelimit-remaining-{name}"] = str(standing.remaining)
        headers[f"x-ratelimit-reset-{name}"] = f"{standing.reset_s:.3f}s"
    return headers


def _unauthorized(message: str, code: str = "invalid_api_key") -> ApiError:
    return ApiError(
        401,
        message,
        code=code,
        headers={"WWW-Authenticate": "Bearer"},
    )


def _with(scope: Scope, caller: Caller) -> Scope:
    return {**scope, "specdec.caller": caller}
