"""Connections whose clients send or read nothing: their number and their time are bounded."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from eagle_server.api import connections
from eagle_server.api.connections import MOST_CONNECTIONS, RESERVED_FILES, most_connections
from eagle_server.api.server import HttpServer, listen
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
    """Answers at once, slowly at /slow, and with much at /large."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(4 if scope["path"] == "/slow" else 0):
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await asyncio.sleep(0.5)
    await send({"type": "http.response.body", "body": bytes(LARGE if scope["path"] == "/large" else 1)})


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 1.0)
    server = HttpServer(application)
    with listen("127.0.0.1", 0) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        yield listener.getsockname()[1]
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def connected(port: int, sent: bytes) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
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
async def test_a_client_that_does_not_read_its_answer_is_disconnected(port: int) -> None:
    async with connected(port, get("/large")) as (reader, _), asyncio.timeout(PATIENCE):
        await asyncio.sleep(3)
        received = 0
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(2**20):
                received += len(data)
        assert received < LARGE


@pytest.mark.slow
async def test_a_client_that_reads_slowly_gets_its_whole_answer(port: int) -> None:
    async with connected(port, get("/large")) as (reader, _), asyncio.timeout(PATIENCE):
        await reader.readuntil(b"\r\n\r\n")
        received = 0
        while received < LARGE:
            received += len(await reader.readexactly(4 * 2**20))
            await asyncio.sleep(0.25)


@pytest.mark.slow
async def test_long_answers_and_kept_connections_have_their_time(port: int) -> None:
    async with connected(port, b"") as (reader, writer), asyncio.timeout(PATIENCE):
        for _ in range(2):
            writer.write(get("/slow"))
            assert (await reader.readuntil(b"0\r\n\r\n")).count(b"x\r\n") == 4
            await asyncio.sleep(0.8)
            writer.write(get("/"))
            await reader.readuntil(b"0\r\n\r\n")
