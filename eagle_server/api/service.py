"""What the routes share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from fastapi import Request

from eagle_server.api.telemetry.metrics import Metrics
from eagle_server.engine.client import EngineClient
from eagle_server.engine.detokenizer import TokenSpelling


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
    """The engine, the tokenizer (in `spelling`) and the names that answers carry. `configuration` is public."""

    client: EngineClient
    spelling: TokenSpelling
    model_name: str
    metrics: Metrics
    configuration: Mapping[str, Any] = field(default_factory=dict)
    admission: Admission = field(default_factory=Admission)


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def version() -> str:
    try:
        return metadata.version("eagle-server")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "0+unknown"
