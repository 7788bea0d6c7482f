"""What every request passes before its route: the API key, and the refusal of new completions while draining."""

from __future__ import annotations

import hmac
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from eagle_server.api.errors import ApiError, unavailable
from eagle_server.api.service import Admission

PROTECTED = "/v1/"
COMPLETIONS = "/v1/completions"


class Gate:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, admission: Admission, api_key: str | None) -> None:
        self._app = app
        self._admission = admission
        self._authorization = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal.response(scope, receive, send)
        elif scope["path"] == COMPLETIONS:
            with self._admission.completion():
                await self._app(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        path: str = scope["path"]
        if self._authorization is not None and path.startswith(PROTECTED):
            given = Headers(scope=scope).get("authorization", "")
            # In constant time, so that the time of a refusal says nothing about the key. Latin-1 is how headers travel.
            if not hmac.compare_digest(given.encode("latin-1"), self._authorization):
                return ApiError(
                    HTTPStatus.UNAUTHORIZED,
                    "this server needs an API key: send the header 'Authorization: Bearer <key>'",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
        if self._admission.is_draining and path == COMPLETIONS:
            return unavailable("the server is shutting down")
        return None
