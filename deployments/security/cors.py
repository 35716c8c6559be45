"""Cross-origin requests: which web pages a browser lets call this server."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from deployments.security.settings import CorsSettings

#: Headers of an answer that a page may read.
_EXPOSED = (
    "Retry-After",
    *(
        f"x-ratelimit-{part}-{name}"
        for part in ("limit", "remaining", "reset")
        for name in ("requests", "tokens")
    ),
)


def add_cors(app: FastAPI, settings: CorsSettings) -> None:
    """Allow what the settings name; without any, browsers keep every other page out."""
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
            expose_headers=list(_EXPOSED),
            max_age=settings.max_age_s,
        )
