"""The state that all requests share: engine client, tokenizer, chat template and formats of answers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from starlette.requests import Request

from eagle_server.api.errors import ApiError
from eagle_server.api.schemas.generation import SamplingBody
from eagle_server.client.client import EngineClient, EngineUnavailable
from eagle_server.config import Config
from eagle_server.request import Ready
from eagle_server.text.chat_template import ChatTemplate
from eagle_server.text.markers import Syntax
from eagle_server.text.reasoning_formats import ReasoningFormat, find_reasoning_format
from eagle_server.text.sampling_defaults import sampling_defaults
from eagle_server.text.token_spelling import TokenSpelling
from eagle_server.text.tokenizer import Tokenizer, media_tokens
from eagle_server.text.tools.formats import ToolFormat, find_format

if TYPE_CHECKING:
    from eagle_server.api.telemetry.answer_rows import RowRecorder  # needs prometheus_client, `LLM` does not

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Service:
    """State that all requests share, with or without an HTTP server. `spelling` holds the tokenizer.

    `call_syntax` is the format of the model's tool calls, None if tool calls are not recognized. `reasoning_syntax` is
    the format of its thinking. `configuration` has no secrets. `timeout` is the server's limit for any request in
    seconds, None for no limit. `keep_alive` is for `EventStream`. `strict_max_tokens`: see --strict-max-tokens.
    """

    client: EngineClient
    spelling: TokenSpelling
    chat_template: ChatTemplate
    call_syntax: Syntax[ToolFormat] | None
    reasoning_syntax: Syntax[ReasoningFormat] | None
    model_name: str
    timeout: float | None = None
    keep_alive: float | None = None
    strict_max_tokens: bool = False
    configuration: Mapping[str, Any] = field(default_factory=dict)
    parsers: Mapping[str, str] = field(default_factory=dict)  # and the chat template, by their options' names
    media_tokens: frozenset[int] = frozenset()  # see `media_tokens` in text/tokenizer.py
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)  # for requests that are silent about them
    recorder: RowRecorder | None = None  # None: answers are not recorded

    @classmethod
    def of(cls, config: Config, client: EngineClient, tokenizer: Tokenizer, chat_template: ChatTemplate) -> Service:
        """The service that a configuration asks for.

        Raises:
            ValueError: generation_config.json has a value that no request may have, or cannot be read.
        """
        calls = find_format(config.model.tool_call_parser, chat_template)
        thinking = find_reasoning_format(config.model.reasoning_parser, chat_template)
        formats = {"tool_call_parser": calls, "reasoning_parser": thinking}
        parsers = {name: "none" if parser is None else parser.name for name, parser in formats.items()}
        template = "the model's" if chat_template.built_in is None else f"built-in: {chat_template.built_in}"
        parsers["chat_template"] = config.model.chat_template or template
        logger.debug("%s", parsers)
        return cls(
            client=client,
            spelling=TokenSpelling(tokenizer),
            chat_template=chat_template,
            call_syntax=None if calls is None else Syntax.of(calls, tokenizer),
            reasoning_syntax=None if thinking is None else Syntax.of(thinking, tokenizer),
            model_name=config.served_model_name,
            timeout=config.server.request_timeout,
            keep_alive=config.server.sse_keep_alive or None,
            strict_max_tokens=config.server.strict_max_tokens,
            configuration=config.public_dict(),
            parsers=parsers,
            media_tokens=media_tokens(tokenizer),
            sampling_defaults=_sampling_defaults(config),
        )

    def ready_for(self, model: str | None) -> Ready:
        """The served model and its limits.

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
        return min((seconds for seconds in (wanted, self.timeout) if seconds is not None), default=None)


def _sampling_defaults(config: Config) -> dict[str, float]:
    choice = config.model.generation_config
    defaults = sampling_defaults(config.target_path, choice)
    try:
        SamplingBody.model_validate(defaults)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = first["loc"][0]
        reason = f"{name} {defaults[str(name)]}: {first['msg']}; --generation-config none ignores it"
        raise ValueError(f"generation_config.json: {reason}") from None
    return defaults


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service
