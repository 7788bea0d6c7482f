"""Options of logs, metrics and traces."""

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
    """Logs and traces. Prometheus metrics are always at /metrics."""

    log_format: Literal["human", "json"] = Field(default="human", description="json: one JSON object per log line")
    log_stats_interval: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=10.0, description="seconds between log lines with engine statistics, while it has work; 0: none"
    )
    otlp_traces_endpoint: Annotated[str, AfterValidator(_http_url)] | None = Field(
        default=None,
        description="URL that receives OpenTelemetry spans over HTTP, like http://localhost:4318/v1/traces; needs the "
        "extra otlp; the SDK reads its OTEL_* environment variables",
    )
