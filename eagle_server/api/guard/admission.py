"""Decides before the route whether a request may pass: its API key and that key's limits, draining, a full queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eagle_server.api.errors import ApiError, as_api_error, unavailable
from eagle_server.api.guard.addresses import address_of
from eagle_server.api.guard.connections import most_connections
from eagle_server.api.guard.keys import ApiKeys, KeyHolder
from eagle_server.api.guard.rate_limits import ClientLimits, current_client
from eagle_server.api.telemetry.request_record import current_request
from eagle_server.client.client import EngineClient, QueueFull
from eagle_server.turns import Shares

DRAIN_SECONDS = 5.0  # left for bodies that are arriving when the server is told to stop
_HELD_SHARE = 7 / 8  # of all connections; the others are for /health, /metrics and bodies that arrive
_HELD = "held_by"


class Admission:
    """Counts the generating HTTP requests in progress. A draining server admits no new ones."""

    def __init__(self) -> None:
        self.is_draining = False
        self._active = 0
        self._held = Shares()  # connections of requests that are being answered
        self._bodies: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def active(self) -> int:
        return self._active

    @contextmanager
    def count(self, scope: Scope) -> Iterator[None]:
        """Count one request for the duration of the block."""
        self._active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._active -= 1
            if (client := scope["state"].pop(_HELD, None)) is not None:
                self._held.add(client, -1)
            if self._active == 0:
                self._idle.set()

    def hold_connection(self, scope: Scope) -> None:
        """The whole request has come. From now on its connection is not closed for another one, until it is answered.

        Raises:
            QueueFull: they hold that many.
        """
        client, most = current_client.get(), int(_HELD_SHARE * most_connections())
        held, own = self._held.total, self._held.held_by(client)
        if not self._held.fit(client, 1, most):
            raise QueueFull(f"{held} requests are being answered, {own} of them yours, at most {most} may be")
        self._held.add(client, 1)
        scope["state"][_HELD] = client

    @asynccontextmanager
    async def body_time(self, seconds: float) -> AsyncIterator[None]:
        """The block gets `seconds` for a client's body, but at most DRAIN_SECONDS once the server is draining.

        Raises:
            ApiError: status 503, the server is draining.
            TimeoutError: the time is over, and the server is not draining.
        """
        try:
            async with asyncio.timeout(min(seconds, DRAIN_SECONDS) if self.is_draining else seconds) as time:
                self._bodies.add(time)
                try:
                    yield
                finally:
                    self._bodies.discard(time)
        except TimeoutError:
            if self.is_draining:
                raise unavailable("the server is shutting down") from None
            raise

    async def drain(self) -> None:
        """Admit no new requests, and wait until the last one has ended."""
        self.is_draining = True
        end = asyncio.get_running_loop().time() + DRAIN_SECONDS
        for time in self._bodies:
            time.reschedule(min(end, time.when() or end))
        await self._idle.wait()


def admission_of(request: Request) -> Admission:
    admission: Admission = request.app.state.admission
    return admission


class AdmissionMiddleware:
    """ASGI middleware. `generating_paths` submit requests to the engine, `open_paths` need no key."""

    def __init__(
        self,
        app: ASGIApp,
        admission: Admission,
        client: EngineClient,
        generating_paths: Collection[str],
        open_paths: Collection[str],
        keys: ApiKeys,
    ) -> None:
        self._app = app
        self._admission = admission
        self._client = client
        self._generating_paths, self._open_paths = frozenset(generating_paths), frozenset(open_paths)
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            holder = self._holder(scope)
        except ApiError as refusal:
            await refusal.response(scope["path"])(scope, receive, send)
            return
        if (record := current_request.get()) is not None:
            record.key = holder.name
        current_client.set(holder.name or address_of(scope))
        if scope["path"] in self._generating_paths:
            await self._generate(scope, receive, send, holder.limits)
        else:
            await self._app(scope, receive, send)

    async def _generate(self, scope: Scope, receive: Receive, send: Send, limits: ClientLimits) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(limits.headers)
            await send(message)

        refusal = self._refusal() or limits.refusal()
        if refusal is not None:
            await refusal.response(scope["path"])(scope, receive, send_with_headers)
            return
        with self._admission.count(scope), limits.running():
            await self._app(scope, receive, send_with_headers)

    def _refusal(self) -> ApiError | None:
        """Why no request of the current client may generate now, before its body is read and tokenized."""
        if self._admission.is_draining:
            return unavailable("the server is shutting down")
        try:
            self._client.check_room(current_client.get())
        except QueueFull as full:
            return as_api_error(full)
        return None

    def _holder(self, scope: Scope) -> KeyHolder:
        """Who sends the request.

        Raises:
            ApiError: status 401, the request has no valid key.
        """
        if not self._keys.are_needed or scope["path"] in self._open_paths:
            return self._keys.nobody
        headers = Headers(scope=scope)
        holder = self._keys.find(headers)
        if holder is None:
            sends = any(headers.get(name) for name in ("authorization", "x-api-key"))
            reason = "has another API key" if sends else "needs an API key"
            raise ApiError(
                HTTPStatus.UNAUTHORIZED,
                f"this server {reason}: send the header 'Authorization: Bearer <key>' or 'x-api-key: <key>'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return holder
