"""The guard in front of a small application, over real HTTP semantics, without an engine."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse

from deployments.boundary import ErrorBoundary
from deployments.security.cors import add_cors
from deployments.security.guard import Guard, caller_of
from deployments.security.keys import KeyRing
from deployments.security.settings import CorsSettings, KeySettings, RateSettings
from specdec.api_keys import ApiKey, digest_of

CHAT = "/v1/chat/completions"


def build(
    folder: Path | None = None, rates: RateSettings | None = None, cors: CorsSettings | None = None
) -> FastAPI:
    """An application that tells who called, and may use tokens or fail on demand."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    async def answer(request: Request) -> JSONResponse:
        caller = caller_of(request.scope)
        query = request.query_params
        caller.check_model(query.get("model", "m"))
        caller.reserve(int(query.get("tokens", "0")))
        await asyncio.sleep(float(query.get("wait", "0")))
        caller.spent(int(query.get("spent", "0")))
        if "fail" in query:
            raise RuntimeError("on demand")
        return JSONResponse({"name": caller.name, "tenant": caller.tenant.hex()})

    async def open_(request: Request) -> JSONResponse:
        return JSONResponse("specdec.caller" in request.scope)

    for path in (CHAT, "/v1/models", "/debug/integrity"):
        app.api_route(path, methods=["GET", "POST"])(answer)
    for path in ("/health", "/ready", "/version"):
        app.get(path)(open_)
    keys = None
    if folder is not None:
        file = folder / "keys"
        file.write_text(
            "\n".join(
                key.line()
                for key in (
                    ApiKey("ann", digest_of("ann-1")),
                    ApiKey("ann", digest_of("ann-2")),
                    ApiKey("bob", digest_of("bob-1"), models=frozenset({"other"})),
                    ApiKey("old", digest_of("old-1"), datetime(2020, 1, 1, tzinfo=UTC)),
                    ApiKey("few", digest_of("few-1"), requests_per_minute=2),
                )
            )
        )
        keys = KeyRing(KeySettings(file=file))
    app.add_middleware(Guard, keys=keys, rates=rates or RateSettings())
    app.add_middleware(ErrorBoundary)
    add_cors(app, cors or CorsSettings())
    return app


def ask(app: FastAPI, *requests: dict[str, Any]) -> list[httpx.Response]:
    """All requests at once; the keys of each are ``path``, ``key``, ``params``, ``headers``."""

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

            async def one(request: dict[str, Any]) -> httpx.Response:
                headers = dict(request.get("headers", {}))
                if "key" in request:
                    headers["Authorization"] = f"Bearer {request['key']}"
                return await client.request(
                    request.get("method", "POST"),
                    request.get("path", CHAT),
                    params=request.get("params"),
                    headers=headers,
                )

            return await asyncio.gather(*map(one, requests))

    return asyncio.run(run())


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": "ann-1"},
        {"Authorization": "Basic YW5uLTE="},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer ANN-1"},
        {"Authorization": "Bearer ann-1 ann-1"},
        {"Authorization": "Bearer old-1"},
        {"Authorization": "Bearer " + "x" * 30_000},
        {"Authorization": b"Bearer \xff\xfe\x00"},
        {"Authorization": f"Bearer {digest_of('ann-1').hex()}"},
        {"X-Api-Key": "ann-1"},
        {"Cookie": "Authorization=Bearer ann-1"},
    ],
)
def test_nobody_gets_in_without_a_good_key(tmp_path: Path, headers: dict[str, Any]) -> None:
    app = build(tmp_path)
    paths = (CHAT, "/v1/models", "/debug/integrity", "/unknown", "//health", "/docsx", "/health/")
    answers = ask(app, *({"path": path, "headers": headers} for path in paths))
    for answer in answers:
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        expired = headers.get("Authorization") == "Bearer old-1"
        assert error["code"] == ("expired_api_key" if expired else "invalid_api_key")
        assert len(error["message"]) < 200


def test_health_needs_no_key(tmp_path: Path) -> None:
    paths = ("/health", "/ready", "/version")
    for answer in ask(build(tmp_path), *({"path": path, "method": "GET"} for path in paths)):
        assert answer.status_code == 200


def test_a_key_says_who_calls(tmp_path: Path) -> None:
    app = build(tmp_path)
    first, second, bob = (
        answer.json()
        for answer in ask(
            app,
            {"key": "ann-1"},
            {"headers": {"Authorization": "bearer  ann-2 "}},
            {"key": "bob-1", "params": {"model": "other"}},
        )
    )
    assert first == second, "keys of one name are one tenant"
    assert (first["name"], bob["name"]) == ("ann", "bob")
    assert first["tenant"] != bob["tenant"]


def test_a_key_that_is_not_for_a_model(tmp_path: Path) -> None:
    (answer,) = ask(build(tmp_path), {"key": "bob-1", "params": {"model": "m"}})
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "model_not_allowed"
    assert answer.json()["error"]["param"] == "model"


def test_without_keys_anybody_may_call_and_tenants_stay_apart() -> None:
    app = build()
    nobody, one, two = (a.json() for a in ask(app, {}, {"key": "one"}, {"key": "two"}))
    assert nobody["tenant"] == ""
    assert len({nobody["tenant"], one["tenant"], two["tenant"]}) == 3


def test_requests_are_counted_exactly_however_many_come_at_once(tmp_path: Path) -> None:
    app = build(tmp_path, RateSettings(requests_per_minute=20))
    answers = ask(app, *([{"key": "ann-1", "params": {"wait": "0.01"}}] * 100))
    assert [answer.status_code for answer in answers].count(200) == 20
    for answer in answers:
        assert answer.headers["x-ratelimit-limit-requests"] == "20"
        assert answer.headers["x-ratelimit-remaining-requests"].isdecimal()
        assert 0 < float(answer.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 60
        if answer.status_code != 200:
            assert answer.status_code == 429
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    (other,) = ask(app, {"key": "bob-1", "params": {"model": "other"}})
    assert other.headers["x-ratelimit-remaining-requests"] == "19"
    (free,) = ask(app, {"key": "ann-1", "path": "/v1/models"})
    assert free.status_code == 200, "only what costs something counts"


def test_a_key_has_limits_of_its_own(tmp_path: Path) -> None:
    app = build(tmp_path, RateSettings(requests_per_minute=20))
    answers = ask(app, *([{"key": "few-1"}] * 5))
    assert [answer.status_code for answer in answers].count(200) == 2


def test_requests_at_once_are_bounded_and_places_come_back(tmp_path: Path) -> None:
    app = build(tmp_path, RateSettings(concurrent_requests=3))
    for _ in range(3):
        answers = ask(app, *([{"key": "ann-1", "params": {"wait": "0.05"}}] * 10))
        assert sorted(answer.status_code for answer in answers) == [200] * 3 + [429] * 7
    failed = ask(app, *([{"key": "ann-1", "params": {"fail": "1"}}] * 3))
    assert {answer.status_code for answer in failed} == {500}
    assert ask(app, {"key": "ann-1"})[0].status_code == 200


def test_tokens_are_reserved_and_given_back(tmp_path: Path) -> None:
    app = build(tmp_path, RateSettings(tokens_per_minute=1000))
    answers = ask(
        app, *([{"key": "ann-1", "params": {"tokens": "300", "spent": "40", "wait": "0.05"}}] * 8)
    )
    assert sorted(answer.status_code for answer in answers) == [200] * 3 + [429] * 5
    (after,) = ask(app, {"key": "ann-1"})
    assert after.headers["x-ratelimit-remaining-tokens"] == str(1000 - 3 * 40)
    (too_much,) = ask(app, {"key": "ann-1", "params": {"tokens": "1001"}})
    assert too_much.status_code == 429
    assert too_much.headers["x-should-retry"] == "false"
    assert "retry-after" not in too_much.headers


def test_web_pages_are_kept_out_unless_they_are_named(tmp_path: Path) -> None:
    page = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    closed = build(tmp_path)
    (answer,) = ask(closed, {"method": "OPTIONS", "headers": page})
    assert answer.status_code == 401
    assert not [name for name in answer.headers if name.startswith("access-control")]
    (answer,) = ask(closed, {"key": "ann-1", "headers": {"Origin": "https://app.example"}})
    assert not [name for name in answer.headers if name.startswith("access-control")]

    opened = build(tmp_path, cors=CorsSettings(origins=("https://app.example",)))
    wanted = {**page, "Access-Control-Request-Headers": "authorization,content-type"}
    (answer,) = ask(opened, {"method": "OPTIONS", "headers": wanted})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    for extra in ({"key": "ann-1"}, {"key": "wrong"}):  # a page may read errors as well
        (answer,) = ask(opened, {**extra, "headers": {"Origin": "https://app.example"}})
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
    (answer,) = ask(opened, {"key": "ann-1", "headers": {"Origin": "https://evil.example"}})
    assert "access-control-allow-origin" not in answer.headers
