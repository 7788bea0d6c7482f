"""Reads a request's body, with limits on its size and on the time it takes to arrive. Long bodies use threads."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eagle_server.api.connection import while_connected
from eagle_server.api.errors import ApiError, bad_request, unavailable
from eagle_server.api.guard.admission import admission_of
from eagle_server.api.guard.content_coding import Decoder, decoder_of
from eagle_server.api.guard.rate_limits import current_client
from eagle_server.api.schemas.base import Body, JsonSize, TooManyValues, parse
from eagle_server.api.schemas.generation import SamplingBody
from eagle_server.api.service import service_of
from eagle_server.api.telemetry.request_record import began, waited
from eagle_server.client.client import GenerationTimeout
from eagle_server.machine import usable_memory
from eagle_server.turns import Lane, Shares

B = TypeVar("B", bound=Body)
T = TypeVar("T")

MAX_BODY_BYTES = 16 * 2**20
MAX_HELD_BYTES = min(512 * 2**20, usable_memory() // 8)  # memory of all bodies together; short ones are always read
BODY_SECONDS = 60.0
# Bytes. Requests are prepared in lanes by their body's size, one after the other in each. In one lane a prompt of 6 kB
# waited 8 to 9 s for 60 prompts of 250 kB.
SHORT_BODY = 4096  # a shorter body is processed faster than a thread starts
MEDIUM_BODY = 2**14
LARGE_BODY = 2**18
IDLE_SECONDS = 1.0  # after a larger one, until the memory that it took is given back

# One thread each: parsing holds the interpreter lock, up to 50 ms at a time, and several threads would add up.
_PARSER = Lane(1, "parse")
_DECODER = Lane(1, "decode")
# Threads of their own, so that no kind of request waits for another's long texts; one for each client at most. Long
# texts yield the cores to the engine and the event loop: tokenizing them lets go of the interpreter lock.
_PREPARER = Lane(2, "prepare")
_MEDIUM_PREPARER = Lane(2, "prepare-medium", yields=True)
_LARGE_PREPARER = Lane(2, "prepare-large", yields=True)
_TEXTS = Lane(2, "texts", yields=True)
_held = Shares(1)  # bytes of bodies that arrive, and of those that wait to be prepared
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # None: another C library than glibc
_trim: asyncio.TimerHandle | None = None


async def read_body(schema: type[B], request: Request) -> B:
    """The parsed and validated body.

    Raises:
        ApiError: the body is too large, too slow or invalid, its coding is unknown, or the server is shutting down or
            holds too many bodies.
    """
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:
        raise _too_large()
    body, coding = bytearray(), request.headers.get("content-encoding")
    decoder = None if coding is None else decoder_of(coding)
    try:
        await _read(request, body, None if decoder else JsonSize())
        if decoder is not None:
            decoding = partial(_decoded, decoder, bytes(body))
            decoded = await while_connected(request.receive, _on_thread(_DECODER, decoding))
            _hold(len(decoded) - len(body))
            body = decoded
            _check_held(len(body))
        if len(body) <= SHORT_BODY:
            return parse(schema, bytes(body))
        return await while_connected(request.receive, _on_thread(_PARSER, partial(parse, schema, bytes(body))))
    finally:
        _hold(-len(body))


async def _read(request: Request, body: bytearray, size: JsonSize | None) -> None:
    """Append the request's body to `body`, and count it in `_held`, even if reading fails."""
    try:
        async with admission_of(request).body_time(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                _hold(len(chunk))
                if len(body) > MAX_BODY_BYTES:
                    raise _too_large()
                _check_held(len(body))
                if size is not None:
                    size.add(chunk)
    except TooManyValues as error:
        raise _too_many(error) from None
    except TimeoutError:
        message = f"the body did not come within {BODY_SECONDS:g} seconds"
        raise ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="slow_body") from None


def _decoded(decoder: Decoder, coded: bytes) -> bytearray:
    """The decoded body. A short one may be large: each piece lets other threads run.

    Raises:
        ApiError: it is too large, or not of this coding.
    """
    body, size = bytearray(), JsonSize()
    try:
        for piece in decoder.decode(coded):
            body += piece
            if len(body) > MAX_BODY_BYTES:
                raise _too_large()
            size.add(piece)
        decoder.finish()
    except TooManyValues as error:
        raise _too_many(error) from None
    return body


def _hold(size: int) -> None:
    """Count bytes of the current client's bodies. A negative size counts them as free again."""
    _held.add(current_client.get(), size)


def _check_held(size: int) -> None:
    """Raise ApiError if there is no room for a body of this size, which is counted already.

    A client may hold as much as it leaves free: alone half of all.
    """
    if size > SHORT_BODY and not _held.fit(current_client.get(), 0, MAX_HELD_BYTES):
        raise unavailable("too many large bodies of this client, or of all, are held at the same time; try again")


def _too_many(error: TooManyValues) -> ApiError:
    return bad_request(f"the body has {error}", code="too_many_values")


async def process(request: Request, body: SamplingBody, function: Callable[[], T]) -> T:
    """The result of `function`, which prepares generation: called in place for a short body, else on a thread.

    A request that waits for a thread counts as waiting. It is dropped if its client leaves or the server stops.

    Raises:
        QueueFull: the queue has no places for its sequences.
        ApiError: status 503, the server is shutting down, or holds too many bodies.
        GenerationTimeout: the request's timeout is over.
        ClientDisconnect: the client has left.
    """
    service, admission = service_of(request), admission_of(request)
    places = service.client.prepare(current_client.get(), body.sequences, began())
    if body.size <= SHORT_BODY:
        with places:
            return function()
    seconds = service.timeout_of(body.timeout)

    def begin() -> T:
        if admission.is_draining:
            raise unavailable("the server is shutting down")
        return function()

    try:
        async with asyncio.timeout(None if seconds is None else seconds - waited()):
            with places:
                return await while_connected(request.receive, _held_in(_lane(body.size), body, begin))
    except TimeoutError:
        assert seconds is not None
        raise GenerationTimeout(seconds) from None


def _lane(size: int) -> Lane:
    """Prepares requests with bodies of this size."""
    if size <= MEDIUM_BODY:
        return _PREPARER
    return _MEDIUM_PREPARER if size <= LARGE_BODY else _LARGE_PREPARER


async def process_text(body: Body, function: Callable[[], T]) -> T:
    """As `process`, for requests that do not generate.

    Raises:
        ApiError: status 503, the server holds too many bodies.
    """
    return function() if body.size <= SHORT_BODY else await _held_in(_TEXTS, body, function)


async def _held_in(lane: Lane, body: Body, function: Callable[[], T]) -> T:
    """The result of a function that reads the body, which is held until then."""
    if body.memory > (most := _held.most_alone(MAX_HELD_BYTES)):
        raise _too_large(f"the body's texts take {body.memory} bytes of memory, and this server holds {most} at most")
    _hold(body.memory)
    try:
        _check_held(body.size)
        return await _on_thread(lane, function)
    finally:
        _hold(-body.memory)
        if body.size > LARGE_BODY:
            _give_memory_back(lane)


def _give_memory_back(lane: Lane) -> None:
    """Return free memory to the system when no large body has come for a while.

    Tokenizing takes much for a moment, and glibc would keep it. While bodies come, giving it back for each would stop
    everything that allocates, again and again.
    """
    global _trim
    if _trim is not None:
        _trim.cancel()
    if _malloc_trim is not None:
        _trim = asyncio.get_running_loop().call_later(IDLE_SECONDS, lane.submit, "", partial(_malloc_trim, 0))


async def _on_thread(lane: Lane, function: Callable[[], T]) -> T:
    """The result of a function, on a thread of the lane when it is the current client's turn."""
    return await asyncio.wrap_future(lane.submit(current_client.get(), function))


def _too_large(message: str = f"the body is larger than {MAX_BODY_BYTES} bytes") -> ApiError:
    return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="body_too_large")


class CloseIfAmbiguous:
    """ASGI middleware: ends a connection after an answer if it is ambiguous where the next request begins.

    That is so if the client sent `expect: 100-continue` and the answer did not wait for the body, which may come or
    not, and if the body had both a length and chunks (RFC 9112, section 6.1).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        is_doubled = "content-length" in headers and "transfer-encoding" in headers
        if not is_doubled and headers.get("expect", "").lower() != "100-continue":
            await self._app(scope, receive, send)
            return
        is_read = False

        async def receive_noted() -> Message:
            nonlocal is_read
            is_read = True
            return await receive()

        async def send_closing(message: Message) -> None:
            if message["type"] == "http.response.start" and (is_doubled or not is_read):
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        await self._app(scope, receive_noted, send_closing)
