"""HTTP connections with bounds: how many are open, and how long a client may take for a request or a response.

uvicorn itself waits forever for the end of a header, of a body that nobody reads, and for a client that does not read.
Each such connection holds a file descriptor, and without one no other client can connect. uvicorn also parses all that
it has read in one go: up to 256 kB. In chunks of one byte these are 40,000 chunks and take seconds.
"""

from __future__ import annotations

import asyncio
import heapq
import re
import resource
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from enum import IntEnum
from http import HTTPStatus
from weakref import WeakKeyDictionary

import h11
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol

from eagle_server.api.connection import ABORT, WRITE
from eagle_server.api.errors import bad_request
from eagle_server.api.guard.addresses import address_of
from eagle_server.turns import Turns

REQUEST_SECONDS = 75.0  # a client's time for sending a request; reading a body has its own limit, see api/guard/body.py
LEAST_READ = 2**16  # bytes of an answer, or its rest, that a client must read in that time
READING_SECONDS = 10.0  # if a client reads nothing for so long, its answer may be cut when connections are needed
ARRIVAL_SECONDS = 1.0  # on a new connection, or after an answer, a request may be on its way
RESERVED_FILES = 64  # descriptors for everything else: sockets to the engine, files, logs
MOST_CONNECTIONS = 16384
HTTP2_PREFACE = b"PRI * HTTP/2.0"
TURN_SECONDS = 0.002  # parsing time of all connections together in one turn
REST_SECONDS = 0.004  # between turns, for everything else: long bodies take a third of a core at most
PART = 2**16  # bytes of a body that are parsed at once
TURN_PARTS = 16  # in one turn: 200 MB/s, because the copies of senders and kernel take the other cores
CHUNKED_LINES = 80  # lines of a body in chunks that are parsed at once: two per chunk, and 40 chunks take 3 ms
SHORT_BODY = 2**18  # bytes; a body that is longer, or of unknown length, is parsed in turns
FIRST_CHECK_SECONDS = 0.1  # after a client has closed its sending side: until it is seen whether it is gone
SOON_SECONDS, RARELY_SECONDS = 0.01, 1.0  # the next check after an interim answer, and the longest time between checks
MOST_IGNORED = 2**16  # bytes of a body in chunks after an answer that did not wait for it
_GONE = select.POLLHUP | select.POLLERR
_SENDS_NO_MORE = getattr(select, "POLLRDHUP", 0)  # Linux alone tells before everything is read
_HEADER_END = re.compile(rb"\n\r?\n")
_OVERLAP = 2  # bytes of a header's end that may be in the previous part


def most_connections() -> int:
    """How many connections may be open, by the limit on open files (`ulimit -n`)."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return min(MOST_CONNECTIONS, max(files - RESERVED_FILES, files // 2))


class Wait(IntEnum):
    """What the server waits for a client to do. If there are too many connections, they are closed in this order."""

    REQUEST = 0
    HEADER = 1  # the rest of a header
    BODY = 2
    READING = 3  # the client reads the rest of an answer
    NOTHING = 4  # the server has a request to answer


class _Parsing:
    """The connections with input that is not parsed yet. Addresses take turns, and leave time for everything else."""

    def __init__(self) -> None:
        self._waiting = Turns[BoundedConnection]()
        self._is_scheduled = False

    def add(self, connection: BoundedConnection) -> None:
        """Parse more of its input later. Adding it again changes nothing."""
        self._waiting.add(connection.address, connection)
        if not self._is_scheduled:
            self._is_scheduled = True
            connection.loop.call_soon(self._run)

    def _run(self) -> None:
        end = time.monotonic() + TURN_SECONDS
        try:
            for _ in range(TURN_PARTS):
                connection = self._waiting.next()
                if connection.parse_part():
                    self._waiting.add(connection.address, connection)
                if not self._waiting or time.monotonic() >= end:
                    break
        finally:
            self._is_scheduled = bool(self._waiting)
            if self._is_scheduled:
                asyncio.get_running_loop().call_later(REST_SECONDS, self._run)


_parsing: WeakKeyDictionary[asyncio.AbstractEventLoop, _Parsing] = WeakKeyDictionary()


class BoundedConnection(H11Protocol):
    """A connection that records since when it waits for its client, and parses its input in parts."""

    on_malformed: Callable[[], None] | None = None  # called when what was received is no HTTP

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._since = time.monotonic()
        self._unsent = 0  # bytes that its client had not read when it last read enough of them
        self._received = bytearray()  # and not parsed
        self._before = b""  # the last bytes that were parsed
        self._body_left = 0  # bytes of the body that are to come, if its length is known
        self._ignored = 0
        self._is_half_closed = False
        self._probed: object = None  # the newest request for which an interim answer was sent
        self.app_state = {**self.app_state, ABORT: transport.abort, WRITE: self.send_chunk}
        super().connection_made(transport)
        self.address = address_of({"client": self.client})  # the client's, or the proxy's
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
        is_first = not self._received
        self._received += data
        while is_first and not self._is_long and self.parse_part():
            pass
        if self._received:
            self.flow.pause_reading()
            self._wait_for_turn()

    def parse_part(self) -> bool:
        """Parse some of what was received. Returns whether there is more to parse now."""
        if self._is_long and not self.transport.is_closing() and self._has_left():
            self.transport.abort()
        if self.transport.is_closing():  # its socket may be closed already
            self._received.clear()
        part = self._next_part()
        if part:
            self._before = (self._before + part)[-_OVERLAP:]
            in_header = self.conn.their_state is h11.IDLE
            super().data_received(part)
            if self.conn.their_state is h11.SEND_BODY:
                self._count_body(part, in_header=in_header)
        if not self._received and not self._must_pause:
            self.flow.resume_reading()
        self._close_if_done()
        return bool(part and self._received)

    def _next_part(self) -> bytes:
        """The bytes to parse next. Empty if a pipelined request must wait for the answer to the one before."""
        state = self.conn.their_state
        if state is h11.DONE:
            return b""
        size = len(self._received)
        if state is h11.SEND_BODY:
            # The body's length is unknown if its header came with the end of the previous request.
            known = self._body_left if self._body_left > 0 else PART
            size = self._chunked_part() if self._is_chunked else min(PART, known)
        elif state is h11.IDLE and (end := _HEADER_END.search(self._before + self._received)):
            size = max(1, end.end() - len(self._before))
        part = bytes(self._received[:size])
        del self._received[:size]
        return part

    def _chunked_part(self) -> int:
        """How many bytes of a body in chunks to parse next. Its cost is by chunk, whatever their size."""
        end = 0
        for _ in range(CHUNKED_LINES):
            end = self._received.find(b"\n", end, PART) + 1
            if not end:
                return PART
        return end

    def _count_body(self, part: bytes, *, in_header: bool) -> None:
        """Count the body's bytes that are still to come. Close the connection if too many come after the answer."""
        if in_header:
            length = dict(self.headers).get(b"content-length", b"0")
            self._body_left, self._ignored = int(length), 0
            return
        self._body_left -= len(part)
        if self._is_chunked and self.cycle.response_complete:
            self._ignored += len(part)
            if self._ignored > MOST_IGNORED:
                self.transport.abort()

    @property
    def _is_long(self) -> bool:
        """Whether a long body is coming, or one of unknown length."""
        return self._is_chunked or (self.conn.their_state is h11.SEND_BODY and self._body_left > SHORT_BODY)

    @property
    def _is_chunked(self) -> bool:
        """Whether a body is coming in chunks."""
        return self.conn.their_state is h11.SEND_BODY and any(name == b"transfer-encoding" for name, _ in self.headers)

    @property
    def _must_pause(self) -> bool:
        """Whether uvicorn wants to read nothing more, because enough of a body waits for its reader."""
        return self.cycle is not None and not self.cycle.response_complete and len(self.cycle.body) > HIGH_WATER_LIMIT

    def send_chunk(self, data: bytes) -> bool:
        """Send a part of an answer in chunks that has begun, as h11 does. The layers between do nothing with it.

        Returns False, and sends nothing, if the answer has no chunks or its client does not read.
        """
        is_chunked = self.conn.our_state is h11.SEND_BODY and self.scope["http_version"] == "1.1"
        if not is_chunked or not data or self.flow.write_paused or self.transport.is_closing():
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def on_response_complete(self) -> None:
        self._since = time.monotonic()
        super().on_response_complete()
        if self._received:
            self._wait_for_turn()
        self._close_if_done()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP with the API's error object, and count it."""
        if self.on_malformed is not None:
            self.on_malformed()
        body = bad_request(msg, code="invalid_http").body
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        parts = [
            h11.Response(status_code=HTTPStatus.BAD_REQUEST, headers=[*headers, (b"connection", b"close")]),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ]
        self.transport.write(b"".join(self.conn.send(part) or b"" for part in parts))
        self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. If a whole request waits for its answer, the connection stays open for that.

        TCP says the same of a client that has closed its socket. That one resets the connection when something is sent
        to it, see `_check_half_closed`. TLS has no half-closed connections in asyncio.
        """
        if self.scheme == "https" or self._is_gone or not (self._received or self._owes_answer):
            return False
        if not self._is_half_closed:
            self._is_half_closed = True
            self.loop.call_later(FIRST_CHECK_SECONDS, self._check_half_closed, FIRST_CHECK_SECONDS)
        return True

    def _check_half_closed(self, delay: float) -> None:
        """Abort the connection if its client is gone. If nothing was sent yet, send an interim answer to find out."""
        if self.transport.is_closing():
            return
        if self._is_gone:
            self.transport.abort()
            return
        delay = SOON_SECONDS if self._owes_answer and self._probe() else min(2 * delay, RARELY_SECONDS)
        self.loop.call_later(delay, self._check_half_closed, delay)

    def _has_left(self) -> bool:
        """Whether the client of a long body is gone, so that the rest need not be read. See `_check_half_closed`."""
        state = self._state
        if state == _SENDS_NO_MORE != 0 and self.scheme != "https" and not self.cycle.response_complete:
            self._probe()
        return bool(state & _GONE)

    def _probe(self) -> bool:
        """Send an interim answer, which a client that is gone resets, if none was sent for this request.

        HTTP/1.0 has no interim answers, and a Unix socket needs none.
        """
        if self._probed is self.cycle or self.cycle.response_started or self.scope["http_version"] == "1.0":
            return False
        if self.transport.get_extra_info("socket").family == socket.AF_UNIX:
            return False
        self._probed = self.cycle
        interim = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
        self.transport.write(self.conn.send(interim))
        return True

    @property
    def _is_gone(self) -> bool:
        """Whether the connection was reset, or, on a Unix socket, closed."""
        return bool(self._state & _GONE)

    @property
    def _state(self) -> int:
        """_SENDS_NO_MORE: so the client says, whatever is still to be read. `_GONE`: the connection has ended."""
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), _SENDS_NO_MORE)
        return sum(events for _, events in poll.poll(0))

    def _close_if_done(self) -> None:
        """Close the connection if its client sends no more, and has all answers."""
        if self._is_half_closed and not self._received and not self._owes_answer:
            self.transport.close()

    @property
    def _owes_answer(self) -> bool:
        """Whether the server has a whole request and has not answered it."""
        is_answered = self.cycle is None or self.cycle.response_complete
        return not is_answered and self.conn.their_state is not h11.SEND_BODY

    def _wait_for_turn(self) -> None:
        _parsing.setdefault(self.loop, _Parsing()).add(self)

    @property
    def wait(self) -> Wait:
        """What the server waits for this client to do."""
        if self.conn.their_state is h11.SEND_BODY:
            return Wait.BODY
        if self.cycle is not None and not self.cycle.response_complete:
            return Wait.NOTHING
        if self.transport.get_write_buffer_size():
            return Wait.READING
        return Wait.HEADER if self._received or self.conn.trailing_data[0] else Wait.REQUEST

    def is_overdue(self, now: float) -> bool:
        """Whether its client has sent and read nothing useful for too long. Called about once a second."""
        unsent = self.transport.get_write_buffer_size()
        is_reading = bool(self._unsent) and unsent <= max(0, self._unsent - LEAST_READ)
        if is_reading or (self.wait is Wait.NOTHING and not self.transport.is_closing()):
            self._since, self._unsent = now, unsent
        self._unsent = max(self._unsent, unsent)
        return now - self._since > REQUEST_SECONDS

    def _close_others(self, count: int) -> None:
        """Close the least needed connections of the addresses that have most of them.

        Among equals those that have waited longest for their clients.
        """
        now, waiting = time.monotonic(), list[tuple[Wait, BoundedConnection]]()
        for other in self.connections:
            if other is not self and isinstance(other, BoundedConnection) and not other.transport.is_closing():
                wait = other.wait
                if wait is Wait.REQUEST and now - other._since < ARRIVAL_SECONDS:
                    wait = Wait.HEADER
                if wait < Wait.READING or (wait is Wait.READING and now - other._since > READING_SECONDS):
                    waiting.append((wait, other))
        most = Counter(other.address for _, other in waiting)
        order = [(-most[other.address], wait, other._since, id(other), other) for wait, other in waiting]
        for *_, connection in heapq.nsmallest(count, order):
            connection.transport.abort()


def close_overdue(connections: Iterable[asyncio.Protocol], most_unread: int) -> None:
    """Close the connections whose clients are overdue, whatever they still have to send.

    If unread answers have more than `most_unread` bytes together, also those with the largest ones.
    """
    now = time.monotonic()
    bounded = [connection for connection in connections if isinstance(connection, BoundedConnection)]
    overdue = [connection for connection in bounded if connection.is_overdue(now)]
    unread = [(each.transport.get_write_buffer_size(), id(each), each) for each in bounded]
    total = sum(size for size, *_ in unread)
    for size, _, connection in sorted(unread, reverse=True) if total > most_unread else ():
        if total <= most_unread:
            break
        overdue.append(connection)
        total -= size
    for connection in overdue:
        connection.transport.abort()


def abort_all(connections: Iterable[asyncio.Protocol]) -> None:
    """Close all connections, whatever they still have to send."""
    for connection in list(connections):
        if isinstance(connection, BoundedConnection):
            connection.transport.abort()
