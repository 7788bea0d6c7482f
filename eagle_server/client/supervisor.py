"""Starts the engine process, watches it, and restarts it when it dies or hangs."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import shutil
import signal
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import zmq
import zmq.asyncio

from eagle_server.client.client import EngineClient
from eagle_server.engine.logs import LogStyle
from eagle_server.engine.process import CONFIGURATION_STATUS, EngineProtocol, Rank, child_main, follower_main
from eagle_server.request import Deltas, Flushed, Inbound, Outbound, Ready

logger = logging.getLogger(__name__)

HANG_SECONDS = 30.0  # a server that was told to stop waits no longer for an engine that says nothing


class EngineFailed(Exception):
    """The engine could not be started, died or hangs. The message is one line.

    `is_configuration`: the user can fix the cause, such as a wrong path.
    """

    def __init__(self, message: str, *, is_configuration: bool, is_hang: bool = False) -> None:
        super().__init__(message)
        self.is_configuration = is_configuration
        self.is_hang = is_hang


@dataclass(frozen=True)
class Backoff:
    """Seconds to wait before each restart. They double. After `healthy` seconds of running they are `first` again."""

    first: float = 0.5
    limit: float = 30.0
    healthy: float = 60.0

    def delay(self, failures: int) -> float:
        return float(min(self.limit, self.first * 2 ** min(failures, 32)))


class Supervisor:
    """Keeps an engine process running and the client attached to it."""

    def __init__(
        self,
        build: Callable[..., EngineProtocol],
        client: EngineClient,
        *,
        ranks: int = 1,
        logs: LogStyle | None = None,
        backoff: Backoff | None = None,
        watchdog: float = 300.0,
    ) -> None:
        """`watchdog`: an engine that owes a message and sends none for this many seconds counts as hung, and is killed.

        `ranks`: the processes of the engine; more than one are built by `build(rank)`. If one dies, all are killed.
        """
        self._build, self._ranks = build, ranks
        self._client = client
        self._logs = logs or LogStyle()
        self._backoff = backoff or Backoff()
        self._watchdog = watchdog
        self._heard = self._is_draining = False
        self._process: EngineProcess | None = None
        self._attached_at: float | None = None  # time spent loading does not count as running

    async def run(self) -> NoReturn:
        """Run until cancelled. Cancelling kills the engine.

        Raises:
            EngineFailed: the first start failed, or the engine ended while it was draining. Other failures lead to a
                restart.
        """
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            self._attached_at = None
            reason = await self._live()
            if self._client.ready is None or self._is_draining:
                raise reason
            lived = 0.0 if self._attached_at is None else loop.time() - self._attached_at
            failures = 0 if lived > self._backoff.healthy else failures + 1
            delay = self._backoff.delay(failures - 1) if failures else 0.0
            ended = "hung" if reason.is_hang else "died"
            logger.error("the engine %s: %s; starting it again in %.1f s", ended, reason, delay)
            await asyncio.sleep(delay)

    def drain(self) -> None:
        """The engine has its last requests: if it ends, it is not started again, and it may hang for less time."""
        self._is_draining = True

    def kill(self) -> None:
        """Kill the engine process at once."""
        if self._process is not None:
            self._process.kill()

    async def _live(self) -> EngineFailed:
        """Run one engine process until it ends; return why it ended."""
        try:
            process = self._process = EngineProcess(self._build, self._logs, self._ranks)
        except OSError as error:
            tempfile.tempdir = None  # the next attempt looks for a directory again
            return EngineFailed(f"its process cannot be started ({error})", is_configuration=True)
        pump = asyncio.create_task(self._pump(process))
        ends = [asyncio.create_task(process.death()), asyncio.create_task(self._silence())]
        reason = "the engine died"
        try:
            done, _ = await asyncio.wait({pump, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
            failure = next(end for end in ends if end in done).result()
            reason = "the engine hung" if failure.is_hang else reason
            return failure
        finally:
            self._process = None
            self._client.detach(reason)
            process.kill()
            for task in (pump, *ends):
                task.cancel()
            await asyncio.gather(pump, *ends, return_exceptions=True)
            process.close()

    async def _silence(self) -> EngineFailed:
        """Wait until the engine has owed a message and sent none for `watchdog` seconds, or HANG_SECONDS if draining.

        Time is counted in short sleeps, so that a suspended machine does not look like a hang.
        """
        silent, tick = 0.0, min(1.0, self._watchdog / 10)
        while silent < (most := min(self._watchdog, HANG_SECONDS) if self._is_draining else self._watchdog):
            await asyncio.sleep(tick)
            silent = 0.0 if self._heard or not self._client.is_waiting else silent + tick
            self._heard = False
        message = f"it was sent work and said nothing for {most:g} seconds (--watchdog-timeout)"
        return EngineFailed(message, is_configuration=False, is_hang=True)

    async def _pump(self, process: EngineProcess) -> NoReturn:
        while True:
            message = await process.receive()
            self._heard = True
            match message:
                case Ready() as ready:
                    process.connect()
                    self._client.attach(process.send, ready)
                    self._attached_at = asyncio.get_running_loop().time()
                    logger.debug("the engine is ready (process %d)", process.pid)
                case Deltas() as deltas:
                    self._client.dispatch(deltas)
                case Flushed() as flushed:
                    self._client.flushed(flushed)
            await asyncio.sleep(0)  # other tasks must run during a burst of messages


class EngineProcess:
    """One engine process and its other ranks, and two sockets to it in a private directory."""

    def __init__(self, build: Callable[..., EngineProtocol], logs: LogStyle, ranks: int = 1) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="eagle_server-"))
        inbound, outbound = (f"ipc://{self._directory / name}" for name in ("inbound", "outbound"))
        self._context = zmq.Context()
        self._sender = self._context.socket(zmq.PUSH)  # sending appends to an unbounded queue and never blocks
        self._receiver = zmq.asyncio.Socket(self._context, zmq.PULL)
        self._sender.set_hwm(0)
        self._receiver.set_hwm(0)
        self._inbound = inbound
        self._receiver.bind(outbound)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode: Callable[[bytes], Outbound] = msgspec.msgpack.Decoder(Outbound).decode
        if ranks > 1:
            meeting = str(self._directory / "rendezvous")
            build, *others = (partial(build, Rank(number, ranks, meeting)) for number in range(ranks))
        else:
            others = []
        self._children = [_Child(0, child_main, build, inbound, outbound, logs=logs)]
        self._children += [
            _Child(number, follower_main, follower, self._directory, logs=logs)
            for number, follower in enumerate(others, 1)
        ]

    @property
    def pid(self) -> int:
        return self._children[0].pid

    def connect(self) -> None:
        """Connect the sending socket. The engine listens once it is ready."""
        self._sender.connect(self._inbound)

    def send(self, message: Inbound) -> None:
        self._sender.send(self._encode(message), zmq.NOBLOCK)

    async def receive(self) -> Outbound:
        return self._decode(await self._receiver.recv())

    async def death(self) -> EngineFailed:
        """Wait until one of the processes ends; return the reason that it reported."""
        deaths = [asyncio.create_task(child.death()) for child in self._children]
        try:
            await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
            return next(death.result() for death in deaths if death.done())
        finally:
            for death in deaths:
                death.cancel()
            await asyncio.gather(*deaths, return_exceptions=True)

    def kill(self) -> None:
        for child in self._children:
            child.process.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        """Release all resources after the process has ended."""
        for child in self._children:
            child.close()
        self._sender.close(linger=0)
        self._receiver.close(linger=0)
        self._context.term()


class _Child:
    """A process, and the pipe on which it reports why it cannot be built. Messages name a `rank` above 0."""

    def __init__(self, rank: int, main: Callable[..., None], *arguments: Any, logs: LogStyle) -> None:
        self._prefix = f"rank {rank}: " if rank else ""
        spawn = multiprocessing.get_context("spawn")
        self._report, report = spawn.Pipe(duplex=False)
        name = f"rank {rank}" if rank else "engine"
        self.process = spawn.Process(target=main, args=(*arguments, report, logs), name=name)
        # The child inherits the mask. A Ctrl-C at the terminal reaches the child too, but only the parent handles it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            report.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    async def death(self) -> EngineFailed:
        """Wait until the process ends; return the reason that it reported."""
        loop = asyncio.get_running_loop()
        died = asyncio.Event()
        loop.add_reader(self.process.sentinel, died.set)
        try:
            await died.wait()
        finally:
            loop.remove_reader(self.process.sentinel)
        while (status := self.process.exitcode) is None:  # its files are closed, and the status follows soon
            await asyncio.sleep(0.001)
        message = f"{self._prefix}exit status {status}"
        with suppress(EOFError):
            if self._report.poll():
                message = self._report.recv()
        return EngineFailed(message, is_configuration=status == CONFIGURATION_STATUS)

    def close(self) -> None:
        self.process.join()
        self.process.close()
        self._report.close()
