"""An id for every request, for the response and the log: the client's x-request-id if valid, else a new one."""

from __future__ import annotations

import logging
import re
import uuid
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eagle_server.api.errors import ANTHROPIC_PATHS, as_api_error, shortened

logger = logging.getLogger(__name__)

HEADER = "x-request-id"
ANTHROPIC_HEADER = "request-id"
VALID_ID = re.compile(r"[A-Za-z0-9._:+/=-]{1,128}")


class RequestId:
    """ASGI middleware. It logs an unhandled exception with the request's id, and answers 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent_id = Headers(scope=scope).get(HEADER, "")
        request_id = sent_id if VALID_ID.fullmatch(sent_id) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[HEADER] = request_id
                if scope["path"].startswith(ANTHROPIC_PATHS):
                    headers[ANTHROPIC_HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except Exception as error:
            path = quote(shortened(scope["path"]))
            logger.exception("request %s failed: %s %s", request_id, shortened(scope["method"]), path)
            if status:
                raise  # closes the connection, so that the client sees the response as incomplete
            await as_api_error(error).response(scope["path"])(scope, receive, send_named)


def request_id_of(request: Request) -> str:
    request_id: str = request.state.request_id
    return request_id
