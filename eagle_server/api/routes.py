"""Routes: one for all endpoints that generate, and the common parts of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from eagle_server.api.generation.endpoint import Endpoint
from eagle_server.api.generation.generate import respond
from eagle_server.api.generation.prepare import Prepared
from eagle_server.api.guard.body import process, read_body
from eagle_server.api.guard.request_id import request_id_of
from eagle_server.api.schemas.generation import SamplingBody
from eagle_server.api.service import service_of

B = TypeVar("B", bound=SamplingBody)


def generating_route(endpoint: Endpoint[Any]) -> Route:
    """A Starlette route: it reads the body itself, and FastAPI's parsing would only add latency."""

    async def answer(request: Request) -> Response:
        body, prepare = await checked(endpoint, request)
        prepared = await process(request, body, prepare)
        return await respond(endpoint.answer(body, prepared, service_of(request)), request)

    return Route(endpoint.path, answer, methods=["POST"])


async def checked(endpoint: Endpoint[B], request: Request) -> tuple[B, Callable[[], Prepared]]:
    """The body of a request, and the function that prepares it.

    Raises:
        ApiError: the body is wrong, or asks for another model.
        EngineUnavailable: there is no engine.
    """
    body = await read_body(endpoint.schema, request)
    service = service_of(request)
    ready = service.ready_for(body.model)
    response_id = f"{endpoint.id_prefix}{request_id_of(request)}"
    return body, lambda: endpoint.prepare(body, service, ready, response_id)


class HeadRoute(APIRoute):
    """A route that answers HEAD as it answers GET. FastAPI's do not, Starlette's do. The HTTP server drops the body."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.methods and "GET" in self.methods:
            self.methods.add("HEAD")


def json_response(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
