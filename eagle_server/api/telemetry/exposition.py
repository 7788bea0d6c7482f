"""GET /metrics. It needs no API key: scrapers seldom have one, and the page has only numbers and the model's name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from math import inf

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry
from prometheus_client import exposition as text
from prometheus_client.openmetrics import exposition as openmetrics

from eagle_server.api.routes import HeadRoute

router = APIRouter(route_class=HeadRoute)
Encode = Callable[..., bytes]
PAGE_SECONDS = 0.2  # between two pages of one format: making one takes 7 ms of the event loop


class Pages:
    """The page of metrics, in Prometheus' text format or in OpenMetrics.

    Nobody gets a page that was made before the request came. Requests that come soon after a page share the next one.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._made: dict[Encode, float] = {}  # when the newest page of a format was made
        self._next: dict[Encode, asyncio.Task[bytes]] = {}

    async def get(self, encode: Encode) -> bytes:
        """A page that is made after this call."""
        wait = self._made.get(encode, -inf) + PAGE_SECONDS - time.monotonic()
        if wait <= 0:
            return self._make(encode)
        if encode not in self._next:
            self._next[encode] = asyncio.create_task(self._make_later(encode, wait))
        return await asyncio.shield(self._next[encode])

    async def _make_later(self, encode: Encode, seconds: float) -> bytes:
        await asyncio.sleep(seconds)
        del self._next[encode]
        return self._make(encode)

    def _make(self, encode: Encode) -> bytes:
        self._made[encode] = time.monotonic()
        # Our names need no escaping. With OpenMetrics the chosen encoder would still rename the samples from vllm:x to
        # vllm_x, and no query would find them: prometheus-client 0.26 escapes samples but not names.
        return encode(self._registry, escaping=openmetrics.ALLOWUTF8)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """All metrics, in the format that the client prefers."""
    _, content_type = text.choose_encoder(request.headers.get("accept", ""))
    is_openmetrics = content_type.startswith("application/openmetrics-text")
    encode: Encode = openmetrics.generate_latest if is_openmetrics else text.generate_latest
    return Response(await request.app.state.pages.get(encode), headers={"content-type": content_type})
