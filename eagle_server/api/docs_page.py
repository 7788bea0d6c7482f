"""GET /docs: the OpenAPI document as a page for browsers, with all its files from this server."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import fastapi_offline
import msgspec
from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, Response
from fastapi.staticfiles import StaticFiles

DOCUMENT = "/openapi.json"
DOCS = "/docs"
FILES = f"{DOCS}/files"
PATHS = frozenset({DOCUMENT, DOCS, f"{FILES}/swagger-ui-bundle.js", f"{FILES}/swagger-ui.css"})


def add_docs_page(app: FastAPI, openapi: Callable[[], object]) -> None:
    """Add the document, the page and its files. Its links are relative, so they work below any path of a proxy."""

    @cache
    def encoded() -> bytes:
        return msgspec.json.encode(openapi())

    async def document() -> Response:
        return Response(encoded(), media_type="application/json")

    app.mount(FILES, StaticFiles(directory=Path(fastapi_offline.__file__).parent / "static"))
    app.add_api_route(DOCUMENT, document, methods=["GET", "HEAD"], include_in_schema=False)
    app.add_api_route(DOCS, _page, methods=["GET", "HEAD"], include_in_schema=False)


async def _page() -> HTMLResponse:
    return get_swagger_ui_html(
        openapi_url=_below(DOCUMENT),
        title="eagle_server",
        swagger_js_url=_below(f"{FILES}/swagger-ui-bundle.js"),
        swagger_css_url=_below(f"{FILES}/swagger-ui.css"),
        swagger_favicon_url="playground/icon.svg",
    )


def _below(path: str) -> str:
    """A link from the page, which lies at the root."""
    return path.removeprefix("/")
