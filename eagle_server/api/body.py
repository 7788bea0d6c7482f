"""Reads a request's body, with a limit on its size and on the time it takes to arrive."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TypeVar

from fastapi import Request

from eagle_server.api.errors import ApiError
from eagle_server.api.schemas.base import Body, parse

B = TypeVar("B", bound=Body)

MAX_BODY_BYTES = 16 * 2**20
BODY_SECONDS = 60.0


async def read_body(schema: type[B], request: Request) -> B:
    """The parsed and validated body.

    Raises:
        ApiError: the body is too large, too slow or invalid.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    message = f"the body is larger than {MAX_BODY_BYTES} bytes"
                    raise ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="body_too_large")
    except TimeoutError:
        message = f"the body did not come within {BODY_SECONDS:g} seconds"
        raise ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="slow_body") from None
    return parse(schema, bytes(body))
