"""The FastAPI application."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from eagle_server.api import generating, inspection, tokens
from eagle_server.api.errors import install_handlers
from eagle_server.api.gate import Gate
from eagle_server.api.openapi import document
from eagle_server.api.request_id import HEADER, RequestId
from eagle_server.api.service import Service
from eagle_server.config import Config
from eagle_server.engine.chat_template import ChatTemplate
from eagle_server.engine.client import EngineClient
from eagle_server.engine.detokenizer import TokenSpelling
from eagle_server.engine.tokenizer import Tokenizer


def create_app(config: Config, client: EngineClient, tokenizer: Tokenizer, chat_template: ChatTemplate) -> FastAPI:
    """The application in front of `client`; its `state.service` holds what the routes share."""
    key = config.server.api_key
    service = Service(
        client=client,
        spelling=TokenSpelling(tokenizer),
        chat_template=chat_template,
        model_name=config.served_model_name,
        timeout=config.server.request_timeout,
        configuration=config.public_dict(),
    )
    # FastAPI's pages of documentation load scripts from elsewhere, so they are off.
    app = FastAPI(title="eagle_server", openapi_url=None)
    app.state.service = service
    for module in (generating, tokens, inspection):
        app.include_router(module.router)
    app.add_api_route("/openapi.json", document, methods=["GET"])
    # From the inside out: whoever is added last sees a request first.
    app.add_middleware(Gate, service=service, api_key=key.get_secret_value() if key else None)
    if config.server.cors_allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.server.cors_allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[HEADER],
        )
    app.add_middleware(RequestId)
    install_handlers(app)
    return app
