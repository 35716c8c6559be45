"""The gateway: OpenAI's HTTP API in front of the workers. Text in, text out."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.admission import Admission, capacity
from deployments.api import CompletionApi
from deployments.body import parse_object, read_body
from deployments.boundary import ErrorBoundary, http_error
from deployments.client import WorkerClient
from deployments.config import AppConfig
from deployments.docs_page import add_docs
from deployments.errors import ApiError
from deployments.idempotency import Idempotency, idempotency_of
from deployments.metrics import table
from deployments.metrics.recorder import Recorder
from deployments.metrics.request_log import open_request_log
from deployments.metrics.request_watch import OpenRequests, RequestWatch
from deployments.metrics.start import replica_id, start_publisher
from deployments.openapi import document
from deployments.recovery import Recovery
from deployments.responses import ModelCard, ModelList
from deployments.security.cors import add_cors
from deployments.security.guard import Caller, Guard, caller_of
from deployments.security.keys import KeyRing
from deployments.tokenization import TokenizationApi
from deployments.tokenizer import load_tokenizer
from deployments.tools.parser import FORMATS
from deployments.tools.transcript import Transcript
from deployments.tracing.middleware import TraceRequests
from deployments.tracing.setup import Tracing
from specdec.model.resolve import resolve_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from deployments.worker import Worker

log = logging.getLogger("ray.serve")

#: A worker that does not say within this time that it lives makes /ready say no. Seconds.
_READY_TIMEOUT_S = 5.0

Endpoint = Callable[[dict[str, Any], Caller, Idempotency | None], Awaitable[Response]]


class Gateway:
    """Routes, each of which reads a body, has CompletionApi answer, and nothing else."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, config: AppConfig, workers: DeploymentHandle[Worker]
    ) -> None:
        """Ready once a worker is: its model's tokenizer is needed here.

        Raises:
            ModelError: the tokenizer cannot be loaded.
            ConfigError: the API keys cannot be read.
        """
        self._limits = config.gateway.limits
        self._settings = config.gateway
        security, queue = config.gateway.security, config.gateway.queue
        self._model_name = config.model_name
        self._created = int(time.time())
        self.recorder = Recorder(config.metrics.enabled)
        self._open = OpenRequests()
        self._request_log = open_request_log(config.logs, replica_id())
        self._client = WorkerClient(workers, config, self.recorder)
        self._tracing = Tracing(config.traces, "gateway")
        # Both may fetch the model where it is missing; a lock lets one do it.
        info, tokenizer = await asyncio.gather(
            self._client.first_info(), asyncio.to_thread(_load_tokenizer, config)
        )
        self._info = info
        self._keys = KeyRing(security.keys) if security.keys.wanted else None
        transcript = Transcript(tokenizer, config.gateway.tools.prompt == "auto")
        admission = Admission(lambda: capacity(config, info), queue.max_waiting, queue.wait_s)
        self._api = CompletionApi(
            self._client,
            tokenizer,
            info,
            self._limits,
            self._model_name,
            _fingerprint(config),
            admission,
            config.gateway.retry_after_s,
            transcript,
            FORMATS[config.gateway.tools.parser],
            Recovery.open(config),
        )
        self._tokenization = TokenizationApi(
            tokenizer, transcript, info.max_model_length, info.vocab_size, self._model_name
        )

        def tell() -> None:
            self.recorder.set(table.OPEN, self._open.count)
            self.recorder.set(table.WAITING, admission.waiting)

        self._publisher = start_publisher(
            config.metrics, self.recorder, "gateway", self._model_name, tell
        )
        log.info("gateway ready: model %s", self._model_name)

    def __del__(self) -> None:
        publisher = getattr(self, "_publisher", None)
        if publisher is not None:
            publisher.close()
        tracing = getattr(self, "_tracing", None)
        if tracing is not None:
            tracing.close()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The routes. Ray Serve calls it after the constructor."""
        app = FastAPI(
            title="specdec",
            docs_url=None,
            redoc_url=None,
            openapi_url=None,
            redirect_slashes=False,
            exception_handlers={
                404: http_error,
                405: http_error,
            },
        )
        # the last one added is the first to see a request
        app.add_middleware(Guard, keys=self._keys, rates=self._settings.security.rates)
        app.add_middleware(ErrorBoundary)
        app.add_middleware(RequestWatch, self.recorder, self._request_log, self._open)
        if self._tracing.settings.enabled:  # outermost: the line in the log names its trace
            app.add_middleware(TraceRequests, tracing=self._tracing, model=self._model_name)
        add_cors(app, self._settings.security.cors)
        app.get("/health")(self.health)
        app.get("/ready")(self.ready)
        app.get("/version")(self.version)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.model)
        app.post("/v1/chat/completions", response_model=None)(self.chat)
        app.post("/v1/completions", response_model=None)(self.complete)
        app.post("/tokenize")(self.tokenize)
        app.post("/detokenize")(self.detokenize)
        if self._settings.docs:
            app.get("/openapi.json")(self.openapi)
            add_docs(app)
        if self._settings.debug:
            app.get("/debug/integrity")(self.integrity)
        return app

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._answer(request, self._api.chat)

    async def complete(self, request: Request) -> Response:
        """Continue a text."""
        return await self._answer(request, self._api.complete)

    async def _answer(self, request: Request, endpoint: Endpoint) -> Response:
        """A new answer, or what follows an event of an old one."""
        caller, last_event_id = caller_of(request.scope), request.headers.get("last-event-id")
        if last_event_id is not None:
            self._api.check_room()
            return await self._api.resume(last_event_id, caller)
        body = await self._read(request)
        self._api.check_room()
        data = parse_object(body)
        return await endpoint(data, caller, idempotency_of(request, data))

    async def tokenize(self, request: Request) -> JSONResponse:
        """Text or conversation to tokens."""
        body = parse_object(await self._read(request))
        answer = await self._tokenization.tokenize(body, caller_of(request.scope))
        return JSONResponse(answer.model_dump())

    async def detokenize(self, request: Request) -> JSONResponse:
        """Tokens to text."""
        body = parse_object(await self._read(request))
        answer = await self._tokenization.detokenize(body, caller_of(request.scope))
        return JSONResponse(answer.model_dump())

    async def models(self) -> JSONResponse:
        """The one model that is served."""
        return JSONResponse(ModelList(data=[self._card()]).model_dump())

    async def model(self, name: str, request: Request) -> JSONResponse:
        """Details of a model."""
        if name != self._model_name:
            raise ApiError(
                404,
                f"The model {name!r:.200} is not served here.",
                param="model",
                code="model_not_found",
            )
        caller_of(request.scope).check_model(name)
        return JSONResponse(self._card().model_dump())

    async def health(self) -> JSONResponse:
        """200 as long as this gateway answers at all."""
        return JSONResponse({"status": "ok"})

    async def ready(self) -> JSONResponse:
        """200 while a worker answers, else 503."""
        try:
            await asyncio.wait_for(self._client.info(), _READY_TIMEOUT_S)
        except Exception as error:  # whatever it is: no worker answers  # noqa: BLE001
            log.warning("not ready: %s", type(error).__name__)
            return JSONResponse({"status": "no worker answers"}, 503)
        return JSONResponse({"status": "ok"})

    async def version(self) -> JSONResponse:
        """Which release this is."""
        return JSONResponse({"version": version("specdec")})

    async def openapi(self) -> JSONResponse:
        """What all of this takes and answers."""
        return JSONResponse(document(self._model_name, self._limits, self._keys is not None))

    async def integrity(self) -> JSONResponse:
        """The insides of one worker. Served only where ``gateway.debug`` is set."""
        report = asdict(await self._client.integrity())
        report["workers"] = sorted(self._client.workers_ready())
        return JSONResponse(report, 200 if report["problem"] is None else 500)

    async def _read(self, request: Request) -> bytes:
        return await read_body(request, self._limits.body_bytes, self._limits.body_timeout_s)

    def _card(self) -> ModelCard:
        return ModelCard(
            id=self._model_name,
            created=self._created,
            root=self._model_name,
            max_model_len=self._info.max_model_length,
        )


def _load_tokenizer(config: AppConfig) -> PreTrainedTokenizerBase:
    return load_tokenizer(resolve_model(config.engine.model, config.engine.cache_dir))


def _fingerprint(config: AppConfig) -> str:
    """Changes with the settings that may change the answer of a seed."""
    settings = config.engine.model_dump_json(exclude={"prefix_cache", "cache_dir"})
    digest = hashlib.sha256(settings.encode()).hexdigest()
    return f"fp_{digest[:10]}"
