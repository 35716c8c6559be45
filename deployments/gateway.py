"""The gateway: OpenAI's HTTP API in front of the workers. Text in, text out."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from fastapi import FastAPI
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.api import CompletionApi
from deployments.body import read_object
from deployments.boundary import ErrorBoundary, http_error
from deployments.client import WorkerClient
from deployments.config import AppConfig
from deployments.errors import ApiError
from deployments.tokenizer import load_tokenizer
from specdec.model.resolve import resolve_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from deployments.worker import Worker

log = logging.getLogger("ray.serve")

#: A worker that does not say within this time that it lives makes /health say no. Seconds.
_HEALTH_TIMEOUT_S = 5.0


class Gateway:
    """Routes, each of which reads a body, has CompletionApi answer, and nothing else."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, config: AppConfig, workers: DeploymentHandle[Worker]
    ) -> None:
        """Ready once a worker is: its model's tokenizer is needed here.

        Raises:
            ModelError: the tokenizer cannot be loaded.
        """
        self._limits = config.gateway.limits
        self._debug = config.gateway.debug
        self._model_name = config.model_name
        self._created = int(time.time())
        self._client = WorkerClient(workers, config.gateway.retry_after_s)
        # Both may fetch the model where it is missing; a lock lets one do it.
        info, tokenizer = await asyncio.gather(
            self._client.info(), asyncio.to_thread(_load_tokenizer, config)
        )
        self._info = info
        self._api = CompletionApi(
            self._client,
            tokenizer,
            info,
            self._limits,
            self._model_name,
            _fingerprint(config),
        )
        log.info("gateway ready: model %s", self._model_name)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The routes. Ray Serve calls it after the constructor."""
        app = FastAPI(
            title="specdec",
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            exception_handlers={
                404: http_error,
                405: http_error,
            },
        )
        app.add_middleware(ErrorBoundary)
        app.get("/health")(self.health)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.model)
        app.post("/v1/chat/completions", response_model=None)(self.chat)
        app.post("/v1/completions", response_model=None)(self.complete)
        if self._debug:
            app.get("/debug/integrity")(self.integrity)
        return app

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._api.chat(await read_object(request, self._limits.body_bytes))

    async def complete(self, request: Request) -> Response:
        """Continue a text."""
        return await self._api.complete(await read_object(request, self._limits.body_bytes))

    async def models(self) -> JSONResponse:
        """The one model that is served."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, name: str) -> JSONResponse:
        """Details of a model."""
        if name != self._model_name:
            raise ApiError(
                404,
                f"The model {name!r:.200} is not served here.",
                param="model",
                code="model_not_found",
            )
        return JSONResponse(self._card())

    async def health(self) -> JSONResponse:
        """200 while a worker answers, else 503."""
        try:
            await asyncio.wait_for(self._client.info(), _HEALTH_TIMEOUT_S)
        except Exception as error:  # whatever it is: no worker answers  # noqa: BLE001
            log.warning("not healthy: %s", type(error).__name__)
            return JSONResponse({"status": "no worker answers"}, 503)
        return JSONResponse({"status": "ok"})

    async def integrity(self) -> JSONResponse:
        """The insides of one worker. Served only where ``gateway.debug`` is set."""
        report = asdict(await self._client.integrity())
        return JSONResponse(report, 200 if report["problem"] is None else 500)

    def _card(self) -> dict[str, object]:
        return {
            "id": self._model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "specdec",
            "max_model_len": self._info.max_model_length,
        }


def _load_tokenizer(config: AppConfig) -> PreTrainedTokenizerBase:
    return load_tokenizer(resolve_model(config.engine.model, config.engine.cache_dir))


def _fingerprint(config: AppConfig) -> str:
    """Changes with the settings that may change the answer of a seed."""
    digest = hashlib.sha256(config.engine.model_dump_json().encode()).hexdigest()
    return f"fp_{digest[:10]}"
