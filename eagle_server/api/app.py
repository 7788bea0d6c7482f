"""The FastAPI application."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware

from eagle_server.api import docs_page, inspection, playground
from eagle_server.api.endpoints import render, tokens
from eagle_server.api.endpoints.chat import CHAT_COMPLETIONS
from eagle_server.api.endpoints.completions import COMPLETIONS
from eagle_server.api.endpoints.messages import MESSAGES
from eagle_server.api.endpoints.responses import RESPONSES
from eagle_server.api.errors import RETRY_AFTER, install_handlers
from eagle_server.api.generation.generate import generating_route
from eagle_server.api.guard.addresses import TrustedProxies
from eagle_server.api.guard.admission import Admission, AdmissionMiddleware
from eagle_server.api.guard.keys import ApiKeys
from eagle_server.api.guard.origins import PagesOfThisServer, is_loopback
from eagle_server.api.guard.rate_limits import LIMIT_HEADERS, ClientLimits
from eagle_server.api.inspection import Probe
from eagle_server.api.openapi import openapi
from eagle_server.api.service import Service
from eagle_server.api.telemetry import exposition
from eagle_server.api.telemetry.access import ANTHROPIC_ID_HEADER, REQUEST_ID_HEADER, AccessLog, RequestId
from eagle_server.api.telemetry.answer_rows import RowRecorder
from eagle_server.api.telemetry.metrics import ServerMetrics
from eagle_server.api.telemetry.summary import Summary
from eagle_server.client.client import EngineClient
from eagle_server.config import Config
from eagle_server.text.chat_template import ChatTemplate
from eagle_server.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from eagle_server.api.telemetry.tracing import Tracing

GENERATING = (COMPLETIONS, CHAT_COMPLETIONS, RESPONSES, MESSAGES)  # they submit requests to the engine
ROUTERS = (
    APIRouter(routes=[generating_route(endpoint) for endpoint in GENERATING]),
    *(module.router for module in (render, tokens, inspection, exposition, playground)),
)
# Paths that need no key: for load balancers, probes and browsers.
OPEN_PATHS = docs_page.PATHS | playground.PATHS | {"/", "/health", "/ping", "/metrics", "/health_generate", "/version"}


def create_app(config: Config, client: EngineClient, tokenizer: Tokenizer, chat_template: ChatTemplate) -> FastAPI:
    """The application for `client`. The routes share `state.service`.

    `state.tracing` and `state.recorder` must be closed at the end if they are not None. `state.keys` can be reloaded,
    and `state.admission` can be drained.

    Raises:
        ValueError: an option needs a package that is not installed, or the directory of rows cannot be used.
    """
    keys = _keys(config)
    service = Service.of(config, client, tokenizer, chat_template)
    summary = Summary(config.observability.log_stats_interval)
    metrics = ServerMetrics(config.served_model_name, lambda: client.stats, summary)
    client.observe(metrics)
    tracing = _tracing(config)
    recorder = _recorder(config, keys, metrics)
    service = replace(service, recorder=recorder)
    app = _application()
    app.state.service, app.state.admission, app.state.keys = service, Admission(), keys
    app.state.recorder = recorder
    app.state.pages, app.state.probe, app.state.tracing = exposition.Pages(metrics.registry), Probe(client), tracing
    app.state.on_malformed = metrics.malformed
    _add_middleware(app, config, service, metrics, tracing)
    install_handlers(app)
    return app


def _application() -> FastAPI:
    """An application with all routes, and nothing else yet."""
    # FastAPI's own documentation page loads scripts from other servers, and its document is encoded for each client.
    app = FastAPI(title="eagle_server", openapi_url=None, docs_url=None, redoc_url=None)
    docs_page.add_docs_page(app, openapi)
    for router in ROUTERS:
        app.include_router(router)
    return app


def _add_middleware(
    app: FastAPI, config: Config, service: Service, metrics: ServerMetrics, tracing: Tracing | None
) -> None:
    """The middleware that is added last sees a request first."""
    app.add_middleware(
        AdmissionMiddleware,
        admission=app.state.admission,
        client=service.client,
        generating_paths=[endpoint.path for endpoint in GENERATING],
        keys=app.state.keys,
        open_paths=OPEN_PATHS,
    )
    app.add_middleware(
        PagesOfThisServer,
        origins=config.server.cors_allow_origins,
        hosts=config.server.allowed_hosts,
        local=config.server.uds is None and is_loopback(config.server.host),
    )
    paths = {str(getattr(route, "path", "")) for router in ROUTERS for route in router.routes} | docs_page.PATHS
    app.add_middleware(
        AccessLog,
        on_generated=[metrics.answered, *([tracing.record] if tracing else [])],
        on_answered=partial(metrics.responded, paths),
    )
    if config.server.cors_allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.server.cors_allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER, ANTHROPIC_ID_HEADER, *RETRY_AFTER, *LIMIT_HEADERS],
        )
    app.add_middleware(RequestId)
    if config.server.forwarded_allow_ips:
        app.add_middleware(TrustedProxies, trusted_hosts=list(config.server.forwarded_allow_ips))


def _keys(config: Config) -> ApiKeys:
    secret = config.server.api_key
    key = None if secret is None else secret.get_secret_value()
    return ApiKeys(key, config.server.api_key_file, lambda: _limits(config))


def _limits(config: Config) -> ClientLimits:
    return ClientLimits(config.server.max_concurrent_requests_per_key, config.server.tokens_per_minute_per_key)


def _recorder(config: Config, keys: ApiKeys, metrics: ServerMetrics) -> RowRecorder | None:
    """
    Raises:
        ValueError: the directory cannot be used, or a name is no key's.
    """
    directory, names = config.server.record_rows_dir, config.server.record_rows_keys
    if directory is None:
        return None
    if unknown := [name for name in names if name not in keys.names]:
        raise ValueError(
            f"--record-rows-keys {unknown[0]}: no API key has this name; there is: {', '.join(keys.names)}"
        )
    path, most = Path(directory).expanduser(), int(1e9 * config.server.record_rows_gb)
    return RowRecorder(path, most, metrics.registry, names)


def _tracing(config: Config) -> Tracing | None:
    endpoint = config.observability.otlp_traces_endpoint
    if endpoint is None:
        return None
    try:
        from eagle_server.api.telemetry.tracing import Tracing, otlp_processor  # needs packages that few servers have
    except ImportError as error:
        extra = "pip install 'eagle-server[otlp]'"
        raise ValueError(f"--otlp-traces-endpoint needs packages that are missing ({error.name}): {extra}") from None
    return Tracing(config.served_model_name, otlp_processor(endpoint))
