"""Servers to measure: by their address, or child processes that run this package."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

START_SECONDS = 180.0


class BenchError(RuntimeError):
    """A measurement that is not possible; the message says why."""


@dataclass(frozen=True)
class ServerAddress:
    """The address of a running server. `label` names it in the report. `tls` has the certificates that are trusted."""

    label: str
    port: int
    host: str = field(default="127.0.0.1", kw_only=True)
    key: str = field(default="", kw_only=True)
    tls: ssl.SSLContext | None = field(default=None, kw_only=True)
    source: str = field(default="", kw_only=True)  # the address that connections come from; "": any

    @classmethod
    def of(cls, url: str) -> ServerAddress:
        """The server at "http://host:port".

        Raises:
            BenchError: the URL has another form.
        """
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.path.strip("/") or parts.query:
            raise BenchError(f"{url}: expected http://host:port")
        return cls(url, parts.port or 80, host=parts.hostname)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request."""
        return {"content-type": "application/json"} | ({"authorization": f"Bearer {self.key}"} if self.key else {})

    def connect(self, timeout: float) -> http.client.HTTPConnection:
        """A new connection."""
        source = (self.source, 0)
        if self.tls is None:
            return http.client.HTTPConnection(self.host, self.port, timeout, source)
        return http.client.HTTPSConnection(
            self.host, self.port, timeout=timeout, source_address=source, context=self.tls
        )

    def get(self, path: str) -> dict[str, Any]:
        """GET a JSON document."""
        document: dict[str, Any] = json.loads(self.text(path))
        return document

    def text(self, path: str) -> str:
        """GET a text."""
        with self._open(path) as response:
            body: bytes = response.read()
        return body.decode()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST a JSON document, and read one."""
        with self._open(path, json.dumps(body).encode()) as response:
            document: dict[str, Any] = json.load(response)
        return document

    def stats(self) -> dict[str, Any]:
        """The engine's counters."""
        stats: dict[str, Any] = self.get("/v1/server_info")["engine"]
        return stats

    def flush_cache(self) -> None:
        """Drop the prefix cache. No request may be running."""
        self._open("/flush_cache", b"").close()

    def _open(self, path: str, data: bytes | None = None) -> Any:
        scheme = "http" if self.tls is None else "https"
        request = urllib.request.Request(f"{scheme}://{self.host}:{self.port}{path}", data, self.headers)
        return urllib.request.urlopen(request, timeout=30, context=self.tls)


@dataclass(frozen=True)
class Server(ServerAddress):
    """A server that this process started."""

    process: subprocess.Popen[bytes]


@contextmanager
def running(
    label: str, flags: Sequence[str], files: int | None = None, key: str = "", tls: ssl.SSLContext | None = None
) -> Iterator[Server]:
    """Start `python -m eagle_server` with `flags` on a free port, wait until it is healthy, stop it at the end.

    `files`: the most files and connections that each of its processes may open; None: this process's limit. `key` and
    `tls`: what its clients need because of the flags.
    """
    port = free_port()
    command = [sys.executable, "-m", "eagle_server", "--port", str(port), "--log-level", "warning", *flags]
    if files is not None:
        command = ["prlimit", f"--nofile={files}", *command]
    with started(label, command, port, lambda server: bool(server.get("/health")), key=key, tls=tls) as server:
        yield server


@contextmanager
def started(
    label: str, command: Sequence[str], port: int, is_ready: Callable[[Server], bool], **access: Any
) -> Iterator[Server]:
    """Run a command that serves on `port`, wait until it is ready, stop it at the end. `access`: its key and tls.

    Raises:
        BenchError: it ended, or was not ready in time.
    """
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        server = Server(label, port, process, **access)
        _await(server, command, is_ready)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await(server: Server, command: Sequence[str], is_ready: Callable[[Server], bool]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise BenchError(f"{' '.join(command)} ended with status {server.process.returncode}")
        with suppress(urllib.error.URLError, ConnectionError, ValueError):
            if is_ready(server):
                return
        time.sleep(0.1)
    raise BenchError(f"{' '.join(command)} was not ready after {START_SECONDS:.0f} s")


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
