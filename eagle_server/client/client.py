"""The API's side of the engine: sends requests, and passes each request's deltas to the task that waits for them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from eagle_server.client.observer import Observer
from eagle_server.request import Abort, Deltas, EngineStats, FlushCache, Flushed, Inbound, Ready, Request, TokenDelta
from eagle_server.turns import Shares

Send = Callable[[Inbound], None]

# Per request. Deltas pile up only if an HTTP client does not read its stream. At 100 cycles a second this is ten
# seconds, in addition to what the operating system buffers.
MAX_UNREAD_DELTAS = 1024


class EngineUnavailable(Exception):
    """There is no engine: it is starting, or it died with this request in flight."""


class QueueFull(Exception):
    """All places of the queue are taken, or all that this client may hold."""


class GenerationTimeout(Exception):
    """The requests took longer than their timeout."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the request took longer than its timeout of {seconds:g} seconds")


class SlowReader(Exception):
    """Deltas were not read as fast as they arrived."""


class EngineClient:
    """Talks to the current engine process, if there is one. The supervisor attaches and detaches it.

    `ready` says what is served. It stays when the process dies, since the next process will serve the same.

    At most `max_waiting` sequences wait to be prepared or for their first token. Each has a place. One whose client
    leaves keeps its place until the engine has answered the abort, because the engine has to read both.
    """

    def __init__(self, max_waiting: int | None = None) -> None:
        self.max_waiting = max_waiting
        self._held = Shares()  # places
        # The most sequences for which an empty queue has places.
        self.most_at_once = None if max_waiting is None else self._held.most_alone(max_waiting)
        self._observer = Observer()
        self.ready: Ready | None = None
        self._stats: EngineStats | None = None
        self._send: Send | None = None
        self._attached = asyncio.Event()
        self._running: dict[str, Generation | None] = {}  # until the last delta; None: no task waits for it any more
        # Sequences that have a place, by request id once they are sent, else by an object: the client, and since when.
        self._places: dict[object, tuple[str, float]] = {}
        self._preparing = 0  # places of sequences that are not sent yet
        self._flushes: deque[asyncio.Future[Flushed]] = deque()
        self._owes_message = False  # whether something was sent after the newest message that arrived

    @property
    def is_available(self) -> bool:
        return self._send is not None

    def observe(self, observer: Observer) -> None:
        """Report all further events to `observer`. If an engine is up, report that at once."""
        self._observer = observer
        if self.ready is not None and self.is_available:
            observer.attached(self.ready)

    @property
    def stats(self) -> EngineStats | None:
        """The engine's newest statistics. What it has not read yet, and what is being prepared, waits here as well.

        Of the sequences that were sent and not answered, the first ones count as running, as many as run.
        """
        if self._stats is None:
            return None
        running, sent = self._stats.running, [place for name, place in self._places.items() if isinstance(name, str)]
        prepared = [place for name, place in self._places.items() if not isinstance(name, str)]
        answered = len(self._running) - len(sent)
        waiting = [*prepared, *sent[max(0, running - answered) :]]
        longest = max((time.monotonic() - since for _, since in waiting), default=0.0)
        return replace(
            self._stats,
            waiting=len(prepared) + max(self._stats.waiting, len(self._running) - running),
            waiting_clients=max(self._stats.waiting_clients, len({client for client, _ in waiting})),
            longest_wait=max(self._stats.longest_wait, longest),
        )

    @property
    def is_waiting(self) -> bool:
        """Whether the engine owes a message.

        It sends one after every message that it receives, an abort included. So it still owes one when the clients of
        all requests have left.
        """
        return self._owes_message or bool(self._running or self._flushes)

    def check_room(self, client: str, count: int = 1) -> None:
        """
        Raises:
            QueueFull: `count` more sequences of this client may not wait now.
        """
        if self.max_waiting is None:
            return
        waiting, held = self._held.total, self._held.held_by(client)
        wanted = f"this request has {count}, at most {self.max_waiting} may wait"
        if waiting + count > self.max_waiting:
            raise QueueFull(f"{waiting} sequences wait, {wanted}")
        if not self._held.fit(client, count, self.max_waiting):
            raise QueueFull(
                f"{held} of {waiting} sequences that wait are this client's, {wanted}, and others need places"
            )

    @contextmanager
    def prepare(self, client: str, count: int, began: float) -> Iterator[None]:
        """A request of `count` sequences waits to be prepared: for the duration of the block they have places.

        It came at `began`, see `Request`.

        Raises:
            QueueFull: see `check_room`.
        """
        count = min(count, self.most_at_once or count)  # preparing refuses more
        self.check_room(client, count)
        places = [object() for _ in range(count)]
        self._preparing += count
        for place in places:
            self._take_place(place, client, began)
        try:
            yield
        finally:
            self._preparing -= count
            for place in places:
                self._free_place(place)

    def _take_place(self, place: object, client: str, since: float) -> None:
        self._places[place] = client, since
        self._held.add(client, 1)

    def _free_place(self, place: object) -> None:
        """Does nothing if it is free."""
        if place in self._places:
            client, _ = self._places.pop(place)
            self._held.add(client, -1)

    async def until_available(self) -> Ready:
        await self._attached.wait()
        assert self.ready is not None
        return self.ready

    def attach(self, send: Send, ready: Ready) -> None:
        """An engine process is up. `send` never blocks."""
        self._send, self.ready = send, ready
        self._observer.attached(ready)
        self._attached.set()

    def detach(self, reason: str) -> None:
        """The engine process is gone: every task that waits for it gets an error now."""
        self._send = self._stats = None
        self._owes_message = False
        self._attached.clear()
        self._observer.detached()
        running, self._running = self._running, {}
        for request_id in running:
            self._free_place(request_id)
        for generation in dict.fromkeys(running.values()):
            if generation is not None:
                generation.fail(EngineUnavailable(reason))
        while self._flushes:
            future = self._flushes.popleft()
            if not future.done():
                future.set_exception(EngineUnavailable(reason))

    def dispatch(self, message: Deltas) -> None:
        """Pass on what a cycle produced. Deltas without a waiting task belong to aborted requests."""
        if message.stats.speculation is None and self._stats is not None:
            message.stats.speculation = self._stats.speculation
        self._stats = message.stats
        self._owes_message = False
        self._observer.dispatched(message)
        for delta in message.deltas:
            generation, is_last = self._running.get(delta.request_id), delta.finish_reason is not None
            if generation is not None or is_last:
                self._free_place(delta.request_id)
            if is_last:
                self._running.pop(delta.request_id, None)
            if generation is not None:
                generation.put(delta)

    def submit(
        self,
        requests: Sequence[Request],
        *,
        timeout: float | None = None,
        waited: float = 0.0,
        on_tokens: Callable[[int], None] | None = None,
    ) -> Generation:
        """Requests of one client to generate together. They are sent when the `with` block is entered.

        After `timeout` seconds, of which `waited` have passed, they are aborted, and iterating raises
        GenerationTimeout. `on_tokens` is called with the number of tokens that a cycle has added to one of them, when
        they arrive.
        """
        return Generation(self, requests, timeout, waited, on_tokens)

    async def generate(self, request: Request) -> AsyncIterator[TokenDelta]:
        """The deltas of one request. Closing the iterator early aborts the request.

        Raises:
            EngineUnavailable: no engine is running, or it died.
            QueueFull: see `check_room`.
        """
        with self.submit([request]) as generation:
            async for delta in generation:
                yield delta

    async def flush_cache(self) -> Flushed:
        """Drop the engine's prefix cache.

        Raises:
            EngineUnavailable: no engine is running, or it died.
        """
        if not self.is_available:
            raise EngineUnavailable("the engine is not running")
        future: asyncio.Future[Flushed] = asyncio.get_running_loop().create_future()
        self._flushes.append(future)
        self._post(FlushCache())
        return await future

    def flushed(self, answer: Flushed) -> None:
        """The engine's answer to the oldest flush."""
        self._owes_message = False
        future = self._flushes.popleft()
        if not future.done():
            future.set_result(answer)

    # --- Called by Generation. ---

    def send_requests(self, requests: Sequence[Request], generation: Generation) -> None:
        """
        Raises:
            EngineUnavailable: no engine is running.
            QueueFull: see `check_room`.
        """
        if not self.is_available:
            raise EngineUnavailable("the engine is not running")
        self.check_room(requests[0].client, len(requests))
        now = time.monotonic()
        self._observer.submitted(requests)  # before sending: the engine may then take this process's core
        for request in requests:
            self._running[request.request_id] = generation
            self._take_place(request.request_id, request.client, request.began or now)
            self._post(request)

    def complete(self, request_id: str, kept: int) -> None:
        """The first `kept` tokens of a request are its answer. Abort it if it still runs; its last delta follows."""
        self._observer.completed(request_id, kept)
        self._abort(request_id)

    def leave(self, requests: Sequence[Request]) -> None:
        """No task waits for these requests any more: abort the ones that still run."""
        for request in requests:
            self._abort(request.request_id)
            if request.request_id in self._running:
                self._running[request.request_id] = None
        self._observer.left(requests)

    def _abort(self, request_id: str) -> None:
        if self._running.get(request_id) is not None:
            self._post(Abort(request_id))

    def _post(self, message: Inbound) -> None:
        if self._send is not None:
            self._send(message)
            self._owes_message = True


class Generation:
    """Requests in flight together. Iterate for their deltas until all have ended. Leaving the block aborts the rest.

    Leaving never waits, so it is safe in a task that is being cancelled. Iterating raises what ended the requests
    early, after the deltas that arrived before: EngineUnavailable, GenerationTimeout or SlowReader.
    """

    def __init__(
        self,
        client: EngineClient,
        requests: Sequence[Request],
        timeout: float | None,
        waited: float = 0.0,
        on_tokens: Callable[[int], None] | None = None,
    ) -> None:
        self._client, self._on_tokens = client, on_tokens
        self._requests = requests
        self._timeout, self._waited = timeout, waited
        self._running = len(requests)
        self._inbox = deque[TokenDelta | Exception]()
        self._arrival: asyncio.Future[None] | None = None  # what the reader waits for
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._client.send_requests(self._requests, self)
        if self._timeout is not None:
            left = max(0.0, self._timeout - self._waited)
            self._timer = asyncio.get_running_loop().call_later(left, self._expire, self._timeout)
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
        while not self._inbox:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        item = self._inbox.popleft()
        if isinstance(item, Exception):
            raise item
        if item.finish_reason is not None:
            self._running -= 1
        return item

    def put(self, delta: TokenDelta) -> None:
        if self._on_tokens is not None:
            self._on_tokens(len(delta.token_ids))
        if len(self._inbox) >= MAX_UNREAD_DELTAS * len(self._requests):
            self._leave()
            self.fail(SlowReader("the stream was not read as fast as it was generated"))
        else:
            self._add(delta)

    def fail(self, error: Exception) -> None:
        self._add(error)

    def _add(self, item: TokenDelta | Exception) -> None:
        self._inbox.append(item)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def complete(self, request_id: str, kept: int) -> None:
        """The first `kept` tokens of a request are its answer. Abort it; its last delta still arrives."""
        self._client.complete(request_id, kept)

    def _expire(self, seconds: float) -> None:
        self._leave()  # at once: the task that reads the error may be blocked by an HTTP client that does not read
        self.fail(GenerationTimeout(seconds))

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._client.leave(self._requests)
