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

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 75.0  # a client's time for sending a request; reading a body has its own limit, see api/body.py
RESERVED_FILES = 64  # descriptors for everything else: sockets to the engine, files, logs
MOST_CONNECTIONS = 16384


def most_connections() -> int:
    """How many connections may be open: what the limit on open files (`ulimit -n`) leaves."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return min(MOST_CONNECTIONS, max(files - RESERVED_FILES, files // 2))


class BoundedConnection(H11Protocol):
    """A connection that notes since when it waits for its client.

    A connection is busy from the end of a request to the end of its response. Otherwise it waits for its client: for a
    request, or until the response is read.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._since = time.monotonic()
        self._unsent = 0
        self._has_begun = False  # whether a part of the next request has arrived
        super().connection_made(transport)
        most = most_connections()
        if len(self.connections) > most:
            self._close_idle(1 + most // 64)  # some more than one, because finding them takes time

    def data_received(self, data: bytes) -> None:
        if not (self._has_begun or self.is_busy):
            self._has_begun = True
            self._since = time.monotonic()  # a kept connection may have been idle for long
        super().data_received(data)

    def on_response_complete(self) -> None:
        self._has_begun = False
        self._since = time.monotonic()
        super().on_response_complete()

    @property
    def is_busy(self) -> bool:
        """Whether a request has arrived, and its response is not complete."""
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete and not cycle.more_body

    def is_overdue(self, now: float) -> bool:
        """Whether its client has sent and read nothing useful for too long. Called about once a second."""
        unsent = self.transport.get_write_buffer_size()
        if (self.is_busy and not self.transport.is_closing()) or unsent < self._unsent:
            self._since = now
        self._unsent = unsent
        return now - self._since > REQUEST_SECONDS

    def _close_idle(self, count: int) -> None:
        """Close those that have waited longest for their clients."""
        idle = [each for each in self.connections if isinstance(each, BoundedConnection) and not each.is_busy]
        for connection in heapq.nsmallest(count, idle, key=lambda each: each._since):
            connection.transport.abort()


def close_overdue(connections: Iterable[asyncio.Protocol]) -> None:
    """Close the connections whose clients are overdue, whatever they still have to send."""
    now = time.monotonic()
    for connection in list(connections):
        if isinstance(connection, BoundedConnection) and connection.is_overdue(now):
            connection.transport.abort()
