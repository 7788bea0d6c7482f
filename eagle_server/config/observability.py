"""Options of what the server tells about itself."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from eagle_server.config.base import Section


def _http_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError("should be an HTTP URL with its path, like http://localhost:4318/v1/traces")
    return value


class ObservabilitySection(Section):
    """What it tells about itself. Metrics for Prometheus are always at /metrics."""

    log_format: Literal["human", "json"] = Field(default="human", description="json: an object per line of the log")
    log_stats_interval: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=10.0, description="seconds between the log's lines about the engine while it works; 0: none"
    )
    otlp_traces_endpoint: Annotated[str, AfterValidator(_http_url)] | None = Field(
        default=None,
        description="URL that takes OpenTelemetry spans over HTTP, like http://localhost:4318/v1/traces; needs the "
        "extra otlp; the OTEL_* variables of its SDK hold",
    )
