"""The playground: a page for browsers at `/` and the files that it loads, all from this server."""

from __future__ import annotations

from functools import cache
from importlib import resources

from fastapi import APIRouter, Request, Response

from eagle_server.api.routes import HeadRoute

TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_ASSETS = resources.files("eagle_server").joinpath("assets", "playground")
FILES = {
    asset.name: TYPES[asset.name.rpartition(".")[2]] for asset in _ASSETS.iterdir() if not asset.name.endswith(".html")
}
PATHS = frozenset(f"/playground/{name}" for name in FILES)
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

router = APIRouter(route_class=HeadRoute)


def is_wanted(request: Request) -> bool:
    """Whether the client asks for HTML. Browsers do; other programs accept anything."""
    return "text/html" in request.headers.get("accept", "")


def page() -> Response:
    return Response(_content("index.html"), headers=HEADERS | {"vary": "accept"}, media_type="text/html")


async def file(request: Request) -> Response:
    """One of FILES."""
    name = request.url.path.rpartition("/")[2]
    return Response(_content(name), headers=HEADERS, media_type=FILES[name])


for path in sorted(PATHS):
    router.add_api_route(path, file, methods=["GET"])


@cache
def _content(name: str) -> bytes:
    return _ASSETS.joinpath(name).read_bytes()
