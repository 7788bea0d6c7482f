"""What the routes share: the engine client, the tokenizer, the chat template and the metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fastapi import Request

from eagle_server.api.admission import Admission
from eagle_server.api.answer_format import ReasoningSyntax
from eagle_server.api.errors import ApiError
from eagle_server.api.telemetry.metrics import ServerMetrics
from eagle_server.api.tools import CallSyntax
from eagle_server.client.client import EngineClient, EngineUnavailable
from eagle_server.request import Ready
from eagle_server.text.chat_template import ChatTemplate
from eagle_server.text.token_spelling import TokenSpelling


@dataclass(frozen=True)
class Service:
    """State that the routes share. `spelling` holds the tokenizer.

    `call_syntax` is the format of the model's tool calls, None if tool calls are not recognized, and `reasoning_syntax`
    that of its thinking. `configuration` has no secrets. `timeout` is the server's limit for any request in seconds,
    None for no limit. `keep_alive` is for `EventStream`.
    """

    client: EngineClient
    spelling: TokenSpelling
    chat_template: ChatTemplate
    call_syntax: CallSyntax | None
    reasoning_syntax: ReasoningSyntax | None
    model_name: str
    metrics: ServerMetrics
    timeout: float | None = None
    keep_alive: float | None = None
    configuration: Mapping[str, Any] = field(default_factory=dict)
    parsers: Mapping[str, str] = field(default_factory=dict)  # and the chat template, by their options' names
    admission: Admission = field(default_factory=Admission)

    def ready_for(self, model: str | None) -> Ready:
        """What the engine serves.

        Raises:
            ApiError: status 404, the model is not this one.
            EngineUnavailable: there is no engine.
        """
        self.check_model(model)
        if self.client.ready is None or not self.client.is_available:
            raise EngineUnavailable("the engine is not running")
        return self.client.ready

    def check_model(self, name: str | None) -> None:
        """
        Raises:
            ApiError: status 404, the model is not this one.
        """
        if name not in (None, self.model_name):
            message = f"the model {name!r} does not exist; this server has {self.model_name!r}"
            raise ApiError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")

    def timeout_of(self, wanted: float | None) -> float | None:
        """The timeout in seconds of a request that asks for `wanted`: at most the server's own."""
        return min((each for each in (wanted, self.timeout) if each is not None), default=None)


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service
