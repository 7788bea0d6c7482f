"""Generation, the same for all endpoints: from an HTTP request to its response, in one piece or as events."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, TypeVar
from uuid import uuid4

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from eagle_server.api.connection import EventStream, cancelled, while_connected
from eagle_server.api.errors import ApiError, as_api_error, is_expected
from eagle_server.api.generation.endpoint import Answer, Endpoint
from eagle_server.api.generation.prepare import Prepared
from eagle_server.api.generation.request_state import OutputDelta
from eagle_server.api.generation.response_parts import check_scores, scores_of
from eagle_server.api.guard.admission import admission_of
from eagle_server.api.guard.body import process, read_body
from eagle_server.api.guard.rate_limits import current_client, current_limits
from eagle_server.api.schemas.generation import SamplingBody
from eagle_server.api.service import service_of
from eagle_server.api.telemetry.access import request_id_of
from eagle_server.api.telemetry.answer_rows import AnswerRow, RowRecorder
from eagle_server.api.telemetry.request_record import began, current_request, waited

logger = logging.getLogger(__name__)

LONG_DELTA = 256  # tokens; spelling their scores takes more than a millisecond


B = TypeVar("B", bound=SamplingBody)


def generating_route(endpoint: Endpoint[Any]) -> Route:
    """A Starlette route: it reads the body itself, and FastAPI's parsing would only add latency."""

    async def answer(request: Request) -> Response:
        body, prepare = await checked(endpoint, request)
        admission_of(request).hold_connection(request.scope)
        prepared = await process(request, body, prepare)
        return await respond(endpoint.answer(body, prepared, service_of(request)), request)

    return Route(endpoint.path, answer, methods=["POST"])


async def checked(endpoint: Endpoint[B], request: Request) -> tuple[B, Callable[[], Prepared]]:
    """The body of a request, and the function that prepares it.

    Raises:
        ApiError: the body is wrong, or asks for another model.
        EngineUnavailable: there is no engine.
    """
    body = await read_body(endpoint.schema, request)
    service = service_of(request)
    ready = service.ready_for(body.model)
    response_id = f"{endpoint.id_prefix}{request_id_of(request)}"
    return body, lambda: endpoint.prepare(body, service, ready, response_id)


async def respond(answer: Answer[Any], request: Request) -> Response:
    """Generate, and respond with one JSON object or with a stream of server-sent events.

    Generation is aborted when the client disconnects.

    Raises:
        ApiError: the engine refused the request or failed before the first event.
    """
    if not answer.body.stream:
        content = await while_connected(request.receive, _whole(answer))
        return Response(content, media_type="application/json")
    keep_alive = answer.service.keep_alive
    events = _events(answer)
    first = asyncio.ensure_future(anext(events))
    try:
        await while_connected(request.receive, asyncio.wait({first}, timeout=keep_alive))
        if first.done():
            first.result()  # an error here still sets the HTTP status
    except BaseException:
        await cancelled(first)
        await events.aclose()
        raise
    return EventStream(first, events, lambda error: answer.end(_expected(error)), keep_alive)


def _expected(error: Exception) -> ApiError:
    """The error that ends a stream. Log and metrics get its status, not the 200 that was sent. A bug is logged."""
    if not is_expected(error):
        logger.error("a stream failed", exc_info=error)
    shown = as_api_error(error)
    if (record := current_request.get()) is not None:
        record.status = shown.status
    return shown


async def _whole(answer: Answer[Any]) -> bytes:
    """The encoded response in one piece."""
    outputs, scores = [OutputDelta(state.index) for state in answer.states], Counter[str]()
    async with aclosing(_outputs(answer)) as deltas:
        async for delta in deltas:
            prompt = len(answer.states[delta.index].prompt_logprobs)
            scores.update(scores_of(answer.body, len(delta.tokens), prompt, len(delta.trees)))
            check_scores(answer.body, scores)
            if len(delta.tokens) + prompt > LONG_DELTA:
                await asyncio.to_thread(answer.keep, delta)
            else:
                answer.keep(delta)
            outputs[delta.index].extend(delta)
    return msgspec.json.encode(answer.response(answer.prepared.best(outputs)))


async def _events(answer: Answer[Any]) -> AsyncGenerator[tuple[bytes, bool], None]:
    """Encoded events, and whether more will follow.

    An error before the first event is raised. A later one ends the stream with an error event.
    """
    started, unfinished, last = False, len(answer.states), b""
    try:
        async with aclosing(_outputs(answer)) as outputs:
            async for output in outputs:
                if output.is_empty:
                    continue
                data = answer.events(output)
                unfinished -= output.finish_reason is not None
                if not unfinished:
                    last = data  # sent together with the end of the stream
                elif data:
                    yield data, True
                    started = True
        last += answer.end(None)
    except Exception as error:
        if not started:
            raise
        last = answer.end(_expected(error))
    yield last, False


async def _outputs(answer: Answer[Any]) -> AsyncGenerator[OutputDelta, None]:
    """Submit the requests and process their deltas until all have ended."""
    body, service = answer.body, answer.service
    states = {state.request.request_id: state for state in answer.states}
    client, limits = current_client.get(), current_limits.get()
    recorder = _recorder(answer)
    rows = {} if recorder is None else _rows(answer)
    requests = [replace(state.request, client=client, began=began()) for state in answer.states]
    prompt_tokens = answer.usage.prompt_tokens
    limits.check_prompt(prompt_tokens, body.prompt_param)
    timeout = service.timeout_of(body.timeout)
    with service.client.submit(requests, timeout=timeout, waited=waited(), on_tokens=limits.use_tokens) as generation:
        limits.use_tokens(prompt_tokens)
        async for delta in generation:
            state = states[delta.request_id]
            if not delta.token_ids:
                state.raise_if_failed(delta)
            was_stopped, counted = state.is_stopped, state.completion_tokens
            if delta.prompt_logprobs:  # thousands of entries would block the event loop
                output = await asyncio.to_thread(state.process, delta)
            else:
                output = state.process(delta)
            if (row := rows.get(delta.request_id)) is not None:
                row.answer_ids += delta.token_ids[: state.completion_tokens - counted]
                row.finish_reason = output.finish_reason
            if state.is_stopped and not was_stopped:
                generation.complete(delta.request_id, state.completion_tokens)
            yield output
            # The tokens before the failure are sent first, as in plain decoding.
            state.raise_if_failed(delta)
    if recorder is not None:
        recorder.record([*rows.values()])


def _recorder(answer: Answer[Any]) -> RowRecorder | None:
    """Who records the answer. None: nobody does. Requests that score a prompt are not recorded."""
    recorder, body, record = answer.service.recorder, answer.body, current_request.get()
    if recorder is None or body.store is False or body.echoes or body.prompt_logprobs is not None:
        return None
    return recorder if recorder.takes("" if record is None else record.key) else None


def _rows(answer: Answer[Any]) -> dict[str, AnswerRow]:
    """A row for each sequence, without its answer, by the id of its engine request."""
    name = uuid4().hex  # a client may send the same x-request-id twice
    return {state.request.request_id: AnswerRow(name, state.index, state.prompt.token_ids) for state in answer.states}
