"""What every HTTP request leaves behind: a line in the log, and a span if it generated and spans are wanted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eagle_server.api.errors import CLIENT_CLOSED_REQUEST
from eagle_server.api.telemetry.calls import Call, current_call

logger = logging.getLogger(__name__)

POLLED = frozenset({"/health", "/health_generate", "/metrics"})  # every few seconds, by machines

OnGenerated = Callable[[Call], None]


class Access:
    """ASGI middleware inside of RequestId. `on_generated` get every call that reached the engine, at its end."""

    def __init__(self, app: ASGIApp, on_generated: Sequence[OnGenerated]) -> None:
        self._app = app
        self._on_generated = on_generated

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = Call(scope["state"]["request_id"], scope["method"], scope["path"], Headers(scope=scope))
        # Never reset: what follows in this task, such as the log line of an unexpected exception, is of this call too.
        current_call.set(call)

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except Exception:
            call.status = call.status or HTTPStatus.INTERNAL_SERVER_ERROR
            raise
        finally:
            call.status = call.status or CLIENT_CLOSED_REQUEST
            _log(call)
            for observe in self._on_generated if call.generations else ():
                observe(call)


def _log(call: Call) -> None:
    milliseconds = 1000 * (time.monotonic() - call.began)
    path = quote(call.path)  # decoded it may hold line breaks and what else terminals obey
    fields: dict[str, Any] = {
        "method": call.method,
        "path": path,
        "status": int(call.status),
        "ms": round(milliseconds, 1),
    }
    line, values = "%s %s %d in %.1f ms", [call.method, path, call.status, milliseconds]
    if call.generations:
        fields |= {"prompt_tokens": call.prompt_tokens, "output_tokens": call.output_tokens}
        line += ", %d prompt tokens, %d output tokens"
        values += [call.prompt_tokens, call.output_tokens]
    spec = call.spec
    if spec is not None:
        fields["accept_length"] = round(spec.mean_acceptance_length, 3)
        line += ", accept length %.2f"
        values.append(spec.mean_acceptance_length)
    level = logging.DEBUG if call.path in POLLED else logging.INFO
    logger.log(level, line, *values, extra={"fields": fields})
