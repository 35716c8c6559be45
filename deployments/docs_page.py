"""``/docs``: the API to read and to try, from files of this machine alone."""

from __future__ import annotations

from pathlib import Path

import fastapi_offline
from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.staticfiles import StaticFiles
from starlette.responses import HTMLResponse

#: What a page of this server may load and where it may send: nothing but this server. The page
#: itself starts by an inline script.
_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


def add_docs(app: FastAPI) -> None:
    """Serve the page and what it loads."""
    assets = Path(fastapi_offline.__file__).parent / "static"
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=f"{app.title}: HTTP API",
        swagger_js_url="docs/assets/swagger-ui-bundle.js",
        swagger_css_url="docs/assets/swagger-ui.css",
        swagger_favicon_url="docs/assets/favicon.png",
        swagger_ui_parameters={"validatorUrl": None},
    )
    page.headers["Content-Security-Policy"] = _POLICY

    async def docs() -> HTMLResponse:
        return page

    app.get("/docs", include_in_schema=False)(docs)
    app.mount("/docs/assets", StaticFiles(directory=assets), name="docs-assets")
