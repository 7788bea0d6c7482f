"""Errors as OpenAI's error object, and on Anthropic's paths as Anthropic's."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from eagle_server.client.client import EngineUnavailable, GenerationTimeout, QueueFull, SlowReader

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
RETRY_AFTER = {"retry-after": "1"}
MESSAGE_CHARACTERS = 2000  # the limit of an error's message: names and values of the client may be megabytes
NAME_CHARACTERS = 200  # the limit of a parameter, a path or a method


KINDS: dict[int, str] = {
    HTTPStatus.REQUEST_TIMEOUT: "timeout_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


ANTHROPIC_PATHS = "/v1/messages"  # and the paths below it
ANTHROPIC_KINDS: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_TIMEOUT: "timeout_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.INTERNAL_SERVER_ERROR: "api_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}


class ErrorObject(msgspec.Struct, frozen=True):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorObject


class AnthropicErrorObject(msgspec.Struct, frozen=True):
    """Anthropic's error object. The message names the wrong parameter."""

    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    error: AnthropicErrorObject


def shortened(text: str, most: int = NAME_CHARACTERS) -> str:
    """The text; if it has more than `most` characters, only its beginning and its end. `most` is even."""
    half = most // 2
    return text if len(text) <= most else f"{text[: half - 3]}...{text[-half:]}"


class ApiError(Exception):
    """A refused or failed request. `param` names the wrong parameter. Long messages lose their middle."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.message = shortened(message, MESSAGE_CHARACTERS)
        self.param = None if param is None else shortened(param)
        super().__init__(self.message)
        self.code = code
        self.headers = headers

    @property
    def kind(self) -> str:
        """The `type` of the error object, one of OpenAI's."""
        if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return "server_error"
        return KINDS.get(self.status, "invalid_request_error")

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(ErrorObject(self.message, self.kind, self.param, self.code)))

    @property
    def anthropic_body(self) -> bytes:
        kind = ANTHROPIC_KINDS.get(self.status, "invalid_request_error")
        return msgspec.json.encode(AnthropicErrorBody(AnthropicErrorObject(kind, self.message)))

    def response(self, path: str) -> Response:
        """The response, in the shape of the path's API."""
        body = self.anthropic_body if path.startswith(ANTHROPIC_PATHS) else self.body
        return Response(body, self.status, self.headers, media_type="application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def unavailable(message: str) -> ApiError:
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="service_unavailable", headers=RETRY_AFTER)


# Status, code and headers of the engine client's exceptions.
OUTCOMES: dict[type[Exception], tuple[int, str, Mapping[str, str]]] = {
    EngineUnavailable: (HTTPStatus.SERVICE_UNAVAILABLE, "service_unavailable", RETRY_AFTER),
    QueueFull: (HTTPStatus.TOO_MANY_REQUESTS, "queue_full", RETRY_AFTER),
    GenerationTimeout: (HTTPStatus.REQUEST_TIMEOUT, "timeout", {}),
    SlowReader: (HTTPStatus.REQUEST_TIMEOUT, "slow_reader", {}),
}
EXPECTED = (ApiError, HTTPException, *OUTCOMES)


def is_expected(error: Exception) -> bool:
    """Whether the error is a normal outcome of a request, not a bug."""
    return isinstance(error, EXPECTED)


def as_api_error(error: Exception) -> ApiError:
    """The error that the client sees. An unexpected exception reveals no details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, error.detail, headers=error.headers)
    if type(error) in OUTCOMES:
        status, code, headers = OUTCOMES[type(error)]
        message = f"{error}; try again" if headers else str(error)
        return ApiError(status, message, code=code, headers=headers)
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; the server's log has the details")


def install_handlers(app: Starlette) -> None:
    """Make the app answer every exception with an error object."""

    async def answer(request: Request, error: Exception) -> Response:
        return as_api_error(error).response(request.url.path)

    async def answer_nobody(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def not_found(request: Request, _: Exception) -> Response:
        message = f"there is no {request.method} {request.url.path}"
        return ApiError(HTTPStatus.NOT_FOUND, message, code="not_found").response(request.url.path)

    async def not_allowed(request: Request, cause: Exception) -> Response:
        headers = cause.headers if isinstance(cause, HTTPException) else None
        message = f"{request.url.path} does not answer {request.method}"
        error = ApiError(HTTPStatus.METHOD_NOT_ALLOWED, message, code="method_not_allowed", headers=headers)
        return error.response(request.url.path)

    for kind in EXPECTED:
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(ClientDisconnect, answer_nobody)
    app.add_exception_handler(HTTPStatus.NOT_FOUND, not_found)
    app.add_exception_handler(HTTPStatus.METHOD_NOT_ALLOWED, not_allowed)
