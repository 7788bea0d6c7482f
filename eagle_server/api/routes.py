"""The HTTP endpoints."""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from eagle_server.api.completions import Completion
from eagle_server.api.errors import ApiError, unavailable
from eagle_server.api.responses import json_response
from eagle_server.api.schemas import parse_completion
from eagle_server.api.service import Service, service_of, version
from eagle_server.api.sse import EventStream, while_connected

MAX_BODY_BYTES = 16 * 2**20
SERVING = ("context_length", "max_request_tokens", "vocab_size", "speculative_algorithm", "num_steps")

router = APIRouter()
STARTED = int(time.time())


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    body = parse_completion(await _read_body(request))
    completion = await Completion.prepare(body, service_of(request))
    if not body.stream:
        answer = await while_connected(request.receive, completion.answer())
        return Response(answer, media_type="application/json")
    events = completion.events()
    first = await while_connected(request.receive, anext(events))  # errors until here have their status
    return EventStream(first, events)


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    return json_response({"object": "list", "data": [_model(service_of(request))]})


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> Response:
    service = service_of(request)
    if name != service.model_name:
        message = f"the model {name!r} does not exist; this server has {service.model_name!r}"
        raise ApiError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")
    return json_response(_model(service))


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while completions are served."""
    service = service_of(request)
    if service.admission.is_draining:
        raise unavailable("the server is shutting down")
    if not service.client.is_available:
        started = service.client.ready is not None
        raise unavailable("the engine died and is starting again" if started else "the engine is starting")
    return json_response({"status": "ok"})


@router.get("/v1/server_info")
async def server_info(request: Request) -> Response:
    """What is served, how it was configured (`config` as given, `resolved` as in force) and the engine's state."""
    service = service_of(request)
    client, ready = service.client, service.client.ready
    engine = {"available": client.is_available, **(msgspec.structs.asdict(client.stats) if client.stats else {})}
    return json_response(
        {
            "version": version(),
            "model": service.model_name,
            "config": service.configuration,
            "resolved": ready.resolved if ready else None,
            "serving": {name: getattr(ready, name) for name in SERVING} if ready else None,
            "engine": engine,
            "active_requests": service.admission.active,
        }
    )


@router.get("/")
async def index(request: Request) -> Response:
    paths = ["/v1/completions", "/v1/models", "/v1/server_info", "/health", "/metrics"]
    return json_response(
        {"name": "eagle_server", "version": version(), "model": service_of(request).model_name, "endpoints": paths}
    )


def _model(service: Service) -> dict[str, Any]:
    ready = service.client.ready
    return {
        "id": service.model_name,
        "object": "model",
        "created": STARTED,
        "owned_by": "eagle_server",
        "max_model_len": ready.max_request_tokens if ready else None,
    }


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            message = f"the body is larger than {MAX_BODY_BYTES} bytes"
            raise ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="body_too_large")
    return bytes(body)
