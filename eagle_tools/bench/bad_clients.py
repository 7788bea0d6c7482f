"""Clients on the wire, for `eagle_tools.bench.attacks`: they send too slowly or without end, do not read, or leave."""

from __future__ import annotations

import select
import socket
import time

HOST = "127.0.0.1"
PATIENCE = 60.0  # seconds for one answer
END = b"\r\n\r\n"  # of a header
HEADER = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def read(port: int, content: bytes) -> str:
    """Read a stream to its end."""
    with _sent(port, content) as connection, connection.makefile("rb") as answer:
        done = any(line.startswith(b"data: [DONE]") for line in answer)
    return "read" if done else "a stream without its end"


def leave(port: int, content: bytes) -> str:
    """Read the first event of a stream and disconnect."""
    with _sent(port, content) as connection:
        connection.recv(4096)
    return "left"


def ignore(port: int, content: bytes) -> str:
    """Never read the answer, with the smallest buffer; returns when the server has disconnected."""
    with _sent(port, content, buffer=1024) as connection:
        poller = select.poll()
        poller.register(connection, select.POLLHUP | select.POLLERR)
        return "disconnected" if poller.poll(1000 * PATIENCE) else "never read"


def half_open(port: int, content: bytes) -> str:
    """300 connections with half a header; returns when the server has closed them all."""
    return _hold([_sent(port, content, raw=True) for _ in range(300)], b"")


def slow_body(port: int, content: bytes) -> str:
    """64 connections that send their body byte by byte."""
    return _hold([_sent(port, content, raw=True) for _ in range(64)], b" ")


def tiny_chunks(port: int, content: bytes) -> str:
    """400 connections that send chunks of one byte, 1.6 MB/s together."""
    return _hold([_sent(port, content, raw=True) for _ in range(400)], b"1\r\n \r\n" * 66)


def _hold(connections: list[socket.socket], sent: bytes) -> str:
    """Keep connections open, send each the same bytes ten times a second, until the server has closed all."""
    number = len(connections)
    while connections:
        readable, _, _ = select.select(connections, [], [], 0.1)
        closed = {connection for connection in readable if not _received(connection)}
        connections = [connection for connection in connections if connection not in closed]
        for connection in connections if sent else ():
            try:
                connection.send(sent)
            except OSError:
                closed.add(connection)
    return f"closed {number}"


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(4096)
    except OSError:
        return b""


def _sent(port: int, content: bytes, buffer: int | None = None, *, raw: bool = False) -> socket.socket:
    connection = socket.socket()
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(PATIENCE)
    connection.connect((HOST, port))
    head = b"" if raw else HEADER + f"content-length: {len(content)}\r\n\r\n".encode()
    connection.sendall(head + content)
    return connection


def drop(port: int, content: bytes) -> str:
    """Send a request and disconnect."""
    _sent(port, content).close()
    return "left"


def drop_soon(port: int, content: bytes) -> str:
    """Send a request, wait until the server has begun with it, and disconnect."""
    with _sent(port, content):
        time.sleep(0.03)
    return "left"


def endless(port: int, content: bytes) -> str:
    """Send a header, then the bytes after it again and again, whatever comes back, until the server disconnects."""
    head, _, body = content.partition(END)
    answer = b""
    with _sent(port, head + END, raw=True) as connection:
        try:
            while True:
                if select.select([connection], [], [], 0)[0]:
                    answer += _received(connection)
                connection.sendall(body)
        except OSError:
            return answer[9:12].decode() or "disconnected"
