"""The engine process: one loop that receives requests, runs a cycle and sends its deltas."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import zmq

from eagle_server.engine.logs import LogStyle, configure_logging
from eagle_server.request import (
    Abort,
    CycleStats,
    Deltas,
    EngineStats,
    FinishReason,
    FlushCache,
    Flushed,
    Inbound,
    Outbound,
    Ready,
    Request,
    TokenDelta,
)

logger = logging.getLogger(__name__)

CONFIGURATION_STATUS = 2
FAILURE_STATUS = 1
Built = TypeVar("Built")
_QUIET = 2.0  # seconds without a message before the engine preloads, which slows it for a short time
# Messages per turn of the loop: read from the socket (5 us each, 20 with 500 tokens), and given to the engine (6, 130).
_READ, _GIVEN = 1024, 64
_PAUSE = 0.05  # seconds without a message before a graph is captured; who arrives then waits for it, about 0.1 s


class EngineProtocol(Protocol):
    """The engine's methods that the loop calls."""

    def ready(self) -> Ready: ...

    def preload(self) -> None:
        """Start to load, on threads, what only some requests need.

        The loop calls this while no messages arrive, because it slows down the rest of the process.
        """
        ...

    @property
    def lacks_graphs(self) -> bool:
        """Whether `capture_graph` has a graph to capture."""
        ...

    def capture_graph(self) -> None:
        """Capture one graph for forwards that occur. The loop calls this while no request runs."""
        ...

    def add(self, request: Request) -> None:
        """Queue a request. A bad request gets a delta that ends it, never an exception."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request. It gets a last delta. An unknown id is ignored."""
        ...

    def has_work(self) -> bool:
        """Whether `step` has a cycle to run or deltas to return."""
        ...

    @property
    def overlaps(self) -> bool:
        """Whether the device computes while the host works: `step` then sends the deltas of the cycle before."""
        ...

    def step(self, meanwhile: Callable[[], None]) -> list[TokenDelta]:
        """Run one cycle and return its deltas. Calls `meanwhile` once, at a time when it delays the cycle least."""
        ...

    def catch_up(self) -> None:
        """Do the work that the last step's deltas do not need. The loop calls this when it has sent them."""
        ...

    def stats(self) -> EngineStats: ...

    def take_cycle(self) -> CycleStats | None:
        """Statistics of the newest cycle; None if no cycle ran since the last call."""
        ...

    def flush_cache(self) -> Flushed:
        """Drop the prefix cache. Does nothing if requests are running or waiting."""
        ...

    def check(self) -> None:
        """Assert that no KV page is lost. The loop calls this each time the last request ends, so it must be cheap."""
        ...


@dataclass(frozen=True)
class Rank:
    """One of the processes that compute an engine's target together. They meet at the file `rendezvous`."""

    number: int
    size: int
    rendezvous: str


@dataclass(frozen=True)
class EngineFactory:
    """A function that builds an engine, given by name, so that only the engine process imports its module.

    An engine with several ranks is built once per rank, with its `Rank` as the last argument.
    """

    module: str
    function: str
    arguments: tuple[Any, ...] = ()

    def __call__(self, *rank: Rank) -> Any:
        began = time.perf_counter()
        module = importlib.import_module(self.module)
        logger.info("torch and the engine's code: %.1f s", time.perf_counter() - began)
        return getattr(module, self.function)(*self.arguments, *rank)


def run_engine(build: Callable[[], EngineProtocol], inbound_address: str, outbound_address: str) -> None:
    """Build an engine and serve it forever: receive messages on one socket, send one message per cycle on the other."""
    engine = build()
    freeze()
    with zmq.Context() as context, context.socket(zmq.PULL) as inbound, context.socket(zmq.PUSH) as outbound:
        for socket in (inbound, outbound):
            socket.set_hwm(0)  # no limit: the API limits the requests in flight, and a cycle must not block on a send
            socket.linger = 0
        inbound.bind(inbound_address)
        outbound.connect(outbound_address)
        inbox, outbox, is_preloaded = _Inbox(inbound), _Outbox(outbound), False
        outbox.send(engine.ready())
        outbox.send(Deltas([], engine.stats()))
        while True:
            if not engine.has_work():
                is_preloaded = _prepare(engine, inbox, is_preloaded=is_preloaded)
            for message in inbox.take(wait=not engine.has_work()):
                _give(engine, message, outbox)
            deltas = inbox.take_aborted()
            if engine.has_work():
                deltas += engine.step(outbox.send_kept)
            outbox.keep(Deltas(deltas, engine.stats(), engine.take_cycle()))
            if not (engine.overlaps and engine.has_work()):
                outbox.send_kept()
                engine.catch_up()
            if deltas and not engine.has_work():
                engine.check()


def _give(engine: EngineProtocol, message: Inbound, outbox: _Outbox) -> None:
    match message:
        case Request():
            engine.add(message)
        case Abort():
            engine.abort(message.request_id)
        case FlushCache():
            outbox.send(engine.flush_cache())


def _prepare(engine: EngineProtocol, inbox: _Inbox, *, is_preloaded: bool) -> bool:
    """Do what later requests profit from, until a message arrives. Returns whether the engine has preloaded."""
    while engine.lacks_graphs and inbox.stays_empty(_PAUSE):
        engine.capture_graph()
    if not is_preloaded and inbox.stays_empty(_QUIET):
        engine.preload()
        return True
    return is_preloaded


def freeze() -> None:
    """Exclude all current objects from later garbage collections.

    They stay until the process ends, and one full collection over an engine's modules takes longer than a cycle.
    """
    gc.collect()
    gc.freeze()


class _Inbox:
    """Receives and decodes the messages of a socket, and gives some of them to the engine in each turn of its loop.

    Their order stays. A request that is aborted while it waits here never reaches the engine; it gets a last delta.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._decode = msgspec.msgpack.Decoder(Inbound).decode
        self._messages: deque[Inbound] = deque()
        self._waiting: set[str] = set()  # requests among the messages that were not aborted
        self._aborted: list[TokenDelta] = []

    def stays_empty(self, seconds: float) -> bool:
        """Whether no message arrives within `seconds`. Returns at once when a message arrives."""
        return not self._messages and not self._socket.poll(round(1000 * seconds))

    def take(self, *, wait: bool) -> list[Inbound]:
        """The next messages, at most _GIVEN. With `wait`, block until one has arrived."""
        block = wait and not self._messages
        for _ in range(_READ):
            if not block and not self._socket.poll(0):
                break
            self._keep(self._decode(self._socket.recv()))
            block = False
        taken: list[Inbound] = []
        while self._messages and len(taken) < _GIVEN:
            message = self._messages.popleft()
            if isinstance(message, Request):
                if message.request_id not in self._waiting:
                    continue  # it was aborted
                self._waiting.remove(message.request_id)
            taken.append(message)
        return taken

    def _keep(self, message: Inbound) -> None:
        if isinstance(message, Abort) and message.request_id in self._waiting:
            self._waiting.remove(message.request_id)
            self._aborted.append(
                TokenDelta(request_id=message.request_id, token_ids=[], finish_reason=FinishReason.ABORT)
            )
            return
        if isinstance(message, Request):
            self._waiting.add(message.request_id)
        self._messages.append(message)

    def take_aborted(self) -> list[TokenDelta]:
        """The last deltas of the requests that were aborted here since the last call."""
        aborted, self._aborted = self._aborted, []
        return aborted


class _Outbox:
    """Encodes and sends the messages of a socket. A cycle's message may be sent while the next cycle runs."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._encode = msgspec.msgpack.Encoder().encode
        self._kept: Deltas | None = None

    def send(self, message: Outbound) -> None:
        self._socket.send(self._encode(message))

    def keep(self, message: Deltas) -> None:
        """Send it later. At most one message is kept."""
        self._kept = message

    def send_kept(self) -> None:
        message, self._kept = self._kept, None
        if message is not None:
            self.send(message)


def child_main(
    build: Callable[[], EngineProtocol], inbound_address: str, outbound_address: str, report: Connection, logs: LogStyle
) -> None:
    """Entry point of the engine process. If the engine cannot be built, `report` gets the reason in one line.

    This process ignores SIGINT and SIGTERM: the parent handles them. It exits when the parent exits, for any reason.
    """
    _set_up_child(Path(inbound_address.removeprefix("ipc://")).parent, logs)
    with _reporting_lost_ranks(report):
        run_engine(lambda: _build_or_report(build, report), inbound_address, outbound_address)


def follower_main(build: Callable[[], Any], directory: Path, report: Connection, logs: LogStyle) -> None:
    """Entry point of a rank above 0, which runs a `worker.follower.Follower`: see `child_main`.

    `directory` is the supervisor's, for all processes.
    """
    _set_up_child(directory, logs)
    with _reporting_lost_ranks(report):
        _build_or_report(build, report).run()


@contextmanager
def _reporting_lost_ranks(report: Connection) -> Iterator[None]:
    """If another rank has ended, end without a traceback: the supervisor names that rank, or else the reason here."""
    try:
        yield
    except ConnectionError as error:
        report.send(_one_line(str(error)))
        sys.exit(FAILURE_STATUS)


def _set_up_child(directory: Path, logs: LogStyle) -> None:
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(directory,), name="exit-with-parent", daemon=True).start()
    configure_logging(logs)
    from tqdm import tqdm  # imported here because the API process also imports this module and needs no tqdm

    # By default tqdm locks between processes, with a semaphore that stays behind when an engine is killed.
    tqdm.set_lock(threading.RLock())


def _build_or_report(build: Callable[[], Built], report: Connection) -> Built:
    try:
        return build()
    except ConnectionError:
        raise
    except (ValueError, OSError) as error:  # errors that the user can fix: a path, a checkpoint, a size
        logger.debug("the engine cannot be built", exc_info=True)
        report.send(_one_line(str(error) or type(error).__name__))
        sys.exit(CONFIGURATION_STATUS)
    except Exception as error:
        logger.exception("the engine cannot be built")
        report.send(_one_line(f"{type(error).__name__}: {error}"))
        sys.exit(FAILURE_STATUS)


def _exit_with_parent(directory: Path) -> None:
    """Exit when the parent has exited. Remove its directory with the sockets, because a killed parent cannot do it."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(0)


def _one_line(text: str) -> str:
    return " ".join(text.split())
