"""Runs the HTTP server: listen, serve, drain, stop."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import signal
import socket
import ssl
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from eagle_server.api.guard.admission import Admission
from eagle_server.api.guard.body import CloseIfAmbiguous
from eagle_server.api.guard.connections import (
    BoundedConnection,
    abort_all,
    close_overdue,
    most_connections,
)
from eagle_server.api.unix_socket import UnixListener
from eagle_server.client.client import EngineClient
from eagle_server.client.supervisor import Supervisor
from eagle_server.machine import usable_memory

logger = logging.getLogger(__name__)

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75  # longer than clients keep idle connections, so that none sends into a closing one
HANDSHAKE_SECONDS = 8.0  # a client's time for its TLS handshake
FEWEST_HANDSHAKES = 16  # may run even while all connections are in use; they take files from the reserved ones
ACCEPTED_PER_TURN = 16  # connections, before everything else has a turn
RETRY_SECONDS = 0.1  # after a connection could not be accepted
GRACE_SECONDS = 20  # left for clients to read their responses after the last one is generated
ABORT_SECONDS = 5  # left for uvicorn to end the connections that were aborted then
INTERRUPTED_STATUS = 130
TEMPORARY_STATUS = os.EX_TEMPFAIL  # 75: the same configuration may work later
TEMPORARY_ERRORS = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, socket.EAI_AGAIN)
MOST_UNREAD = min(512 * 2**20, usable_memory() // 8)  # bytes of all answers that clients have not read
FEWEST_FILES = 40  # that must be allowed: 30 are too few for the pipes and sockets to the engine
TICKS_PER_SECOND = 10  # uvicorn's


def listen(host: str, port: int, uds: str | None = None) -> socket.socket:
    """A listening socket; `uds` is the path of a Unix socket, which takes the place of host and port.

    Raises:
        OSError: the address cannot be used, or too few files may be open; `strerror` is one line. With an errno of
            TEMPORARY_ERRORS the address may become usable.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < FEWEST_FILES:
        reason = f"only {files} files may be open, which is too few for a server; raise the limit (ulimit -n)"
        raise OSError(errno.EMFILE, reason)
    if uds is not None:
        return UnixListener(uds, BACKLOG)
    try:
        is_ipv6 = ":" in host
        listener = socket.create_server(
            (host, port),
            family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
            backlog=BACKLOG,
            dualstack_ipv6=is_ipv6 and socket.has_dualstack_ipv6(),  # :: has IPv4's addresses too
        )
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]  # the rest repeats the address
        message = f"cannot listen on {host}:{port}: {reason}; choose another --port or --host"
        raise OSError(error.errno, message) from error
    # Connections inherit the option. asyncio does not set it on these sockets, as they do not name TCP as protocol.
    # Without it a token waits until the client acknowledges the previous one, 40 ms on most systems.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class Listener:
    """Accepts connections. asyncio's own server does not count TLS handshakes, although each holds a file."""

    def __init__(
        self,
        listening: socket.socket,
        connection: Callable[[], BoundedConnection],
        tls: ssl.SSLContext | None,
        room: Callable[[], int],
    ) -> None:
        """`room`: how many more connections may be open. As many handshakes may run, but at least FEWEST_HANDSHAKES."""
        listening.settimeout(0)
        self._listening, self._connection, self._tls, self._room = listening, connection, tls, room
        self._beginning: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._loop = asyncio.get_running_loop()
        self._accepting = self._loop.create_task(self._accept())

    def close(self) -> None:
        """Accept no more connections, and end the handshakes."""
        self._loop.remove_reader(self._listening)  # it may be closed before the task knows that it is cancelled
        for task in (self._accepting, *self._beginning):
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(self._accepting, *self._beginning, return_exceptions=True)

    async def _accept(self) -> None:
        is_warned = False
        while True:
            try:
                clients = [(await self._loop.sock_accept(self._listening))[0]]
                clients += self._others()
            except ConnectionError:
                continue  # the client has left again
            except OSError as error:  # no files, or no memory
                if not is_warned:  # once, because clients could fill the log
                    logger.warning("connections cannot be accepted now: %s; see ulimit -n", error.strerror)
                is_warned = True
                await asyncio.sleep(RETRY_SECONDS)
                continue
            for client in clients:
                task = self._loop.create_task(self._begin(client))
                self._beginning[task] = None
                task.add_done_callback(self._ended)
            if len(self._beginning) > max(self._room(), FEWEST_HANDSHAKES):
                await asyncio.sleep(0)  # all have begun, so each closes its socket
                excess = len(self._beginning) - max(self._room(), FEWEST_HANDSHAKES)
                for oldest in list(self._beginning)[: max(0, excess)]:
                    oldest.cancel()
                    self._ended(oldest)
            await asyncio.sleep(0)

    def _others(self) -> list[socket.socket]:
        """Clients that wait behind the first one. The event loop's own call may take one in each of its turns."""
        found = list[socket.socket]()
        with suppress(OSError):  # there is none, or the next call says what is wrong
            while len(found) < ACCEPTED_PER_TURN - 1:
                found.append(self._listening.accept()[0])
                found[-1].settimeout(0)
        return found

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._beginning.pop(task, None)

    async def _begin(self, client: socket.socket) -> None:
        """Make a connection, after the handshake with TLS."""
        seconds = None if self._tls is None else HANDSHAKE_SECONDS
        with suppress(OSError):  # the client has left, is too slow, or speaks no TLS
            await self._loop.connect_accepted_socket(
                self._connection, client, ssl=self._tls, ssl_handshake_timeout=seconds
            )


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: `Lifecycle` handles signals, and drains before it stops."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        on_malformed: Callable[[], None] | None = None,
        ssl_certfile: str | None = None,
        ssl_keyfile: str | None = None,
        ssl_keyfile_password: str | None = None,
    ) -> None:
        """The arguments are uvicorn's. `on_malformed` is called for each request that is no HTTP.

        Raises:
            ValueError: files and password do not fit each other.
        """
        self._on_malformed = on_malformed
        super().__init__(
            uvicorn.Config(
                CloseIfAmbiguous(app),
                lifespan="off",
                # On h11. httptools is 0.2 ms faster. But it does not limit headers, and it drops the body of a request
                # that offers an upgrade to HTTP/2, as Java's own client does.
                http=BoundedConnection,
                ws="none",
                proxy_headers=False,  # uvicorn would believe everybody on this machine
                log_config=None,
                log_level="warning",
                access_log=False,  # telemetry/access.py logs more
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=GRACE_SECONDS + ABORT_SECONDS,
                ssl_certfile=ssl_certfile,
                ssl_keyfile=ssl_keyfile,
                ssl_keyfile_password=ssl_keyfile_password,
            )
        )
        try:
            if ssl_certfile is not None:
                _check_pem(ssl_certfile, ssl_keyfile)
            self.config.load()  # reads the certificate
        except OSError as error:  # ssl.SSLError is one
            raise ValueError(f"--ssl-certfile, --ssl-keyfile: {error}") from None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        def connection() -> BoundedConnection:
            made = BoundedConnection(self.config, self.server_state, self.lifespan.state)
            made.on_malformed = self._on_malformed
            return made

        def room() -> int:
            return most_connections() - len(self.server_state.connections)

        self.servers = [Listener(sock, connection, self.config.ssl, room) for sock in sockets or []]  # type: ignore[misc]
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS_PER_SECOND == 0:
            close_overdue(self.server_state.connections, MOST_UNREAD)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        abort = asyncio.get_running_loop().call_later(GRACE_SECONDS, abort_all, self.server_state.connections)
        try:
            await super().shutdown(sockets)
        finally:
            abort.cancel()

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


def _check_pem(certfile: str, keyfile: str | None) -> None:
    """
    Raises:
        ValueError: the certificate or the key is missing. OpenSSL's own message is only "PEM lib".
    """
    if b"CERTIFICATE-----" not in Path(certfile).read_bytes():
        raise ValueError(f"--ssl-certfile {certfile}: there is no certificate (PEM) in it")
    if b"PRIVATE KEY-----" in Path(keyfile or certfile).read_bytes():
        return
    if keyfile is None:
        raise ValueError(f"--ssl-certfile {certfile}: there is no private key in it; name its file with --ssl-keyfile")
    raise ValueError(f"--ssl-keyfile {keyfile}: there is no private key (PEM) in it")


class Lifecycle:
    """Runs the engine and the HTTP server until a signal arrives or one of them ends.

    SIGTERM and the first SIGINT drain: new generating requests get 503, running ones finish. A second SIGINT stops at
    once.
    """

    def __init__(
        self, supervisor: Supervisor, client: EngineClient, admission: Admission, hang_up: Callable[[], None] | None
    ) -> None:
        """`hang_up` is called on SIGHUP. None: SIGHUP ends the server, as when its terminal closes."""
        self._supervisor, self._hang_up = supervisor, hang_up
        self._client = client
        self._admission = admission
        self._stopping = asyncio.Event()

    async def run(self, server: HttpServer, listener: socket.socket, on_ready: Callable[[], None]) -> int:
        """Serve; return the process's exit status.

        Raises:
            EngineFailed: the engine could not be started, or ended while it had its last requests.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stopping.set)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        if self._hang_up is not None:
            loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        engine = asyncio.create_task(self._supervisor.run())
        http = asyncio.create_task(server.serve(sockets=[listener]))
        stopping = asyncio.create_task(self._stopping.wait())
        ready = asyncio.create_task(self._announce(on_ready))
        try:
            await asyncio.wait({engine, http, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if engine.done():
                engine.result()
            if stopping.done():
                logger.info("shutting down: %d requests to finish", self._admission.active)
                self._supervisor.drain()
                await self._admission.drain()
            server.should_exit = True
            await http
            if engine.done():
                engine.result()
            return 0
        finally:
            for task in (engine, http, stopping, ready):
                task.cancel()
            await asyncio.gather(engine, http, stopping, ready, return_exceptions=True)

    async def _announce(self, on_ready: Callable[[], None]) -> None:
        await self._client.until_available()
        on_ready()

    def _interrupt(self) -> None:
        if self._stopping.is_set():
            logger.warning("stopping at once")
            self._supervisor.kill()
            logging.shutdown()
            os._exit(INTERRUPTED_STATUS)
        self._stopping.set()
