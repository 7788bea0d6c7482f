"""TLS handshakes that never end, and connections that cannot be accepted."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from eagle_server.api import server as server_module
from eagle_server.api.server import HttpServer, listen
from tests.api.conftest import PATIENCE, Certificate
from tests.api.test_connections import application, closed, connected, get, many

MOST = 8


@pytest.fixture(autouse=True)
def _few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "most_connections", lambda: MOST)
    monkeypatch.setattr(server_module, "FEWEST_HANDSHAKES", 2)


@contextlib.asynccontextmanager
async def served(certificate: Certificate | None) -> AsyncIterator[int]:
    """The port of a server in this process."""
    server = HttpServer(application)
    if certificate is not None:
        files = {"ssl_certfile": str(certificate.file), "ssl_keyfile": str(certificate.key)}
        server = HttpServer(application, **files, ssl_keyfile_password=certificate.password)
    with listen("127.0.0.1", 0) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        yield listener.getsockname()[1]
        server.should_exit = True
        async with asyncio.timeout(PATIENCE):
            await task


async def answer(port: int, certificate: Certificate) -> bytes:
    """The first line of an answer over HTTPS."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=certificate.trusted)
    writer.write(get("/"))
    line = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return line


async def test_a_handshake_has_limited_time(
    certificate: Certificate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "HANDSHAKE_SECONDS", 0.5)
    async with served(certificate) as port, asyncio.timeout(PATIENCE):
        async with connected(port, b"") as (silent, _), connected(port, get("/")) as (plain, _):
            assert await silent.read() == b""
            with contextlib.suppress(ConnectionError):
                await plain.read()  # HTTP where TLS is spoken
        assert (await answer(port, certificate)).startswith(b"HTTP/1.1 200")
    assert not caplog.records


async def test_handshakes_count_as_connections_and_the_oldest_are_given_up(certificate: Certificate) -> None:
    async with served(certificate) as port, asyncio.timeout(PATIENCE), many(port, b"", 3 * MOST) as silent:
        assert await closed(silent) == list(range(2 * MOST))
        assert (await answer(port, certificate)).startswith(b"HTTP/1.1 200")


async def test_handshakes_that_come_all_at_once_are_given_up_as_well(certificate: Certificate) -> None:
    async with served(certificate) as port, asyncio.timeout(PATIENCE), contextlib.AsyncExitStack() as stack:
        opened = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", port) for _ in range(10 * MOST)))
        for _, writer in opened:
            stack.callback(writer.close)
        assert len(await closed([reader for reader, _ in opened])) == 9 * MOST


async def test_where_connections_fill_the_bound_few_handshakes_are_left(certificate: Certificate) -> None:
    async with served(certificate) as port, asyncio.timeout(PATIENCE), contextlib.AsyncExitStack() as stack:
        for _ in range(MOST):
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=certificate.trusted)
            stack.callback(writer.close)
            writer.write(get("/slow"))
        silent = await stack.enter_async_context(many(port, b"", 5))
        assert await closed(silent) == [0, 1, 2]


async def test_a_server_stops_while_a_handshake_is_going_on(certificate: Certificate) -> None:
    async with served(certificate) as port, connected(port, b""):
        await asyncio.sleep(0.1)


async def test_a_lack_of_files_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "RETRY_SECONDS", 0.01)
    failures = iter([OSError(errno.EMFILE, "Too many open files")] * 3)
    accept = socket.socket.accept

    def failing(listening: socket.socket) -> Any:
        for failure in failures:
            raise failure
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", failing)
    async with served(None) as port, connected(port, get("/")) as (reader, _), asyncio.timeout(PATIENCE):
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    [record] = caplog.records
    assert "Too many open files" in record.message
