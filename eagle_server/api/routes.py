"""Common parts of the routes that do not generate."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi.routing import APIRoute
from starlette.responses import Response


class HeadRoute(APIRoute):
    """A route that answers HEAD as it answers GET. FastAPI's do not, Starlette's do. The HTTP server drops the body."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.methods and "GET" in self.methods:
            self.methods.add("HEAD")


def json_response(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
