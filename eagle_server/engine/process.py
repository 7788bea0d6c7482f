"""The engine process: one loop that takes requests in, runs a cycle and sends out what it produced."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from eagle_server.engine.logs import LogStyle, configure_logging
from eagle_server.request import (
    Abort,
    CycleStats,
    Deltas,
    EngineStats,
    FlushCache,
    Flushed,
    Inbound,
    Ready,
    Request,
    TokenDelta,
)

logger = logging.getLogger(__name__)

CONFIGURATION_STATUS = 2
FAILURE_STATUS = 1
_QUIET = 2.0  # seconds without a message, after which the engine may be slow for a moment


class EngineProtocol(Protocol):
    """What the loop drives."""

    def ready(self) -> Ready: ...

    def preload(self) -> None:
        """Begin to load, on threads, what the engine can do without as long as no request asks for it.

        Called at a quiet moment: Python's imports slow down whatever else the process does.
        """
        ...

    def add(self, request: Request) -> None:
        """Queue a request. A bad one is answered with a delta that ends it, never with an exception."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request; it gets a last delta. An unknown id is ignored."""
        ...

    def has_work(self) -> bool:
        """Whether `step` has something to do or to say."""
        ...

    def step(self) -> list[TokenDelta]:
        """One cycle."""
        ...

    def stats(self) -> EngineStats: ...

    def take_cycle(self) -> CycleStats | None:
        """What the cycle did that was run since the last call."""
        ...

    def flush_cache(self) -> Flushed:
        """Drop the prefix cache, unless there are requests."""
        ...

    def check(self) -> None:
        """Assert that nothing is lost; cheap enough for when the last request has ended."""
        ...


@dataclass(frozen=True)
class EngineFactory:
    """A function that builds an engine, by name: what it imports is imported in the engine process only."""

    module: str
    function: str
    arguments: tuple[Any, ...] = ()

    def __call__(self) -> EngineProtocol:
        engine: EngineProtocol = getattr(importlib.import_module(self.module), self.function)(*self.arguments)
        return engine


def run_engine(build: Callable[[], EngineProtocol], inbound_address: str, outbound_address: str) -> None:
    """Build an engine and serve it for ever: messages in from one socket, one message per cycle out to the other."""
    engine = build()
    freeze()
    with zmq.Context() as context, context.socket(zmq.PULL) as inbound, context.socket(zmq.PUSH) as outbound:
        for socket in (inbound, outbound):
            socket.set_hwm(0)  # the API bounds what is in flight; a cycle never waits for a reader
            socket.linger = 0
        inbound.bind(inbound_address)
        outbound.connect(outbound_address)
        encode = msgspec.msgpack.Encoder().encode
        outbound.send(encode(engine.ready()))
        outbound.send(encode(Deltas([], engine.stats())))
        inbox, quiet = _Inbox(inbound), False
        while True:
            if not quiet and not engine.has_work() and inbox.stays_empty(_QUIET):
                quiet = True
                engine.preload()
            for message in inbox.take(wait=not engine.has_work()):
                match message:
                    case Request():
                        engine.add(message)
                    case Abort():
                        engine.abort(message.request_id)
                    case FlushCache():
                        outbound.send(encode(engine.flush_cache()))
            deltas = engine.step() if engine.has_work() else []
            outbound.send(encode(Deltas(deltas, engine.stats(), engine.take_cycle())))
            if deltas and not engine.has_work():
                engine.check()


def freeze() -> None:
    """What exists now stays: the collector need not go through it again, in some later cycle or request.

    A full collection of an engine's modules takes longer than a cycle.
    """
    gc.collect()
    gc.freeze()


class _Inbox:
    """Decoded messages of a socket."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._decode = msgspec.msgpack.Decoder(Inbound).decode

    def stays_empty(self, seconds: float) -> bool:
        """Whether nothing arrives for so long; returns as soon as something does."""
        return not self._socket.poll(round(1000 * seconds))

    def take(self, *, wait: bool) -> list[Inbound]:
        """Everything that has arrived; if `wait`, at least one message."""
        messages: list[Inbound] = []
        if wait:
            messages.append(self._decode(self._socket.recv()))
        while self._socket.poll(0):
            messages.append(self._decode(self._socket.recv()))
        return messages


def child_main(
    build: Callable[[], EngineProtocol], inbound_address: str, outbound_address: str, report: Connection, logs: LogStyle
) -> None:
    """Entry of the engine process. Why an engine could not be built goes to `report` as one line.

    Signals are the parent's to answer; when the parent is gone, however it went, this process ends too.
    """
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)
    sockets = Path(inbound_address.removeprefix("ipc://")).parent
    threading.Thread(target=_exit_with_parent, args=(sockets,), name="exit-with-parent", daemon=True).start()
    configure_logging(logs)
    from tqdm import tqdm  # not for the API process, which imports this module too

    # Progress bars would lock between processes otherwise, with a semaphore that outlives a killed engine.
    tqdm.set_lock(threading.RLock())
    run_engine(lambda: _build_or_report(build, report), inbound_address, outbound_address)


def _build_or_report(build: Callable[[], EngineProtocol], report: Connection) -> EngineProtocol:
    try:
        return build()
    except (ValueError, OSError) as error:  # the user's to mend: a path, a checkpoint, a size
        logger.debug("the engine cannot be built", exc_info=True)
        report.send(_one_line(str(error) or type(error).__name__))
        sys.exit(CONFIGURATION_STATUS)
    except Exception as error:
        logger.exception("the engine cannot be built")
        report.send(_one_line(f"{type(error).__name__}: {error}"))
        sys.exit(FAILURE_STATUS)


def _exit_with_parent(sockets: Path) -> None:
    """Wait for the parent's end and follow it; it may have had no chance to remove the sockets' directory."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        shutil.rmtree(sockets, ignore_errors=True)
        os._exit(0)


def _one_line(text: str) -> str:
    return " ".join(text.split())
