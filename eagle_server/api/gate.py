"""What every request passes before its route: the API key, and whether there is room for one more to generate."""

from __future__ import annotations

import hmac
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from eagle_server.api import playground
from eagle_server.api.errors import ApiError, as_api_error, unavailable
from eagle_server.api.service import Service
from eagle_server.client.client import QueueFull

# What a load balancer, a probe or a curious visitor may see without the key.
OPEN = frozenset({"/", "/health", "/metrics", "/health_generate", "/version", "/openapi.json", *playground.PATHS})
GENERATING = frozenset({"/v1/completions", "/v1/chat/completions"})


class Gate:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, service: Service, api_key: str | None) -> None:
        self._app = app
        self._service = service
        self._authorization = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal.response(scope, receive, send)
        elif scope["path"] in GENERATING:
            with self._service.admission.completion():
                await self._app(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        path: str = scope["path"]
        if self._authorization is not None and path not in OPEN:
            given = Headers(scope=scope).get("authorization", "")
            # In constant time, so that the time of a refusal says nothing about the key. Latin-1 is how headers travel.
            if not hmac.compare_digest(given.encode("latin-1"), self._authorization):
                return ApiError(
                    HTTPStatus.UNAUTHORIZED,
                    "this server needs an API key: send the header 'Authorization: Bearer <key>'",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
        if path in GENERATING and self._service.admission.is_draining:
            return unavailable("the server is shutting down")
        if path in GENERATING and not self._service.client.has_room():  # before its body is read and tokenized
            return as_api_error(QueueFull(f"{self._service.client.max_waiting} requests are waiting already"))
        return None
