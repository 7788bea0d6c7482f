"""Requests in flight together, as whoever waits for them sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from eagle_server.request import Request, TokenDelta

# Per request. Deltas pile up only where a client does not read its stream; at 100 cycles a second this is ten seconds,
# after what the system's own buffers hold.
MAX_UNREAD_DELTAS = 1024


class EngineUnavailable(Exception):
    """There is no engine to ask: it is starting, or it died with this request in flight."""


class GenerationTimeout(Exception):
    """The time that the requests had is over."""


class SlowReader(Exception):
    """Deltas were not taken as fast as they came."""


class Engine(Protocol):
    """What a generation asks of the client."""

    def enter(self, requests: Sequence[Request], generation: Generation) -> None: ...

    def complete(self, request_id: str, kept: int) -> None: ...

    def leave(self, requests: Sequence[Request]) -> None: ...


class Generation:
    """Iterate for the deltas until all requests have ended; leaving the block aborts the rest.

    Leaving never waits, so that it is safe in a task that is being cancelled. Iterating raises what ended them early:
    EngineUnavailable, GenerationTimeout or SlowReader, after the deltas that came before.
    """

    def __init__(self, client: Engine, requests: Sequence[Request], timeout: float | None) -> None:
        self._client = client
        self._requests = requests
        self._timeout = timeout
        self._running = len(requests)
        self._inbox: asyncio.Queue[TokenDelta | Exception] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._client.enter(self._requests, self)
        if self._timeout is not None:
            self._timer = asyncio.get_running_loop().call_later(self._timeout, self._expire, self._timeout)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenDelta:
        if self._running == 0:
            raise StopAsyncIteration
        item = await self._inbox.get()
        if isinstance(item, Exception):
            raise item
        if item.finish_reason is not None:
            self._running -= 1
        return item

    def put(self, delta: TokenDelta) -> None:
        if self._inbox.qsize() >= MAX_UNREAD_DELTAS * len(self._requests):
            self._leave()
            self.fail(SlowReader("the stream was not read as fast as it was generated"))
        else:
            self._inbox.put_nowait(delta)

    def fail(self, error: Exception) -> None:
        self._inbox.put_nowait(error)

    def complete(self, request_id: str, kept: int) -> None:
        """The first `kept` tokens of one of the requests are its answer: end it; its last delta still comes."""
        self._client.complete(request_id, kept)

    def _expire(self, seconds: float) -> None:
        self._leave()  # now: whoever should read the error may be stuck with a client that does not read
        self.fail(GenerationTimeout(f"the request took longer than its timeout of {seconds:g} seconds"))

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._client.leave(self._requests)
