"""The FastAPI application."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI

from eagle_server.api.errors import install_handlers
from eagle_server.api.gate import Gate
from eagle_server.api.request_id import RequestId
from eagle_server.api.routes import router
from eagle_server.api.service import Service
from eagle_server.api.telemetry.access import Access
from eagle_server.api.telemetry.exposition import router as exposition
from eagle_server.api.telemetry.metrics import Metrics
from eagle_server.api.telemetry.observer import Telemetry
from eagle_server.api.telemetry.summary import Summary
from eagle_server.config import Config
from eagle_server.engine.client import EngineClient
from eagle_server.engine.detokenizer import TokenSpelling
from eagle_server.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from eagle_server.api.telemetry.tracing import Tracing


def create_app(config: Config, client: EngineClient, tokenizer: Tokenizer) -> FastAPI:
    """The application in front of `client`; its `state.service` holds what the routes share.

    `state.tracing`, if spans are wanted, has to be closed in the end.

    Raises:
        ValueError: what an option asks for is not installed.
    """
    metrics = Metrics(config.served_model_name, lambda: client.stats)
    client.observe(Telemetry(metrics, Summary(config.observability.log_stats_interval)))
    tracing = _tracing(config)
    key = config.server.api_key
    service = Service(
        client=client,
        spelling=TokenSpelling(tokenizer),
        model_name=config.served_model_name,
        metrics=metrics,
        configuration=config.public_dict(),
    )
    app = FastAPI(title="eagle_server", openapi_url=None)
    app.state.service = service
    app.state.tracing = tracing
    app.include_router(router)
    app.include_router(exposition)
    app.add_middleware(Gate, admission=service.admission, api_key=key.get_secret_value() if key else None)
    app.add_middleware(Access, on_generated=tracing.record if tracing else None)
    app.add_middleware(RequestId)
    install_handlers(app)
    return app


def _tracing(config: Config) -> Tracing | None:
    endpoint = config.observability.otlp_traces_endpoint
    if endpoint is None:
        return None
    try:
        from eagle_server.api.telemetry.tracing import Tracing, otlp_processor  # packages that few servers need
    except ImportError as error:
        extra = "pip install 'eagle-server[otlp]'"
        raise ValueError(f"--otlp-traces-endpoint needs packages that are missing ({error.name}): {extra}") from None
    return Tracing(config.served_model_name, otlp_processor(endpoint))
