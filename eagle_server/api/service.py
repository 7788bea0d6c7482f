"""What the routes share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from importlib import metadata
from typing import Any

from fastapi import Request

from eagle_server.api.errors import ApiError
from eagle_server.api.telemetry.metrics import Metrics
from eagle_server.api.tools import CallSyntax
from eagle_server.client.client import EngineClient
from eagle_server.text.chat_template import ChatTemplate
from eagle_server.text.detokenizer import TokenSpelling


class Admission:
    """Counts the completions in progress, and lets no more in once the server is draining."""

    def __init__(self) -> None:
        self.is_draining = False
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def active(self) -> int:
        return self._active

    @contextmanager
    def completion(self) -> Iterator[None]:
        self._active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._active -= 1
            if self._active == 0:
                self._idle.set()

    async def drain(self) -> None:
        """Refuse new completions and wait for the last one to end."""
        self.is_draining = True
        await self._idle.wait()


@dataclass(frozen=True)
class Service:
    """The engine, the tokenizer (in `spelling`), the template of chats and the names that answers carry.

    `call_syntax` is how the model writes calls of functions, None where they are not recognized.
    `configuration` is public; `timeout` is how many seconds any request may take, None for as long as it takes.
    """

    client: EngineClient
    spelling: TokenSpelling
    chat_template: ChatTemplate
    call_syntax: CallSyntax | None
    model_name: str
    metrics: Metrics
    timeout: float | None = None
    configuration: Mapping[str, Any] = field(default_factory=dict)
    admission: Admission = field(default_factory=Admission)

    def check_model(self, name: str | None) -> None:
        """
        Raises:
            ApiError: status 404, the model is not this one.
        """
        if name not in (None, self.model_name):
            message = f"the model {name!r} does not exist; this server has {self.model_name!r}"
            raise ApiError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")

    def timeout_of(self, wanted: float | None) -> float | None:
        """Seconds that a request may take which asks for `wanted`: never more than the server's own."""
        return min((each for each in (wanted, self.timeout) if each is not None), default=None)


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


@cache
def version() -> str:
    """Of the installed package; looked up once, for that reads files."""
    try:
        return metadata.version("eagle-server")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "0+unknown"
