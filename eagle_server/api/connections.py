"""HTTP connections with bounds: how many are open, and how long a client may take for a request or a response.

uvicorn itself waits forever for the end of a header, of a body that nobody reads, and for a client that does not read.
Each such connection holds a file descriptor, and without one no other client gets in.
"""

from __future__ import annotations

import asyncio
import heapq
import resource
import time
from collections.abc import Iterable
from enum import IntEnum

import h11
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 75.0  # a client's time for sending a request; reading a body has its own limit, see api/body.py
READING_SECONDS = 10.0  # without reading, after which an answer may be cut where connections are needed
RESERVED_FILES = 64  # descriptors for everything else: sockets to the engine, files, logs
MOST_CONNECTIONS = 16384
HTTP2_PREFACE = b"PRI * HTTP/2.0"


def most_connections() -> int:
    """How many connections may be open: what the limit on open files (`ulimit -n`) leaves."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return min(MOST_CONNECTIONS, max(files - RESERVED_FILES, files // 2))


class Wait(IntEnum):
    """What a connection's client is waited for, in the order in which connections are closed past the bound."""

    REQUEST = 0
    HEADER = 1  # the rest of it
    BODY = 2
    READING = 3  # of the rest of an answer
    NOTHING = 4  # the server has a request to answer


class BoundedConnection(H11Protocol):
    """A connection that notes since when it waits for its client."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._since = time.monotonic()
        self._unsent = 0
        super().connection_made(transport)
        most = most_connections()
        if len(self.connections) > most:
            self._close_others(1 + most // 64)  # some more than one, because finding them takes time

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.IDLE and data.startswith(HTTP2_PREFACE):
            # sglang-router asks every worker in HTTP/2 first, for gRPC. Parsed as HTTP/1.1 this would be a warning.
            self.transport.close()
            return
        # A kept connection may have been idle for long. The time of a body that is read has its own limit.
        is_progress = self.wait is Wait.REQUEST or (self.wait is Wait.BODY and not self.cycle.response_complete)
        if is_progress:
            self._since = time.monotonic()
        super().data_received(data)

    def on_response_complete(self) -> None:
        self._since = time.monotonic()
        super().on_response_complete()

    @property
    def wait(self) -> Wait:
        """What its client is waited for."""
        if self.conn.their_state is h11.SEND_BODY:
            return Wait.BODY
        if self.cycle is not None and not self.cycle.response_complete:
            return Wait.NOTHING
        if self.transport.get_write_buffer_size():
            return Wait.READING
        return Wait.HEADER if self.conn.trailing_data[0] else Wait.REQUEST

    def is_overdue(self, now: float) -> bool:
        """Whether its client has sent and read nothing useful for too long. Called about once a second."""
        unsent = self.transport.get_write_buffer_size()
        if (self.wait is Wait.NOTHING and not self.transport.is_closing()) or unsent < self._unsent:
            self._since = now
        self._unsent = unsent
        return now - self._since > REQUEST_SECONDS

    def _close_others(self, count: int) -> None:
        """Close those that are needed least, and of these the ones that have waited longest for their clients."""
        now, waiting = time.monotonic(), []
        for each in self.connections:
            if each is not self and isinstance(each, BoundedConnection):
                wait = each.wait
                if wait < Wait.READING or (wait is Wait.READING and now - each._since > READING_SECONDS):
                    waiting.append((wait, each._since, id(each), each))
        for *_, connection in heapq.nsmallest(count, waiting):
            connection.transport.abort()


def close_overdue(connections: Iterable[asyncio.Protocol]) -> None:
    """Close the connections whose clients are overdue, whatever they still have to send."""
    now = time.monotonic()
    for connection in list(connections):
        if isinstance(connection, BoundedConnection) and connection.is_overdue(now):
            connection.transport.abort()


def abort_all(connections: Iterable[asyncio.Protocol]) -> None:
    """Close all connections, whatever they still have to send."""
    for connection in list(connections):
        if isinstance(connection, BoundedConnection):
            connection.transport.abort()


class CloseUnlessContinued:
    """ASGI middleware: an answer to `expect: 100-continue` that does not wait for the body ends the connection.

    The client may then send the body or not. So the next request would be taken for the body, or the other way round.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or Headers(scope=scope).get("expect", "").lower() != "100-continue":
            await self._app(scope, receive, send)
            return
        is_read = False

        async def receive_noted() -> Message:
            nonlocal is_read
            is_read = True
            return await receive()

        async def send_closing(message: Message) -> None:
            if message["type"] == "http.response.start" and not is_read:
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        await self._app(scope, receive_noted, send_closing)
