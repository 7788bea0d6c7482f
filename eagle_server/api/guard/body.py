"""Reads a request's body, with limits on its size and on the time it takes to arrive. Long bodies use threads."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import TypeVar

from starlette.requests import Request

from eagle_server.api.connection import while_connected
from eagle_server.api.errors import ApiError, as_api_error, bad_request, unavailable
from eagle_server.api.guard.admission import admission_of
from eagle_server.api.guard.content_coding import Decoder, decoder_of
from eagle_server.api.guard.rate_limits import current_client
from eagle_server.api.schemas.base import Body, JsonSize, TooManyValues, parse
from eagle_server.api.schemas.generation import SamplingBody
from eagle_server.api.service import service_of
from eagle_server.api.telemetry.request_record import began, waited
from eagle_server.client.client import GenerationTimeout, QueueFull

B = TypeVar("B", bound=Body)
T = TypeVar("T")

MAX_BODY_BYTES = 16 * 2**20
MAX_HELD_BYTES = 512 * 2**20  # of all bodies together; short ones are always read
BODY_SECONDS = 60.0
# Bytes. Requests are prepared in lanes by their body's size, one after the other in each. In one lane a prompt of 6 kB
# waited 8 to 9 s for 60 prompts of 250 kB.
SHORT_BODY = 4096  # a shorter body is processed faster than a thread starts
MEDIUM_BODY = 2**14
LARGE_BODY = 2**18
MAX_LARGE = 16  # requests in the lane of larger ones
IDLE_SECONDS = 1.0  # the idle time of that lane before its memory is given back
MAX_TEXTS_WAITING = 64  # long ones for /tokenize and /detokenize; the engine's queue does not count them

# One thread: parsing holds the interpreter lock, up to 50 ms at a time, and several threads would add up.
_PARSER = ThreadPoolExecutor(1, "parse")
_DECODER = ThreadPoolExecutor(1, "decode")
# Threads of their own, so that no kind of request waits for another's long texts.
_PREPARER = ThreadPoolExecutor(1, "prepare")
_MEDIUM_PREPARER = ThreadPoolExecutor(1, "prepare-medium")
_LARGE_PREPARER = ThreadPoolExecutor(1, "prepare-large")
_TEXTS = ThreadPoolExecutor(1, "texts")
_texts_waiting = _large = 0
_held_bytes = 0  # of bodies that are not parsed yet


async def read_body(schema: type[B], request: Request) -> B:
    """The parsed and validated body.

    Raises:
        ApiError: the body is too large, too slow or invalid, its coding is unknown, or the server is shutting down or
            holds too many bodies.
    """
    global _held_bytes
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
            _held_bytes += len(decoded) - len(body)
            body = decoded
            _check_held(len(body))
        if len(body) <= SHORT_BODY:
            return parse(schema, bytes(body))
        return await while_connected(request.receive, _on_thread(_PARSER, partial(parse, schema, bytes(body))))
    finally:
        _held_bytes -= len(body)


async def _read(request: Request, body: bytearray, size: JsonSize | None) -> None:
    """Append the request's body to `body`, and count it in `_held_bytes`, even if reading fails."""
    global _held_bytes
    try:
        async with admission_of(request).body_time(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                _held_bytes += len(chunk)
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


def _check_held(size: int) -> None:
    """Raise ApiError if all bodies together are too large for one of this size."""
    if size > SHORT_BODY and _held_bytes > MAX_HELD_BYTES:
        raise unavailable("too many large bodies arrive at the same time; try again")


def _too_many(error: TooManyValues) -> ApiError:
    return bad_request(f"the body has {error}", code="too_many_values")


async def process(request: Request, body: SamplingBody, function: Callable[[], T]) -> T:
    """The result of `function`, which prepares generation: called in place for a short body, else on a thread.

    A request that waits for a thread counts as waiting. It is dropped if its client leaves or the server stops.

    Raises:
        QueueFull: the queue has no places for its sequences.
        ApiError: status 429, too many large requests wait, or 503, the server is shutting down.
        GenerationTimeout: the request's timeout is over.
        ClientDisconnect: the client has left.
    """
    global _held_bytes, _large
    service, admission, is_large = service_of(request), admission_of(request), body.size > LARGE_BODY
    places = service.client.prepare(current_client.get(), body.sequences, began())
    if body.size <= SHORT_BODY:
        with places:
            return function()
    if is_large and _large >= MAX_LARGE:
        raise as_api_error(QueueFull(f"{_large} large requests are being prepared already"))
    seconds = service.timeout_of(body.timeout)

    def begin() -> T:
        if admission.is_draining:
            raise unavailable("the server is shutting down")
        return function()

    _held_bytes, _large = _held_bytes + body.size, _large + is_large
    try:
        async with asyncio.timeout(None if seconds is None else seconds - waited()):
            with places:
                return await while_connected(request.receive, _on_thread(_lane(body.size), begin))
    except TimeoutError:
        assert seconds is not None
        raise GenerationTimeout(seconds) from None
    finally:
        _held_bytes, _large = _held_bytes - body.size, _large - is_large
        if is_large:
            asyncio.get_running_loop().call_later(IDLE_SECONDS, _give_memory_back)


def _lane(size: int) -> ThreadPoolExecutor:
    """Prepares requests with bodies of this size."""
    if size <= MEDIUM_BODY:
        return _PREPARER
    return _MEDIUM_PREPARER if size <= LARGE_BODY else _LARGE_PREPARER


def _give_memory_back() -> None:
    """Return free memory to the system. A prompt of 4 MB takes 300 MB for a moment, and glibc would keep them."""
    if not _large:
        with suppress(AttributeError):  # other C libraries
            _LARGE_PREPARER.submit(ctypes.CDLL(None).malloc_trim, 0)


async def process_text(body: Body, function: Callable[[], T]) -> T:
    """As `process`, for requests that do not generate.

    Raises:
        ApiError: status 429, too many such requests wait.
    """
    global _texts_waiting
    if body.size <= SHORT_BODY:
        return function()
    if _texts_waiting >= MAX_TEXTS_WAITING:
        raise as_api_error(QueueFull(f"{_texts_waiting} long texts wait to be tokenized or detokenized already"))
    _texts_waiting += 1
    try:
        return await _on_thread(_TEXTS, function)
    finally:
        _texts_waiting -= 1


async def _on_thread(pool: ThreadPoolExecutor, function: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, function)


def _too_large() -> ApiError:
    message = f"the body is larger than {MAX_BODY_BYTES} bytes"
    return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="body_too_large")
