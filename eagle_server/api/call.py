"""One call that generates: requests to the engine, deltas back, answers or events to the client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from eagle_server.api.choice import Choice, Piece
from eagle_server.api.errors import as_api_error, is_expected
from eagle_server.api.pacing import paced
from eagle_server.api.responses import Metrics, SpeculativeMetrics, Usage
from eagle_server.api.schemas.generation import StreamOptions
from eagle_server.api.shape import Header, Shape, Totals
from eagle_server.api.sse import DONE, event
from eagle_server.client.client import EngineClient
from eagle_server.request import TokenDelta, TokenLogprob

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Delivery:
    """How a call's answer is sent. `timeout` is in seconds, None for as long as it takes."""

    stream: StreamOptions = StreamOptions()
    pacing: bool = False
    timeout: float | None = None


class Call:
    """A call in flight. Its choices come prompt by prompt, `per_prompt` of each."""

    def __init__(
        self,
        client: EngineClient,
        header: Header,
        shape: Shape,
        choices: Sequence[Choice],
        per_prompt: int,
        delivery: Delivery,
    ) -> None:
        self._client = client
        self._header = header
        self._shape = shape
        self._choices = choices
        self._first_choices = choices[::per_prompt]  # the others share the first one's prompt
        self._delivery = delivery

    async def answer(self) -> bytes:
        """The whole answer as one JSON body."""
        said = [Piece(choice.index) for choice in self._choices]
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                said[piece.index].extend(piece)
        prompt_logprobs = [choice.prompt_logprobs for choice in self._choices]
        # Log-probabilities of a long prompt are much to spell and to encode: not for the event loop.
        if any(prompt_logprobs):
            return await asyncio.to_thread(self._encode, said, prompt_logprobs)
        return self._encode(said, prompt_logprobs)

    def _encode(self, said: list[Piece], prompt_logprobs: list[list[TokenLogprob]]) -> bytes:
        return msgspec.json.encode(self._shape.answer(self._header, said, prompt_logprobs, self._totals()))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events. An error before the first event is raised, a later one is an event."""
        started, unfinished, last = False, len(self._choices), b""
        try:
            async with aclosing(self._pieces()) as pieces:
                async for piece in pieces:
                    if piece.is_empty:
                        continue
                    bodies = self._shape.events(self._header, piece, self._usage_of_event())
                    data = b"".join(map(event, bodies))
                    unfinished -= piece.finish_reason is not None
                    if not unfinished:
                        last = data  # goes with what ends the stream
                    elif data:
                        yield data
                        started = True
            if self._delivery.stream.include_usage:
                last += event(self._shape.closing(self._header, self._totals()))
        except Exception as error:
            if not started:
                raise
            if not is_expected(error):
                logger.exception("a stream failed")
            last = event(as_api_error(error).body)
        yield last + DONE

    async def _pieces(self) -> AsyncGenerator[Piece, None]:
        choices = {choice.request.request_id: choice for choice in self._choices}
        requests = [choice.request for choice in self._choices]
        with self._client.submit(requests, timeout=self._delivery.timeout) as generation:
            deltas: AsyncIterator[TokenDelta] = paced(generation) if self._delivery.pacing else generation
            async for delta in deltas:
                choice = choices[delta.request_id]
                was_stopped = choice.is_stopped
                if delta.prompt_logprobs:  # thousands of entries are not for the event loop
                    piece = await asyncio.to_thread(choice.advance, delta)
                else:
                    piece = choice.advance(delta)
                if choice.is_stopped and not was_stopped:
                    generation.complete(delta.request_id, choice.completion_tokens)
                yield piece

    def _usage_of_event(self) -> Usage | None | msgspec.UnsetType:
        if self._delivery.stream.continuous_usage_stats:
            return self._usage()
        return None if self._delivery.stream.include_usage else msgspec.UNSET

    def _usage(self) -> Usage:
        return Usage.of(
            prompt=sum(len(choice.prompt.token_ids) for choice in self._first_choices),
            completion=sum(choice.completion_tokens for choice in self._choices),
            cached=sum(choice.cached_tokens for choice in self._first_choices),
        )

    def _totals(self) -> Totals:
        single = len(self._choices) == 1
        metrics = Metrics(SpeculativeMetrics.of(self._choices[0].spec)) if single else msgspec.UNSET
        return Totals(self._usage(), metrics)
