"""Endpoints about the server itself: models, health, version, configuration and the prefix cache."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from http import HTTPStatus
from itertools import count
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from eagle_server.api import playground
from eagle_server.api.connection import while_connected
from eagle_server.api.errors import ApiError, unavailable
from eagle_server.api.guard.admission import admission_of
from eagle_server.api.routes import HeadRoute, json_response
from eagle_server.api.service import Service, service_of
from eagle_server.client.client import EngineClient
from eagle_server.request import Ready, SamplingParams
from eagle_server.request import Request as EngineRequest
from eagle_server.version import version

SERVING = ("context_length", "max_request_tokens", "vocab_size", "speculative_algorithm", "num_steps")
PATHS = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/models",
    "/v1/server_info",
    "/health",
    "/metrics",
    "/openapi.json",
    "/docs",
]
PROBE_SECONDS = 20.0  # as in SGLang

router = APIRouter(route_class=HeadRoute)
STARTED = int(time.time())


class Model(msgspec.Struct):
    """OpenAI's model object. `max_model_len` is vLLM's: most tokens of a request, prompt and output together."""

    id: str
    created: int
    max_model_len: int | None
    object: str = "model"
    owned_by: str = "eagle_server"


class Models(msgspec.Struct):
    data: list[Model]
    object: str = "list"


class Health(msgspec.Struct):
    status: str


class Version(msgspec.Struct):
    version: str


class CacheFlushed(msgspec.Struct):
    """`freed_tokens` counts the tokens whose KV was in the prefix cache and is free now."""

    freed_tokens: int


class ModelInfo(msgspec.Struct):
    """The names are SGLang's. Every model here generates text."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: bool = True


class WorkerLoad(msgspec.Struct):
    """The names are SGLang's. `num_tokens` counts the tokens whose KV running requests hold."""

    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int


class ServerInfo(msgspec.Struct):
    """`config` is the given configuration, `resolved` the effective one. `engine` has load, KV use and totals.

    Routers for SGLang's workers read the names from `served_model_name` to `tp_size`.
    """

    version: str
    model: str
    served_model_name: str
    model_path: str
    tp_size: int
    config: dict[str, Any]
    resolved: dict[str, Any] | None
    serving: dict[str, Any] | None
    engine: dict[str, Any]
    active_requests: int


class Index(msgspec.Struct):
    name: str
    version: str
    model: str
    endpoints: list[str]


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    return json_response(Models([_model(service_of(request))]))


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> Response:
    service = service_of(request)
    service.check_model(name)
    return json_response(_model(service))


@router.get("/ping")
@router.get("/health")
async def health(request: Request) -> Response:
    """200 while completions are served. SageMaker asks /ping."""
    _check_health(request)
    return json_response(Health("ok"))


@router.get("/health_generate")
async def health_generate(request: Request) -> Response:
    """200 if a token is generated in time. Who asks while the engine is being asked waits for that answer."""
    _check_health(request)
    probe: Probe = request.app.state.probe
    await while_connected(request.receive, probe.answer())
    return json_response(Health("ok"))


@router.get("/version")
async def get_version() -> Response:
    return json_response(Version(version()))


@router.get("/model_info")
@router.get("/get_model_info")
async def model_info(request: Request) -> Response:
    """What routers ask a worker about its model, as SGLang names it."""
    service = service_of(request)
    model = service.configuration["model"]
    path = model["model_path"]
    return json_response(ModelInfo(path, model["tokenizer_path"] or path, service.model_name))


@router.get("/server_info")
@router.get("/get_server_info")
@router.get("/v1/server_info")
async def server_info(request: Request) -> Response:
    """The model, the configuration and the engine's state."""
    service = service_of(request)
    client, ready = service.client, service.client.ready
    engine = {"available": client.is_available, **(msgspec.structs.asdict(client.stats) if client.stats else {})}
    info = ServerInfo(
        version=version(),
        model=service.model_name,
        served_model_name=service.model_name,
        model_path=service.configuration["model"]["model_path"],
        tp_size=service.configuration["device"]["tp_size"],
        config=dict(service.configuration),
        resolved=_resolved(service, ready) if ready else None,
        serving={name: getattr(ready, name) for name in SERVING} if ready else None,
        engine=engine,
        active_requests=admission_of(request).active,
    )
    return json_response(info)


def _resolved(service: Service, ready: Ready) -> dict[str, Any]:
    """The engine's resolved configuration, and what it does not know: parsers, template, defaults of sampling."""
    model = {**ready.resolved.get("model", {}), **service.parsers, "sampling_defaults": dict(service.sampling_defaults)}
    return {**ready.resolved, "model": model}


@router.get("/get_load")
async def get_load(request: Request) -> Response:
    """The load as SGLang's routers read it: a list with one entry, as there is one engine."""
    stats = service_of(request).client.stats
    if stats is None:
        return json_response([WorkerLoad(0, 0, 0, 0)])
    held = stats.kv_slots_total - stats.kv_slots_free
    return json_response([WorkerLoad(0, stats.running + stats.waiting, stats.waiting, held)])


@router.post("/flush_cache")
async def flush_cache(request: Request) -> Response:
    """Drop the prefix cache. As in SGLang, this fails while requests run or wait."""
    flushed = await service_of(request).client.flush_cache()
    if not flushed.is_done:
        message = f"the cache was not flushed: {flushed.running} requests are running and {flushed.waiting} waiting"
        raise ApiError(HTTPStatus.BAD_REQUEST, message, code="requests_in_progress")
    return json_response(CacheFlushed(flushed.freed_slots))


@router.get("/")
async def index(request: Request) -> Response:
    """The playground for browsers, a short JSON object for other clients."""
    if playground.is_wanted(request):
        return playground.page()
    answer = json_response(Index("eagle_server", version(), service_of(request).model_name, PATHS))
    answer.headers["vary"] = "accept"
    return answer


def _check_health(request: Request) -> None:
    client = service_of(request).client
    if admission_of(request).is_draining:
        raise unavailable("the server is shutting down")
    if not client.is_available:
        started = client.ready is not None
        raise unavailable("the engine died and is starting again" if started else "the engine is starting")


class Probe:
    """Asks the engine for a token: one request at a time, however many clients ask."""

    def __init__(self, client: EngineClient) -> None:
        self._client, self._count = client, count()
        self._running: asyncio.Task[None] | None = None

    async def answer(self) -> None:
        """Wait until a token is generated.

        Raises:
            ApiError: status 503, none is in time, or generation failed.
            EngineUnavailable: there is no engine.
            QueueFull: too many requests are waiting.
        """
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._ask())
            self._running.add_done_callback(lambda task: task.cancelled() or task.exception())  # all may have left
        await asyncio.shield(self._running)

    async def _ask(self) -> None:
        """The request may wait in a busy engine, so any request's token counts."""
        before = self._client.stats.generated_tokens if self._client.stats else 0
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await self._generate_one()
        except TimeoutError:
            if self._client.stats is None or self._client.stats.generated_tokens <= before:
                raise unavailable(f"no token was generated within {PROBE_SECONDS:g} seconds") from None

    async def _generate_one(self) -> None:
        request = EngineRequest(
            request_id=f"health-{next(self._count)}",
            prompt_token_ids=[0],
            sampling=SamplingParams(max_tokens=1, seed=0, temperature=0.0),
        )
        async with aclosing(self._client.generate(request)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                if delta.error is not None:
                    raise unavailable(f"generation failed: {delta.error}")


def _model(service: Service) -> Model:
    ready = service.client.ready
    return Model(service.model_name, STARTED, ready.max_request_tokens if ready else None)
