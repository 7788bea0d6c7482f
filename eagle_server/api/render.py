"""vLLM's endpoints for the prompts of a request in tokens. Routers that compare prefixes ask them before they route."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.routing import Route

from eagle_server.api.body import process_text, read_body
from eagle_server.api.chat import chat_handler
from eagle_server.api.completions import completion_handler
from eagle_server.api.generate import GenerationHandler
from eagle_server.api.request_id import request_id_of
from eagle_server.api.response_parts import json_response
from eagle_server.api.schemas.chat import ChatRequest
from eagle_server.api.schemas.completion import CompletionRequest
from eagle_server.api.schemas.generation import GenerationBody
from eagle_server.api.service import service_of
from eagle_server.api.sse import while_connected


class Rendered(msgspec.Struct):
    """One prompt of a request as the model would get it. `request_id` is the id that its answer would have."""

    request_id: str
    model: str
    token_ids: list[int]


async def render_completion(request: Request) -> Response:
    """A list with one entry per prompt."""
    return json_response(await _rendered(request, CompletionRequest, completion_handler, "cmpl"))


async def render_chat_completion(request: Request) -> Response:
    [conversation] = await _rendered(request, ChatRequest, chat_handler, "chatcmpl")
    return json_response(conversation)


router = APIRouter(
    routes=[
        Route("/v1/completions/render", render_completion, methods=["POST"]),
        Route("/v1/chat/completions/render", render_chat_completion, methods=["POST"]),
    ]
)


async def _rendered(
    request: Request, kind: type[Any], prepared: Callable[..., GenerationHandler], prefix: str
) -> list[Rendered]:
    """The prompts of a body that the generating endpoint would accept.

    Raises:
        ApiError: it would refuse the body.
    """
    body: GenerationBody = await read_body(kind, request)
    service = service_of(request)
    ready = service.ready_for(body.model)
    response_id = f"{prefix}-{request_id_of(request)}"
    work = process_text(body, lambda: prepared(body, service, ready, response_id))
    handler = await while_connected(request.receive, work)
    return [Rendered(handler.id, handler.model, state.prompt.token_ids) for state in handler.states[:: body.candidates]]
