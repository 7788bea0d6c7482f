"""The endpoints that generate."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from starlette.routing import Route

from eagle_server.api.call import Call
from eagle_server.api.preparation import chat_call, completion_call
from eagle_server.api.reading import read
from eagle_server.api.request_id import request_id_of
from eagle_server.api.schemas.chat import ChatRequest
from eagle_server.api.schemas.completion import CompletionRequest
from eagle_server.api.service import service_of
from eagle_server.api.sse import EventStream, while_connected


async def create_completion(request: Request) -> Response:
    body = await read(CompletionRequest, request)
    call = await completion_call(body, service_of(request), request_id_of(request))
    return await _respond(call, request, stream=body.stream)


async def create_chat_completion(request: Request) -> Response:
    body = await read(ChatRequest, request)
    call = await chat_call(body, service_of(request), request_id_of(request))
    return await _respond(call, request, stream=body.stream)


async def _respond(call: Call, request: Request, *, stream: bool) -> Response:
    if not stream:
        answer = await while_connected(request.receive, call.answer())
        return Response(answer, media_type="application/json")
    events = call.events()
    first = await while_connected(request.receive, anext(events))  # errors until here have their status
    return EventStream(first, events)


# Starlette's routes, since these read their bodies themselves: FastAPI's own machinery would only add to the latency.
router = APIRouter(
    routes=[
        Route("/v1/completions", create_completion, methods=["POST"]),
        Route("/v1/chat/completions", create_chat_completion, methods=["POST"]),
    ]
)
