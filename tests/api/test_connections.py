"""Connections whose clients send or read nothing: their number and their time are bounded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import select
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from eagle_server.api import connection
from eagle_server.api.guard import connections
from eagle_server.api.guard.connections import (
    MOST_CONNECTIONS,
    RESERVED_FILES,
    BoundedConnection,
    Wait,
    close_overdue,
    most_connections,
)
from eagle_server.api.server import ACCEPTED_PER_TURN, HttpServer, listen
from tests.api.conftest import PATIENCE, Server, serving
from tests.api.fake_engine import SLOW

FILES = 256
HEADER = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
UNFINISHED = {"nothing": b"", "half a header": HEADER, "half a body": HEADER + b"content-length: 100\r\n\r\n{"}


@pytest.fixture(scope="module")
def few_files(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that may open few files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, limits[1]))  # the server inherits it
    try:
        with serving(tokenizer_dir, tmp_path_factory.mktemp("few_files") / "log") as server:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            yield server
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=PATIENCE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", UNFINISHED)
def test_unfinished_requests_do_not_lock_out_others(few_files: Server, kind: str) -> None:
    body = {"prompt": f"{SLOW}abc", "max_tokens": 60, "stream": True}
    with contextlib.ExitStack() as stack:
        path = f"{few_files.url}/v1/completions"
        stream = stack.enter_context(httpx.stream("POST", path, json=body, timeout=PATIENCE))
        lines = stream.iter_lines()
        next(lines)
        for _ in range(FILES + 100):
            connection = stack.enter_context(connect(few_files))
            with contextlib.suppress(ConnectionError):  # the server may have closed it
                connection.sendall(UNFINISHED[kind])
        for _ in range(5):
            answer = httpx.post(path, json={"prompt": "abc"}, timeout=PATIENCE)
            assert answer.status_code == 200
        assert [line for line in lines if line][-1] == "data: [DONE]"  # a request in progress was left alone
        open_files = len(os.listdir(f"/proc/{few_files.process.pid}/fd"))
        assert open_files <= FILES - 10
    assert "Traceback" not in few_files.log.read_text()


@pytest.mark.parametrize(
    ("files", "most"), [(64, 32), (256, 256 - RESERVED_FILES), (10**6, MOST_CONNECTIONS), (-1, MOST_CONNECTIONS)]
)
def test_the_number_of_connections_follows_the_limit_on_files(
    files: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert most_connections() == most


# --- Time limits ---

LARGE = 64 * 2**20  # bytes, more than the operating system buffers


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers at once, slowly at /slow, with much at /large, and after the body at /body."""
    while scope["path"] == "/body" and (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(4 if scope["path"] == "/slow" else 0):
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await asyncio.sleep(0.5)
    await send({"type": "http.response.body", "body": bytes(LARGE if scope["path"] == "/large" else 1)})


@dataclass
class Running:
    port: int
    server: HttpServer

    @property
    def connections(self) -> list[BoundedConnection]:
        return [each for each in self.server.server_state.connections if isinstance(each, BoundedConnection)]

    async def until(self, condition: Callable[[list[BoundedConnection]], bool]) -> None:
        """Wait until the server's connections are so."""
        async with asyncio.timeout(PATIENCE):
            while not condition(self.connections):
                await asyncio.sleep(0.001)


@pytest.fixture
async def running(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 1.0)
    server = HttpServer(application)
    with listen("127.0.0.1", 0) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        yield Running(listener.getsockname()[1], server)
        server.should_exit = True
        await task


@pytest.fixture
def port(running: Running) -> int:
    return running.port


class Clock:
    """The server's clock, which stands still until it is moved."""

    def __init__(self, running: Running) -> None:
        self._running, self._now = running, 0.0

    def monotonic(self) -> float:
        return self._now

    def move(self, seconds: float) -> None:
        self._now += seconds
        close_overdue(self._running.connections, most_unread=2 * LARGE)  # as the server does about once a second


@pytest.fixture
def clock(running: Running, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(running)
    monkeypatch.setattr(connections, "time", clock)
    return clock


@contextlib.asynccontextmanager
async def connected(
    port: int, sent: bytes, address: str = "127.0.0.1"
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client's connection from this address."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    writer.write(sent)
    yield reader, writer
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def get(path: str) -> bytes:
    return b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path.encode()


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HTTP/1.1\r\nx: ", b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"],
    ids=["nothing", "an endless header", "an endless body that nobody reads"],
)
async def test_a_client_has_limited_time_for_its_request(port: int, sent: bytes) -> None:
    async with connected(port, sent) as (reader, writer), asyncio.timeout(PATIENCE):
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b"a" if sent else b"")  # which does not win time
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(1000), timeout=0.1)


@pytest.mark.slow
async def test_a_client_that_tries_http_2_first_is_disconnected_without_a_warning(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(port, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") as (reader, _):
        assert await reader.read() == b""
    assert not caplog.records
    async with connected(port, get("/")) as (reader, _):
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")


async def test_a_client_that_does_not_read_its_answer_is_disconnected(port: int) -> None:
    async with connected(port, get("/large")) as (reader, _), asyncio.timeout(PATIENCE):
        for _ in range(40):  # as many turns of the server, which has the same loop, on a busy machine too
            await asyncio.sleep(0.1)
        received = 0
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(2**20):
                received += len(data)
        assert received < LARGE


@pytest.mark.deep
async def test_a_client_that_reads_slowly_gets_its_whole_answer(port: int) -> None:
    async with connected(port, get("/large")) as (reader, _), asyncio.timeout(PATIENCE):
        await reader.readuntil(b"\r\n\r\n")
        received = 0
        while received < LARGE:
            received += len(await reader.readexactly(4 * 2**20))
            await asyncio.sleep(0.25)


async def test_long_answers_and_kept_connections_have_their_time(running: Running, clock: Clock) -> None:
    async with connected(running.port, b"") as (reader, writer), asyncio.timeout(PATIENCE):
        for _ in range(2):
            writer.write(get("/slow"))
            await reader.readuntil(b"x\r\n")
            clock.move(100)
            assert (await reader.readuntil(b"0\r\n\r\n")).count(b"x\r\n") == 3
            await running.until(lambda found: found[0].wait is Wait.REQUEST)
            clock.move(0.8)
            writer.write(get("/"))
            await reader.readuntil(b"0\r\n\r\n")
        await running.until(lambda found: found[0].wait is Wait.REQUEST)
        clock.move(1.1)
        assert await reader.read() == b""


async def test_reading_a_little_wins_no_time(running: Running, clock: Clock) -> None:
    async with connected(running.port, get("/large")) as (reader, _), asyncio.timeout(PATIENCE):
        await reader.readuntil(b"\r\n\r\n")
        await running.until(lambda found: found[0].wait is Wait.READING)
        for _ in range(3):  # what is read comes out of the system's buffers, and the server sends as much more
            await reader.readexactly(16 * 2**20)
            await turns(50)
            clock.move(0.9)
        assert len(running.connections) == 1
        connection = running.connections[0]
        for less in (0, 3000, 3000):
            size = connection.transport.get_write_buffer_size() - less
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(type(connection.transport), "get_write_buffer_size", lambda _, size=size: size)
                clock.move(0.4)
        await running.until(lambda found: not found)


async def test_of_too_many_unread_answers_the_largest_goes(running: Running, clock: Clock) -> None:
    async with (
        connected(running.port, get("/large")) as (first, _),
        connected(running.port, get("/large")) as (second, _),
        asyncio.timeout(PATIENCE),
    ):
        await running.until(lambda found: [each.wait for each in found] == [Wait.READING] * 2)
        await second.readexactly(16 * 2**20)
        await turns(50)
        close_overdue(running.connections, most_unread=2 * LARGE)
        assert len(running.connections) == 2
        close_overdue(running.connections, most_unread=LARGE)
        await running.until(lambda found: len(found) == 1)
        await second.readexactly(LARGE - 16 * 2**20)
        del first


async def test_a_stream_that_nobody_reads_is_no_error_of_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "SEND_SECONDS", 0.05)
    ended = asyncio.Event()

    async def endless() -> AsyncGenerator[tuple[bytes, bool], None]:
        try:
            while True:
                yield b"x" * 2**20, True
        finally:
            ended.set()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        events = endless()
        first = asyncio.ensure_future(anext(events))
        await connection.EventStream(first, events, lambda _: b"")(scope, receive, send)

    server = HttpServer(app)
    with listen("127.0.0.1", 0) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        async with connected(listener.getsockname()[1], get("/")) as (reader, _), asyncio.timeout(PATIENCE):
            await ended.wait()
            with contextlib.suppress(ConnectionError):
                while await reader.read(2**20):
                    pass
        server.should_exit = True
        await task
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_connections_that_wait_are_accepted_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event loop may take one in each of its turns, and a turn is long while bodies arrive."""
    loop, calls = asyncio.get_running_loop(), []
    accept = loop.sock_accept

    def counted(listening: socket.socket) -> Any:
        calls.append(listening)
        return accept(listening)

    monkeypatch.setattr(loop, "sock_accept", counted)
    server = HttpServer(application)
    with listen("127.0.0.1", 0) as listener, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(listener.getsockname())) for _ in range(40)]
        task = asyncio.create_task(server.serve(sockets=[listener]))
        for client in clients:
            client.setblocking(False)
            await loop.sock_sendall(client, get("/"))
        for client in clients:
            assert (await loop.sock_recv(client, 12)) == b"HTTP/1.1 200"
        server.should_exit = True
        await task
    assert len(calls) <= 40 // ACCEPTED_PER_TURN + 2


# --- What is no HTTP, and what is ambiguous ---


async def test_what_is_no_http_gets_an_error_object_and_is_counted(running: Running) -> None:
    counted = []
    running.server._on_malformed = lambda: counted.append(1)
    async with connected(running.port, b"hello\r\n\r\n") as (reader, _), asyncio.timeout(PATIENCE):
        head, body = (await reader.read()).split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and b"content-type: application/json" in head.lower()
    assert json.loads(body)["error"]["code"] == "invalid_http"
    assert counted == [1]


async def test_a_body_with_a_length_and_chunks_ends_its_connection(port: int) -> None:
    doubled = b"POST /body HTTP/1.1\r\nhost: x\r\ncontent-length: 40\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    async with connected(port, doubled + get("/")) as (reader, _), asyncio.timeout(PATIENCE):
        answers = await reader.read()
    assert answers.count(b"HTTP/1.1 200") == 1 and b"connection: close" in answers.lower()


# --- Which connections are closed past the bound ---

MOST = 8


def post(path: bytes, body: bytes = b"") -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 20\r\n\r\n%b" % (path, body)


async def turns(count: int) -> None:
    """Turns of the loop that the server has, too: on a machine that stops for a while they are as many."""
    for _ in range(count):
        await asyncio.sleep(0.003)


@contextlib.asynccontextmanager
async def many(port: int, sent: bytes, count: int) -> AsyncIterator[list[asyncio.StreamReader]]:
    async with contextlib.AsyncExitStack() as stack:
        readers = []
        for _ in range(count):
            readers.append((await stack.enter_async_context(connected(port, sent)))[0])
            await turns(10)  # the server sees them in this order
        yield readers


async def closed(readers: list[asyncio.StreamReader]) -> list[int]:
    """The places of those that the server has closed."""
    await turns(50)
    return [place for place, reader in enumerate(readers) if reader.at_eof() or reader.exception() is not None]


@pytest.fixture
def few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "most_connections", lambda: MOST)


@pytest.mark.usefixtures("few_connections")
@pytest.mark.parametrize("sent", [b"", HEADER, post(b"/body")], ids=UNFINISHED)
async def test_of_many_connections_those_of_the_address_with_most_are_closed(port: int, sent: bytes) -> None:
    async with (
        connected(port, b"", "127.0.0.2") as (page, writer),
        many(port, sent, 3 * MOST) as others,
        asyncio.timeout(PATIENCE),
    ):
        assert await closed(others) == list(range(3 * MOST - (MOST - 1)))
        writer.write(get("/"))
        assert (await page.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")


@pytest.mark.usefixtures("few_connections")
async def test_a_new_connection_has_time_for_its_request(port: int) -> None:
    async with (
        many(port, HEADER, MOST) as others,
        connected(port, b"") as (page, writer),
        connected(port, HEADER),
        asyncio.timeout(PATIENCE),
    ):
        assert await closed(others) == [0, 1]
        writer.write(get("/"))
        assert (await page.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")


@pytest.mark.usefixtures("few_connections")
async def test_connections_that_come_all_at_once_are_bounded_as_well(running: Running) -> None:
    opened = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", running.port) for _ in range(10 * MOST)))
    assert len(await closed([reader for reader, _ in opened])) == 9 * MOST
    for _, writer in opened:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.usefixtures("few_connections")
async def test_idle_connections_are_closed_before_those_in_use(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", float(PATIENCE))
    monkeypatch.setattr(connections, "ARRIVAL_SECONDS", 0.0)
    async with (
        connected(port, get("/large")) as (large, _),
        connected(port, post(b"/body", b"x" * 10)) as (answer, upload),
        connected(port, b"GET / HTTP/1.1\r\n") as (page, header),
        asyncio.timeout(PATIENCE),
    ):
        await large.readuntil(b"\r\n\r\n")
        await large.readexactly(2**20)
        async with many(port, b"", 3 * MOST) as idle:
            assert await closed(idle) == list(range(3 * MOST - (MOST - 3)))  # the oldest
            upload.write(b"x" * 10)
            header.write(b"host: x\r\n\r\n")
            for reader in (answer, page):
                assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
            await large.readexactly(LARGE - 2**20)


@pytest.mark.usefixtures("few_connections")
async def test_headers_are_closed_before_bodies(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", float(PATIENCE))
    async with (
        connected(port, post(b"/body", b"x")) as (oldest, upload),
        many(port, post(b"/body", b"x"), MOST - 3) as bodies,
        many(port, b"GET / HTTP/1.1\r\n", 2) as headers,
    ):
        upload.write(b"x")  # makes progress, so others are closed before it
        assert await closed([oldest, *bodies, *headers]) == []
        async with many(port, post(b"/body", b"x"), 3):
            assert await closed(headers) == [0, 1]
            assert await closed([oldest, *bodies]) == [1]


@pytest.mark.usefixtures("few_connections")
async def test_a_client_that_stopped_reading_makes_room_last(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", float(PATIENCE))
    async with many(port, get("/large"), MOST) as answers:
        async with many(port, b"", 2):
            assert await closed(answers) == []  # they may be reading
        monkeypatch.setattr(connections, "READING_SECONDS", 0.0)
        async with many(port, b"", 1), asyncio.timeout(PATIENCE):
            received = 0
            with contextlib.suppress(ConnectionError):
                while data := await answers[0].read(2**20):
                    received += len(data)
            assert received < LARGE


@pytest.mark.parametrize("path", [b"/body", b"/"], ids=["read", "answered early"])
async def test_each_request_of_a_connection_has_the_whole_time(running: Running, clock: Clock, path: bytes) -> None:
    async with connected(running.port, post(path, b"x" * 10)) as (reader, writer), asyncio.timeout(PATIENCE):
        for request, seconds in ((b"", 0.1), (post(b"/body", b"x" * 10), 0.8)):
            writer.write(request)
            await running.until(lambda found: len(found) == 1 and found[0].wait is Wait.BODY)
            clock.move(seconds)
            writer.write(b"x" * 10)
            assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")
            await running.until(lambda found: found[0].wait is Wait.REQUEST)
            clock.move(0.8)
        clock.move(0.3)
        assert await reader.read() == b""


@pytest.mark.parametrize("path", [b"/", b"/body"])
async def test_an_answer_without_the_expected_body_ends_the_connection(port: int, path: bytes) -> None:
    """The client does not send this body, and the server must not take the next request for it."""
    expecting = post(path).replace(b"host", b"expect: 100-continue\r\nhost")
    async with connected(port, expecting) as (reader, writer), asyncio.timeout(PATIENCE):
        head = await reader.readuntil(b"\r\n\r\n")
        if path == b"/body":
            assert head.startswith(b"HTTP/1.1 100")
            writer.write(b"x" * 20 + get("/"))
            assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")
        else:
            assert b"connection: close" in head
            assert await reader.read() == b"1\r\n\x00\r\n0\r\n\r\n"  # and the end


# --- Bodies in chunks ---


def chunked(body: bytes, size: int, extension: bytes = b"", trailer: bytes = b"") -> bytes:
    """A body in chunks of `size` bytes."""
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    chunks = (b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts)
    return b"".join(chunks) + b"0\r\n" + trailer + b"\r\n"


def posted(path: str, headers: bytes) -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: x\r\n%b\r\n\r\n" % (path.encode(), headers)


CHUNKED = b"transfer-encoding: chunked"


class Bodies:
    """An application that notes when requests come to it, and the bodies that it has read."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.seen.append(scope["path"])
        body, more = b"", scope["path"] != "/refused"
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
        await send({"type": "http.response.body", "body": b"x"})
        self.seen.append(f"{scope['path']} answered")


@pytest.fixture
async def bodies() -> AsyncIterator[tuple[Bodies, int]]:
    server = HttpServer(found := Bodies())
    with listen("127.0.0.1", 0) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        yield found, listener.getsockname()[1]
        server.should_exit = True
        await task


async def answers(reader: asyncio.StreamReader, count: int) -> None:
    async with asyncio.timeout(PATIENCE):
        for _ in range(count):
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(1) == b"x"


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.deep), 16, 64, 1000])
async def test_tiny_chunks_leave_others_their_turns(
    bodies: tuple[Bodies, int], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a body that was received at once, no more than a part is parsed before others have had a turn."""
    application, port = bodies
    monkeypatch.setattr(connections, "TURN_SECONDS", 0.0)
    turns = list[int]()
    parse = connections.BoundedConnection.parse_part

    def counted(connection: connections.BoundedConnection) -> bool:
        before = len(connection._received)
        more = parse(connection)
        turns.append(before - len(connection._received))
        return more

    monkeypatch.setattr(connections.BoundedConnection, "parse_part", counted)
    body = os.urandom(60_000)
    async with connected(port, posted("/slow", CHUNKED)) as (slow, writer):
        while "/slow" not in application.seen:
            await asyncio.sleep(0)
        turns.clear()
        writer.write(chunked(body, size))
        async with connected(port, get("/quick")) as (quick, _):
            await answers(quick, 1)
        assert "/slow answered" not in application.seen
        assert application.seen[-1] == "/quick answered"
        await answers(slow, 1)
    chunk = size + len(b"\r\n\r\n") + len(b"%x" % size)
    assert max(turns) <= max(connections.CHUNKED_LINES // 2 * chunk, len(get("/quick")))
    assert sorted(application.bodies) == sorted([b"", body])


async def test_a_turn_has_a_bounded_number_of_parts(
    bodies: tuple[Bodies, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender at the memory's speed would otherwise keep the other cores busy with copies."""
    application, port = bodies
    monkeypatch.setattr(connections, "TURN_SECONDS", 3600.0)
    monkeypatch.setattr(connections, "TURN_PARTS", 2)
    turns, run, parse = list[int](), connections._Parsing._run, connections.BoundedConnection.parse_part

    def counted_run(parsing: connections._Parsing) -> None:
        turns.append(0)
        run(parsing)

    def counted_parse(connection: connections.BoundedConnection) -> bool:
        if turns:
            turns[-1] += 1
        return parse(connection)

    monkeypatch.setattr(connections._Parsing, "_run", counted_run)
    monkeypatch.setattr(connections.BoundedConnection, "parse_part", counted_parse)
    body = os.urandom(2**20)
    async with connected(port, posted("/long", b"content-length: %d" % len(body)) + body) as (reader, _):
        await answers(reader, 1)
    assert application.bodies == [body]
    assert max(turns) == 2


@pytest.mark.skipif(not hasattr(select, "POLLRDHUP"), reason="the end of what is not read yet is told on Linux alone")
@pytest.mark.parametrize("is_gone", [True, False])
async def test_the_rest_of_a_long_body_is_not_parsed_if_its_client_is_gone(
    is_gone: bool, bodies: tuple[Bodies, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interim answer tells it from one that only sends no more."""
    application, port = bodies
    monkeypatch.setattr(connections, "SHORT_BODY", 1000)
    body = os.urandom(200_000)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**19)
        client.connect(("127.0.0.1", port))
        client.sendall(posted("/long", b"content-length: %d" % len(body)) + body)  # the server has read nothing yet
        client.close() if is_gone else client.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(PATIENCE):
            while "/long answered" not in application.seen:
                await asyncio.sleep(0)
        if is_gone:
            assert len(application.bodies[0]) < len(body)
        else:
            assert application.bodies == [body]
            answer = b"".join(await asyncio.to_thread(lambda: [*iter(lambda: client.recv(4096), b"")]))
            assert answer.startswith(b"HTTP/1.1 100") and b"HTTP/1.1 200" in answer and answer.endswith(b"x")


async def test_an_address_waits_for_one_part_of_each_other_address(
    bodies: tuple[Bodies, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many connections others have, and in few turns if its chunks are not tiny."""
    application, port = bodies
    monkeypatch.setattr(connections, "TURN_SECONDS", 0.0)
    parsed, parse = list[str](), connections.BoundedConnection.parse_part

    def noted(connection: connections.BoundedConnection) -> bool:
        parsed.append(connection.address)
        return parse(connection)

    monkeypatch.setattr(connections.BoundedConnection, "parse_part", noted)
    body = os.urandom(6000)
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(PATIENCE):
        for _ in range(40):
            await stack.enter_async_context(connected(port, posted("/flood", CHUNKED) + chunked(bytes(20_000), 1)[:-5]))
        while application.seen.count("/flood") < 40:
            await asyncio.sleep(0)
        honest = posted("/honest", CHUNKED) + chunked(body, 2000)
        reader, _ = await stack.enter_async_context(connected(port, honest, "127.0.0.2"))
        await answers(reader, 1)
    assert body in application.bodies
    turns = [place for place, address in enumerate(parsed) if address == "127.0.0.2"]
    between = parsed[turns[0] : turns[-1]]
    assert len(turns) <= 4
    assert between.count("127.0.0.1") <= len(turns)


@pytest.mark.parametrize("pieces", [1, 7, 333, 10**9])
async def test_requests_one_after_the_other_arrive_whole(bodies: tuple[Bodies, int], pieces: int) -> None:
    """With lengths, in chunks, with extensions and trailers, sent together and cut anywhere."""
    application, port = bodies
    large, small = os.urandom(200_000), b"0\r\n\r\nGET / HTTP/1.1\r\n\r\n"
    if pieces < 100:
        large = large[:2000]
    sent = b"".join(
        [
            posted("/a", b"content-length: %d" % len(large)) + large,
            get("/b"),
            posted("/c", CHUNKED) + chunked(small, 1),
            posted("/c2", b"content-length: %d" % len(large)) + large,
            posted("/d", CHUNKED) + chunked(large, 5000, b";a=b", b"x: y\r\n"),
            posted("/e", b"content-length: 0"),
            posted("/f", b"content-length: %d" % len(small)) + small,
        ]
    )
    async with connected(port, b"") as (reader, writer):
        for start in range(0, len(sent), pieces):
            writer.write(sent[start : start + pieces])
            await asyncio.sleep(0)
        await answers(reader, 7)
    assert application.bodies == [large, b"", small, large, large, b"", small]


async def test_a_body_that_nobody_waits_for_ends_its_connection(bodies: tuple[Bodies, int]) -> None:
    application, port = bodies
    async with connected(port, posted("/refused", CHUNKED)) as (reader, writer), asyncio.timeout(PATIENCE):
        await answers(reader, 1)
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(chunked(bytes(1000), 10)[:-5])
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(100), timeout=0.01)
    assert application.bodies == [b""]


async def test_a_short_body_that_nobody_waited_for_leaves_the_connection(bodies: tuple[Bodies, int]) -> None:
    _, port = bodies
    sent = posted("/refused", CHUNKED) + chunked(bytes(1000), 100)
    async with connected(port, sent) as (reader, writer):
        await answers(reader, 1)
        writer.write(get("/next"))
        await answers(reader, 1)
