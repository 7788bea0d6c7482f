"""vLLM's endpoints for the prompts of a request in tokens. Routers that compare prefixes call them first."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.routing import Route

from eagle_server.api.connection import while_connected
from eagle_server.api.endpoints.chat import CHAT_COMPLETIONS
from eagle_server.api.endpoints.completions import COMPLETIONS
from eagle_server.api.generation.endpoint import Endpoint
from eagle_server.api.generation.generate import checked
from eagle_server.api.guard.body import process_text
from eagle_server.api.routes import json_response
from eagle_server.api.service import service_of


class Rendered(msgspec.Struct):
    """One prompt of a request as the model would get it. `request_id` is the id that its answer would have."""

    request_id: str
    model: str
    token_ids: list[int]


async def render_completion(request: Request) -> Response:
    """A list with one entry per prompt."""
    return json_response(await _rendered(request, COMPLETIONS))


async def render_chat_completion(request: Request) -> Response:
    [conversation] = await _rendered(request, CHAT_COMPLETIONS)
    return json_response(conversation)


router = APIRouter(
    routes=[
        Route(f"{COMPLETIONS.path}/render", render_completion, methods=["POST"]),
        Route(f"{CHAT_COMPLETIONS.path}/render", render_chat_completion, methods=["POST"]),
    ]
)


async def _rendered(request: Request, endpoint: Endpoint[Any]) -> list[Rendered]:
    """The prompts of a body that the generating endpoint would accept.

    Raises:
        ApiError: it would refuse the body.
    """
    body, prepare = await checked(endpoint, request)
    prepared = await while_connected(request.receive, process_text(body, prepare))
    model = service_of(request).model_name
    return [Rendered(prepared.response_id, model, state.prompt.token_ids) for state in prepared.first_states]
