"""A client that closes its sending side after a whole request gets the whole answer; one that is gone is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from eagle_server.api.guard import connections
from tests.api.conftest import PATIENCE, Certificate, Server, serving
from tests.api.fake_engine import SLOW, STALL
from tests.api.servers import wait_for_running, wait_until_idle
from tests.api.test_connections import connected, get
from tests.api.test_tls import served

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
VERSIONS = pytest.mark.parametrize("version", ["1.0", "1.1"])
EACH_WAY = pytest.mark.parametrize("stream", [False, True])
# Longer than the server waits before it sends an interim answer: 50 ms per token.
LONG = {"prompt": f"{SLOW}abc", "max_tokens": 12}


@pytest.fixture(scope="module")
def server(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tokenizer_dir, tmp_path_factory.mktemp("half_close") / "log") as running:
        yield running
        assert "Traceback" not in running.log.read_text()


def post(body: dict[str, Any], version: str = "1.1", headers: str = "") -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nhost: localhost\r\n{headers}content-length: {len(content)}\r\n\r\n"
    return head.encode() + content


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=PATIENCE)


def half_closed(server: Server, sent: bytes) -> bytes:
    """All that comes back."""
    with connect(server) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(2**16), b""))


def text_of(received: bytes, *, stream: bool) -> str:
    head, _, body = received.partition(b"\r\n\r\n")
    assert b" 200 " in head.partition(b"\r\n")[0], received
    if not stream:
        return str(json.loads(body)["choices"][0]["text"])
    assert b"data: [DONE]" in body
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


@VERSIONS
@EACH_WAY
@pytest.mark.parametrize("headers", ["", "connection: close\r\n", "connection: keep-alive\r\n"])
def test_the_whole_answer_comes(server: Server, version: str, headers: str, *, stream: bool) -> None:
    received = half_closed(server, post({**LONG, "stream": stream}, version, headers))
    text = text_of(received.removeprefix(CONTINUE), stream=stream)
    assert text == "abc" * 4
    assert version == "1.1" or not received.startswith(CONTINUE), "HTTP/1.0 has no interim answers"
    wait_until_idle(server)


@VERSIONS
def test_a_stream_has_chunks_in_http_1_1_alone(server: Server, version: str) -> None:
    """Events go to the connection at once, as h11 would send them."""
    received = half_closed(server, post({"prompt": "abc", "max_tokens": 6, "stream": True}, version))
    head, _, body = received.removeprefix(CONTINUE).partition(b"\r\n\r\n")
    assert (b"transfer-encoding: chunked" in head.lower()) == (version == "1.1")
    if version == "1.1":
        size, chunks = -1, list[bytes]()
        while size:
            line, _, body = body.partition(b"\r\n")
            size = int(line, 16)
            chunks.append(body[:size])
            assert body[size : size + 2] == b"\r\n"
            body = body[size + 2 :]
        assert body == b"" and len(chunks) > 2
        body = b"".join(chunks)
    assert all(event.startswith((b"data: ", b": ")) for event in body.split(b"\n\n")[:-1])
    assert body.endswith(b"data: [DONE]\n\n")


async def test_an_answer_that_begins_before_the_first_check_has_no_interim_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "FIRST_CHECK_SECONDS", float(PATIENCE))
    async with served(None) as port, connected(port, get("/") + get("/slow")) as (reader, writer):
        writer.write_eof()
        received = await reader.read()
    assert received.count(b"HTTP/1.1 200") == 2 and CONTINUE not in received
    assert received.endswith(b"0\r\n\r\n")


def test_pipelined_requests_are_all_answered(server: Server) -> None:
    bodies = [
        {**LONG, "stream": True},
        LONG,
        {"prompt": "x", "user": "y" * 10_000, "max_tokens": 1},
        {"prompt": "d", "max_tokens": 3},
    ]
    received = half_closed(server, b"".join(map(post, bodies)))
    answers = received.replace(CONTINUE, b"").split(b"HTTP/1.1 200")[1:]
    assert len(answers) == 4, received
    assert b"[DONE]" in answers[0]
    assert [json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] for answer in answers[1:]] == [
        12,
        1,
        3,
    ]


def test_a_long_body_is_read_to_its_end(server: Server) -> None:
    received = half_closed(server, post({"prompt": "x" * 1500, "max_tokens": 2, "user": "y" * 2**20}))
    assert text_of(received.removeprefix(CONTINUE), stream=False) == "xx"


@pytest.mark.parametrize("size", [0, 20, -1])
def test_an_unfinished_request_ends_the_connection(server: Server, size: int) -> None:
    assert half_closed(server, post(LONG)[:size]) == b""


def close(client: socket.socket) -> None:
    client.close()


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def half_close_and_reset(client: socket.socket) -> None:
    client.shutdown(socket.SHUT_WR)
    reset(client)


LEAVE = pytest.mark.parametrize("leave", [close, reset, half_close_and_reset])


@EACH_WAY
@LEAVE
def test_a_client_that_is_gone_before_its_answer_is_cancelled(
    server: Server, leave: Callable[[socket.socket], None], *, stream: bool
) -> None:
    """No token ever comes, so nothing else could end it."""
    client = connect(server)
    client.sendall(post({"prompt": STALL, "stream": stream}))
    wait_for_running(server, 1)
    leave(client)
    wait_until_idle(server)


@VERSIONS
@LEAVE
def test_a_client_that_is_gone_in_the_middle_of_its_stream_is_cancelled(
    server: Server, leave: Callable[[socket.socket], None], version: str
) -> None:
    client = connect(server)
    client.sendall(post({"prompt": f"{SLOW}abc", "max_tokens": 1900, "stream": True}, version))
    assert b" 200 " in client.recv(100)
    leave(client)
    wait_until_idle(server)


@pytest.mark.parametrize("leave", [reset, half_close_and_reset])
def test_a_client_of_http_1_0_that_resets_is_cancelled(server: Server, leave: Callable[[socket.socket], None]) -> None:
    client = connect(server)
    client.sendall(post({"prompt": STALL}, "1.0"))
    wait_for_running(server, 1)
    leave(client)
    wait_until_idle(server)


def test_a_client_of_http_1_0_that_closes_is_found_at_the_first_write(server: Server) -> None:
    client = connect(server)
    client.sendall(post({**LONG, "max_tokens": 40}, "1.0"))
    wait_for_running(server, 1)
    client.close()
    wait_until_idle(server)
    assert httpx.get(f"{server.url}/health").status_code == 200


async def test_over_tls_the_end_of_the_requests_ends_the_connection(
    certificate: Certificate, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio has no half-closed connections there."""
    async with served(certificate) as port, asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=certificate.trusted)
        writer.write(get("/slow"))
        await reader.readuntil(b"x\r\n")
        writer.get_extra_info("socket").shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            assert not (await reader.read()).endswith(b"0\r\n\r\n")
        writer.close()
    assert not caplog.records
