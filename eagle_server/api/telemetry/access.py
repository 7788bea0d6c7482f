"""Gives every HTTP request an id, logs one line at its end, and reports generating requests to metrics and spans."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eagle_server.api.errors import ANTHROPIC_PATHS, CLIENT_CLOSED_REQUEST, as_api_error, shortened
from eagle_server.api.telemetry.request_record import RequestRecord, current_request

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"
ANTHROPIC_ID_HEADER = "request-id"
VALID_ID = re.compile(r"[A-Za-z0-9._:+/=-]{1,128}")

POLLED = frozenset({"/health", "/ping", "/health_generate", "/metrics"})  # polled every few seconds by monitoring
PAGE_FILES = ("/playground/", "/docs/")

OnGenerated = Callable[[RequestRecord], None]


class RequestId:
    """ASGI middleware. It logs an unhandled exception with the request's id, and answers 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent_id = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        request_id = sent_id if VALID_ID.fullmatch(sent_id) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = request_id
                if scope["path"].startswith(ANTHROPIC_PATHS):
                    headers[ANTHROPIC_ID_HEADER] = request_id
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


class AccessLog:
    """ASGI middleware inside of RequestId. At the end of every request it calls `on_answered`, and then `on_generated`
    if the request has reached the engine."""

    def __init__(self, app: ASGIApp, on_generated: Sequence[OnGenerated], on_answered: OnGenerated) -> None:
        self._app = app
        self._on_generated = on_generated
        self._on_answered = on_answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(scope["state"]["request_id"], scope["method"], scope["path"], Headers(scope=scope))
        # Never reset: later log lines of this task, such as an unexpected exception's, belong to this request too.
        current_request.set(record)
        is_whole = False

        async def send_and_note(message: Message) -> None:
            nonlocal is_whole
            if message["type"] == "http.response.start":
                record.status = message["status"]
            else:
                is_whole = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception:
            record.status = record.status or HTTPStatus.INTERNAL_SERVER_ERROR
            raise
        finally:
            if not record.status or (record.status < HTTPStatus.BAD_REQUEST and not is_whole):
                record.status = CLIENT_CLOSED_REQUEST
            _log(record)
            self._on_answered(record)
            for observe in self._on_generated if record.engine_requests else ():
                observe(record)


def _log(record: RequestRecord) -> None:
    milliseconds = 1000 * (time.monotonic() - record.began)
    path = quote(shortened(record.path))  # decoded it may have line breaks and control characters
    method = shortened(record.method)
    fields: dict[str, Any] = {
        "method": method,
        "path": path,
        "status": int(record.status),
        "ms": round(milliseconds, 1),
    }
    line, values = "%s %s %d in %.1f ms", [method, path, record.status, milliseconds]
    if record.engine_requests:
        fields |= {"prompt_tokens": record.prompt_tokens, "output_tokens": record.output_tokens}
        line += ", %d prompt tokens, %d output tokens"
        values += [record.prompt_tokens, record.output_tokens]
    if record.key:
        fields["key"] = record.key
        line += ", key %s"
        values.append(record.key)
    spec = record.spec
    if spec is not None:
        fields["accept_length"] = round(spec.mean_acceptance_length, 3)
        line += ", accept length %.2f"
        values.append(spec.mean_acceptance_length)
    level = logging.DEBUG if record.path in POLLED or record.path.startswith(PAGE_FILES) else logging.INFO
    logger.log(level, line, *values, extra={"fields": fields})
