"""The API's side of the engine: requests out, each request's deltas back to whoever waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Self

from eagle_server.engine.observer import Observer, Unobserved
from eagle_server.request import Abort, Deltas, EngineStats, Inbound, Ready, Request, TokenDelta

Send = Callable[[Inbound], None]


class EngineUnavailable(Exception):
    """There is no engine to ask: it is starting, or it died with this request in flight."""


class EngineClient:
    """Talks to the current engine process, if there is one; the supervisor attaches and detaches it.

    `ready` says what is served; it outlives the process, since the next one will serve the same.
    """

    def __init__(self) -> None:
        self._observer: Observer = Unobserved()
        self.ready: Ready | None = None
        self.stats: EngineStats | None = None
        self._send: Send | None = None
        self._attached = asyncio.Event()
        self._waiting: dict[str, Generation] = {}

    @property
    def is_available(self) -> bool:
        return self._send is not None

    def observe(self, observer: Observer) -> None:
        """Tell `observer` everything from now on, and at once of an engine that is up."""
        self._observer = observer
        if self.ready is not None and self.is_available:
            observer.attached(self.ready)

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
        waiting, self._waiting = self._waiting, {}
        for generation in dict.fromkeys(waiting.values()):
            generation.fail(EngineUnavailable(reason))

    def dispatch(self, message: Deltas) -> None:
        """Hand out what a cycle produced. Deltas that nobody waits for belong to aborted requests."""
        self.stats = message.stats
        self._observer.dispatched(message)
        for delta in message.deltas:
            generation = self._waiting.get(delta.request_id)
            if generation is not None:
                generation.put(delta)
                if delta.finish_reason is not None:
                    del self._waiting[delta.request_id]

    def submit(self, requests: Sequence[Request]) -> Generation:
        """Requests to be generated together; nothing is sent before the `with` block is entered."""
        return Generation(self, requests)

    async def generate(self, request: Request) -> AsyncIterator[TokenDelta]:
        """The deltas of one request. Close the iterator early and the request is aborted.

        Raises:
            EngineUnavailable: no engine is running, or it died.
        """
        with self.submit([request]) as generation:
            async for delta in generation:
                yield delta

    def enter(self, requests: Sequence[Request], generation: Generation) -> None:
        if self._send is None:
            raise EngineUnavailable("the engine is not running")
        for request in requests:
            self._waiting[request.request_id] = generation
            self._send(request)
        self._observer.submitted(requests)

    def complete(self, request_id: str, kept: int) -> None:
        """The first `kept` tokens of a request are its answer: end it, if it still runs; its last delta follows."""
        self._observer.completed(request_id, kept)
        self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        if self._send is not None and request_id in self._waiting:
            self._send(Abort(request_id))

    def leave(self, requests: Sequence[Request]) -> None:
        """Nobody waits for these any more: abort those that still run."""
        for request in requests:
            self._abort(request.request_id)
            self._waiting.pop(request.request_id, None)
        self._observer.left(requests)


class Generation:
    """Requests in flight together. Iterate for their deltas until all have ended; leaving the block aborts the rest.

    Leaving never waits, so that it is safe in a task that is being cancelled.
    """

    def __init__(self, client: EngineClient, requests: Sequence[Request]) -> None:
        self._client = client
        self._requests = requests
        self._running = len(requests)
        self._inbox: asyncio.Queue[TokenDelta | EngineUnavailable] = asyncio.Queue()

    def __enter__(self) -> Self:
        self._client.enter(self._requests, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.leave(self._requests)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenDelta:
        if self._running == 0:
            raise StopAsyncIteration
        item = await self._inbox.get()
        if isinstance(item, EngineUnavailable):
            raise item
        if item.finish_reason is not None:
            self._running -= 1
        return item

    def put(self, delta: TokenDelta) -> None:
        self._inbox.put_nowait(delta)

    def fail(self, error: EngineUnavailable) -> None:
        self._inbox.put_nowait(error)

    def complete(self, request_id: str, kept: int) -> None:
        """The first `kept` tokens of one of the requests are all that is wanted: end it; its last delta still comes."""
        self._client.complete(request_id, kept)
