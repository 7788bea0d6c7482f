"""GET /metrics. Open, like /health: what scrapes it seldom has a key, and it holds numbers and the model's name."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client import exposition as text
from prometheus_client.openmetrics import exposition as openmetrics

router = APIRouter()


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """All metrics, as text or OpenMetrics as the client prefers."""
    _, content_type = text.choose_encoder(request.headers.get("accept", ""))
    encoding = openmetrics if content_type.startswith("application/openmetrics-text") else text
    # Our names need no escaping. The chosen encoder would make vllm_x of vllm:x in OpenMetrics all the same
    # (prometheus-client 0.26: samples are escaped where names are not), and no query would find them.
    body = encoding.generate_latest(request.app.state.service.metrics.registry, escaping=openmetrics.ALLOWUTF8)
    return Response(body, headers={"content-type": content_type})
