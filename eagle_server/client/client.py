"""The API's side of the engine: requests out, each request's deltas back to whoever waits for them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from eagle_server.client.generation import EngineUnavailable, Generation
from eagle_server.client.observer import Observer, Unobserved
from eagle_server.request import Abort, Deltas, EngineStats, FlushCache, Flushed, Inbound, Ready, Request, TokenDelta

Send = Callable[[Inbound], None]


class QueueFull(Exception):
    """As many requests as may wait are waiting."""


class EngineClient:
    """Talks to the current engine process, if there is one; the supervisor attaches and detaches it.

    `ready` says what is served; it outlives the process, since the next one will serve the same. At most `max_waiting`
    requests wait for their first token.
    """

    def __init__(self, max_waiting: int | None = None) -> None:
        self.max_waiting = max_waiting
        self._observer: Observer = Unobserved()
        self.ready: Ready | None = None
        self.stats: EngineStats | None = None
        self._send: Send | None = None
        self._attached = asyncio.Event()
        self._running: dict[str, Generation] = {}
        self._unanswered: set[str] = set()
        self._flushes: deque[asyncio.Future[Flushed]] = deque()

    @property
    def is_available(self) -> bool:
        return self._send is not None

    def observe(self, observer: Observer) -> None:
        """Tell `observer` everything from now on, and at once of an engine that is up."""
        self._observer = observer
        if self.ready is not None and self.is_available:
            observer.attached(self.ready)

    @property
    def is_waiting(self) -> bool:
        """Whether the engine has something to answer."""
        return bool(self._running or self._flushes)

    def has_room(self, count: int = 1) -> bool:
        """Whether so many more requests may wait."""
        return self.max_waiting is None or len(self._unanswered) + count <= self.max_waiting

    async def until_available(self) -> Ready:
        await self._attached.wait()
        assert self.ready is not None
        return self.ready

    def attach(self, send: Send, ready: Ready) -> None:
        """An engine process is up; `send` never blocks."""
        self._send, self.ready = send, ready
        self._observer.attached(ready)
        self._attached.set()

    def detach(self, reason: str) -> None:
        """The engine process is gone: everybody who waits for it gets an error now."""
        self._send = self.stats = None
        self._attached.clear()
        self._observer.detached()
        self._unanswered.clear()
        running, self._running = self._running, {}
        for generation in dict.fromkeys(running.values()):
            generation.fail(EngineUnavailable(reason))
        while self._flushes:
            future = self._flushes.popleft()
            if not future.done():
                future.set_exception(EngineUnavailable(reason))

    def dispatch(self, message: Deltas) -> None:
        """Hand out what a cycle produced. Deltas that nobody waits for belong to aborted requests."""
        self.stats = message.stats
        self._observer.dispatched(message)
        for delta in message.deltas:
            generation = self._running.get(delta.request_id)
            if generation is not None:
                self._unanswered.discard(delta.request_id)
                if delta.finish_reason is not None:
                    del self._running[delta.request_id]
                generation.put(delta)

    def submit(self, requests: Sequence[Request], *, timeout: float | None = None) -> Generation:
        """Requests to be generated together; nothing is sent before the `with` block is entered.

        After `timeout` seconds they are aborted, and iterating raises GenerationTimeout.
        """
        return Generation(self, requests, timeout)

    async def generate(self, request: Request) -> AsyncIterator[TokenDelta]:
        """The deltas of one request. Close the iterator early and the request is aborted.

        Raises:
            EngineUnavailable: no engine is running, or it died.
            QueueFull: too many requests are waiting.
        """
        with self.submit([request]) as generation:
            async for delta in generation:
                yield delta

    async def flush_cache(self) -> Flushed:
        """Drop the engine's prefix cache.

        Raises:
            EngineUnavailable: no engine is running, or it died.
        """
        if self._send is None:
            raise EngineUnavailable("the engine is not running")
        future: asyncio.Future[Flushed] = asyncio.get_running_loop().create_future()
        self._flushes.append(future)
        self._send(FlushCache())
        return await future

    def flushed(self, answer: Flushed) -> None:
        """The oldest flush is answered."""
        future = self._flushes.popleft()
        if not future.done():
            future.set_result(answer)

    def enter(self, requests: Sequence[Request], generation: Generation) -> None:
        if self._send is None:
            raise EngineUnavailable("the engine is not running")
        if not self.has_room(len(requests)):
            raise QueueFull(f"{len(self._unanswered)} requests are waiting, and at most {self.max_waiting} may")
        self._observer.submitted(requests)  # first: once it is told, the engine may take this very core
        for request in requests:
            self._running[request.request_id] = generation
            self._unanswered.add(request.request_id)
            self._send(request)

    def complete(self, request_id: str, kept: int) -> None:
        """The first `kept` tokens of a request are its answer: end it, if it still runs; its last delta follows."""
        self._observer.completed(request_id, kept)
        self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        if self._send is not None and request_id in self._running:
            self._send(Abort(request_id))

    def leave(self, requests: Sequence[Request]) -> None:
        """Nobody waits for these any more: abort those that still run."""
        for request in requests:
            self._abort(request.request_id)
            self._running.pop(request.request_id, None)
            self._unanswered.discard(request.request_id)
        self._observer.left(requests)
