"""Generation, shared by all endpoints that generate text.

An endpoint is one module (`completions.py`, `chat.py`) and one schema (`schemas/completion.py`, `schemas/chat.py`). Its
route handler parses the body, calls `prepare`, and then `GenerationHandler.respond` with the endpoint's own functions
that build the response and the events of a stream. A new endpoint is therefore two new files. It is registered in
`app.py` (GENERATING) and described in `openapi.py`; nothing changes here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from functools import partial

import msgspec
from fastapi import Request as HttpRequest
from fastapi import Response
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from eagle_server.api.errors import ApiError, as_api_error, is_expected
from eagle_server.api.pacing import paced
from eagle_server.api.rate_limits import current_client, current_limits
from eagle_server.api.request_state import LogprobParts, OutputDelta, RequestState, ScoredToken
from eagle_server.api.response_parts import (
    Metrics,
    PromptLogprobs,
    SpeculativeMetrics,
    TreeBody,
    Usage,
    check_scores,
    encoded,
    prompt_logprobs_of,
    scores_of,
    trees_of,
)
from eagle_server.api.schemas.generation import GenerationBody, StreamOptions
from eagle_server.api.service import Service
from eagle_server.api.sse import EventStream, cancelled, while_connected
from eagle_server.api.telemetry.request_record import waited
from eagle_server.request import TokenDelta

logger = logging.getLogger(__name__)

LONG_DELTA = 256  # tokens; spelling their scores takes more than a millisecond


def _expected(error: Exception) -> ApiError:
    """The error that ends a stream. A bug is logged."""
    if not is_expected(error):
        logger.error("a stream failed", exc_info=error)
    return as_api_error(error)


BuildLogprobs = Callable[["GenerationHandler", Sequence[ScoredToken]], LogprobParts | None]
BuildResponse = Callable[["GenerationHandler", Sequence[OutputDelta]], msgspec.Struct]
BuildEvents = Callable[["GenerationHandler", OutputDelta], bytes]
BuildEnd = Callable[["GenerationHandler", ApiError | None], bytes]


def no_logprobs(_: GenerationHandler, __: Sequence[ScoredToken]) -> None:
    """For an endpoint that shows no log-probabilities."""


class GenerationHandler:
    """One API request: submits its engine requests and turns their deltas into a response or a stream.

    `states` has one entry per sequence, `body.candidates` for each prompt in turn. The endpoint's builder functions get
    the handler, and read from it what every response needs: id, model, usage, metrics.
    """

    def __init__(
        self, service: Service, body: GenerationBody, response_id: str, states: Sequence[RequestState]
    ) -> None:
        self.body = body
        self.id = response_id
        self.created = int(time.time())
        self.model = service.model_name
        self.spelling = service.spelling
        self.states = states
        self._first_states = states[:: body.candidates]  # one per prompt
        self._client = service.client
        self._timeout = service.timeout_of(body.timeout)
        self._keep_alive = service.keep_alive
        self._stream_options = body.stream_options or StreamOptions()

    async def respond(
        self,
        http_request: HttpRequest,
        *,
        build_logprobs: BuildLogprobs,
        build_response: BuildResponse,
        build_events: BuildEvents,
        build_end: BuildEnd,
    ) -> Response:
        """Generate, and respond with one JSON object or with a stream of server-sent events.

        `build_logprobs` builds the log-probabilities of some tokens, None if they were not asked for. `build_response`
        gets the whole output of each choice, with `logprobs` in place of its tokens. `build_events` encodes the events
        of one output delta. `build_end` encodes the events that end a stream; it gets the error if generation failed.
        Generation is aborted when the client disconnects.

        Raises:
            ApiError: the engine refused the request or failed before the first event.
        """
        if not self.body.stream:
            content = await while_connected(http_request.receive, self._response(build_logprobs, build_response))
            return Response(content, media_type="application/json")
        events = self._stream(build_events, build_end)
        first = asyncio.ensure_future(anext(events))
        try:
            await while_connected(http_request.receive, asyncio.wait({first}, timeout=self._keep_alive))
            if first.done():
                first.result()  # an error here still sets the HTTP status
        except BaseException:
            await cancelled(first)
            await events.aclose()
            raise
        return EventStream(first, events, lambda error: build_end(self, _expected(error)), self._keep_alive)

    # --- What the builder functions read. ---

    @property
    def usage(self) -> Usage:
        """Token counts up to now. A prompt counts once, for any number of choices."""
        return Usage.of(
            prompt=sum(len(state.prompt.token_ids) for state in self._first_states),
            completion=sum(state.completion_tokens for state in self.states),
            cached=sum(state.cached_tokens for state in self._first_states),
            reasoning=sum(state.reasoning_tokens for state in self.states),
        )

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that has usage and metrics."""
        return self._stream_options.include_usage

    @property
    def chunk_usage(self) -> Usage | None | UnsetType:
        """The `usage` of the other chunks. As in OpenAI's API it is null if a usage chunk will follow."""
        if self._stream_options.continuous_usage_stats:
            return self.usage
        return None if self.include_usage else UNSET

    @property
    def metrics(self) -> Metrics | UnsetType:
        """Speculative-decoding metrics. vLLM gives them for a single choice only."""
        return Metrics(SpeculativeMetrics.of(self.states[0].spec)) if len(self.states) == 1 else UNSET

    def trees(self, output: OutputDelta) -> list[TreeBody] | UnsetType:
        """The draft trees of an output, if the request asks for trees."""
        return output.encoded_trees + trees_of(output.trees, self.spelling) if self.body.return_trees else UNSET

    def token_ids(self, output: OutputDelta) -> list[int] | UnsetType:
        """The tokens of an output, if the request asks for them."""
        return output.token_ids if self.body.return_token_ids else UNSET

    def prompt_token_ids(self, index: int) -> list[int] | UnsetType:
        """The tokens of a choice's prompt, if the request asks for them."""
        return self.states[index].prompt.token_ids if self.body.return_token_ids else UNSET

    def spell(self, token_id: int) -> str:
        """How log-probabilities name a token."""
        return f"token_id:{token_id}" if self.body.return_tokens_as_token_ids else self.spelling(token_id)

    def prompt_logprobs(self, state: RequestState) -> PromptLogprobs | UnsetType:
        """The scores of a choice's prompt, if the request asks for them."""
        return UNSET if state.prompt_scores is None else state.prompt_scores

    # --- Generation. ---

    async def _response(self, build_logprobs: BuildLogprobs, build: BuildResponse) -> bytes:
        outputs, scores = [OutputDelta(state.index) for state in self.states], Counter[str]()
        async with aclosing(self._outputs()) as deltas:
            async for delta in deltas:
                prompt = len(self.states[delta.index].prompt_logprobs)
                scores.update(scores_of(self.body, len(delta.tokens), prompt, len(delta.trees)))
                check_scores(self.body, scores)
                if len(delta.tokens) + prompt > LONG_DELTA:
                    await asyncio.to_thread(self._encode, delta, build_logprobs)
                else:
                    self._encode(delta, build_logprobs)
                outputs[delta.index].extend(delta)
        return msgspec.json.encode(build(self, self.best(outputs)))

    def best(self, outputs: list[OutputDelta]) -> list[OutputDelta]:
        """The `body.n` most likely outputs of each prompt, by their tokens' mean log-probability, the best first.

        `outputs` has one whole output per state, in order.
        """
        n, candidates = self.body.n, self.body.candidates
        if candidates == n:
            return outputs
        groups = (outputs[first : first + candidates] for first in range(0, len(outputs), candidates))
        rank = partial(sorted, key=lambda output: -self.states[output.index].mean_logprob)
        return [output for group in groups for output in rank(group)[:n]]

    def _encode(self, delta: OutputDelta, build_logprobs: BuildLogprobs) -> None:
        """Encode the scores and trees of a delta, as objects would take several times the memory until the end."""
        state, count = self.states[delta.index], self.body.prompt_logprobs
        if count is not None and (state.prompt_logprobs or state.prompt_scores is None):
            state.prompt_scores = prompt_logprobs_of(state.prompt_logprobs, count, self.spelling)
        state.prompt_logprobs = []
        delta.logprobs, delta.tokens = build_logprobs(self, delta.tokens), []
        delta.encoded_trees, delta.trees = [encoded(tree) for tree in trees_of(delta.trees, self.spelling)], []

    async def _stream(self, build_events: BuildEvents, build_end: BuildEnd) -> AsyncGenerator[tuple[bytes, bool], None]:
        """Encoded events, and whether more will follow.

        An error before the first event is raised. A later one ends the stream with an error event.
        """
        started, unfinished, last = False, len(self.states), b""
        try:
            async with aclosing(self._outputs()) as outputs:
                async for output in outputs:
                    if output.is_empty:
                        continue
                    data = build_events(self, output)
                    unfinished -= output.finish_reason is not None
                    if not unfinished:
                        last = data  # sent together with the end of the stream
                    elif data:
                        yield data, True
                        started = True
            last += build_end(self, None)
        except Exception as error:
            if not started:
                raise
            last = build_end(self, _expected(error))
        yield last, False

    async def _outputs(self) -> AsyncGenerator[OutputDelta, None]:
        """Submit the requests and process their deltas until all have ended."""
        states = {state.request.request_id: state for state in self.states}
        client, limits = current_client.get(), current_limits.get()
        requests = [replace(state.request, client=client) for state in self.states]
        prompt_tokens = self.usage.prompt_tokens
        limits.check_prompt(prompt_tokens, self.body.prompt_param)
        with self._client.submit(
            requests, timeout=self._timeout, waited=waited(), on_tokens=limits.use_tokens
        ) as generation:
            limits.use_tokens(prompt_tokens)
            deltas: AsyncIterator[TokenDelta] = paced(generation) if self.body.stream_pacing else generation
            async for delta in deltas:
                state = states[delta.request_id]
                if not delta.token_ids:
                    state.raise_if_failed(delta)
                was_stopped = state.is_stopped
                if delta.prompt_logprobs:  # thousands of entries would block the event loop
                    output = await asyncio.to_thread(state.process, delta)
                else:
                    output = state.process(delta)
                if state.is_stopped and not was_stopped:
                    generation.complete(delta.request_id, state.completion_tokens)
                yield output
                state.raise_if_failed(delta)  # after the tokens before the failure, which plain decoding sends too
