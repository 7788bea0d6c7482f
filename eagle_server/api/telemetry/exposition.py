"""GET /metrics. It needs no API key: scrapers seldom have one, and the page has only numbers and the model's name."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client import exposition as text
from prometheus_client.openmetrics import exposition as openmetrics

from eagle_server.api.routes import HeadRoute

router = APIRouter(route_class=HeadRoute)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """All metrics, in Prometheus' text format or in OpenMetrics, as the client prefers."""
    _, content_type = text.choose_encoder(request.headers.get("accept", ""))
    encoding = openmetrics if content_type.startswith("application/openmetrics-text") else text
    # Our names need no escaping. With OpenMetrics the chosen encoder would still rename the samples from vllm:x to
    # vllm_x, and no query would find them: prometheus-client 0.26 escapes samples but not names.
    body = encoding.generate_latest(request.app.state.metrics.registry, escaping=openmetrics.ALLOWUTF8)
    return Response(body, headers={"content-type": content_type})
