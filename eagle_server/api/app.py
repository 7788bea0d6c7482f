"""The FastAPI application."""

from __future__ import annotations

from fastapi import FastAPI

from eagle_server.api.errors import install_handlers
from eagle_server.api.gate import Gate
from eagle_server.api.routes import router
from eagle_server.api.service import Service
from eagle_server.config import Config
from eagle_server.engine.client import EngineClient
from eagle_server.engine.detokenizer import TokenSpelling
from eagle_server.engine.tokenizer import Tokenizer


def create_app(config: Config, client: EngineClient, tokenizer: Tokenizer) -> FastAPI:
    """The application in front of `client`; its `state.service` holds what the routes share."""
    key = config.server.api_key
    service = Service(
        client=client,
        spelling=TokenSpelling(tokenizer),
        model_name=config.served_model_name,
        configuration=config.public_dict(),
    )
    app = FastAPI(title="eagle_server", openapi_url=None)
    app.state.service = service
    app.include_router(router)
    app.add_middleware(Gate, admission=service.admission, api_key=key.get_secret_value() if key else None)
    install_handlers(app)
    return app
