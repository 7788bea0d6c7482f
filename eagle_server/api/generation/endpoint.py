"""An endpoint that generates: its path, its body, and the answer to one request.

A request goes forward through four steps:

1. `generating_route` (`generate.py`) checks the body against the endpoint's schema.
2. `Endpoint.prepare` makes tokens, checks limits, and makes one engine request per choice (`prepare.py`).
3. `Endpoint.answer` makes the `Answer`, which writes one response, or events.
4. `respond` (`generate.py`) generates, and sends what the answer writes.

A new endpoint is a schema, a module like `completions.py`, and an entry in GENERATING (`app.py`) and in `openapi.py`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from eagle_server.api.connection import DONE, event
from eagle_server.api.errors import ApiError
from eagle_server.api.generation.prepare import Prepared
from eagle_server.api.generation.request_state import OutputDelta
from eagle_server.api.generation.response_parts import (
    CompletionTokensDetails,
    Encoded,
    Metrics,
    PromptLogprobs,
    SpeculativeMetrics,
    TreeBody,
    Usage,
    encoded,
    prompt_logprobs_of,
    trees_of,
)
from eagle_server.api.schemas.generation import SamplingBody, StreamOptions
from eagle_server.api.service import Service
from eagle_server.request import Ready

B = TypeVar("B", bound=SamplingBody)
C = TypeVar("C", bound=msgspec.Struct)


class Answer(ABC, Generic[B]):
    """Writes the answer to one prepared request. Each endpoint has its own class."""

    def __init__(self, asked: B, prepared: Prepared, service: Service) -> None:
        """`asked`: the client's body."""
        self.asked = asked
        self.prepared = prepared
        self.service = service
        self.body, self.states = prepared.body, prepared.states
        self.id = prepared.response_id
        self.created = int(time.time())
        self.model = service.model_name
        self._trees: list[list[Encoded[TreeBody]]] = [[] for _ in self.states]
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}  # by choice

    # --- Written by each endpoint. ---

    @abstractmethod
    def response(self, outputs: Sequence[OutputDelta]) -> msgspec.Struct:
        """The response in one piece. `outputs` has the whole output of each choice, without the parts in `keep`."""

    @abstractmethod
    def events(self, output: OutputDelta) -> bytes:
        """The events of a stream for one output delta."""

    @abstractmethod
    def end(self, error: ApiError | None) -> bytes:
        """The events that end a stream. `error`: why generation failed."""

    def keep(self, delta: OutputDelta) -> None:
        """Keep scores and trees of a delta for `response`, as JSON: objects take several times the memory.

        An endpoint with log-probabilities first keeps the scores of `delta.tokens`, and then calls this.
        """
        state, count = self.states[delta.index], self.body.prompt_logprobs
        if count is not None and (state.prompt_logprobs or delta.index not in self._prompt_logprobs):
            scores = prompt_logprobs_of(state.prompt_logprobs, count, self.service.spelling)
            self._prompt_logprobs[delta.index] = scores
        self._trees[delta.index] += map(encoded, trees_of(delta.trees, self.service.spelling))
        state.prompt_logprobs, delta.tokens, delta.trees = [], [], []

    # --- Parts that endpoints share. ---

    @property
    def usage(self) -> Usage:
        """Token counts up to now. A prompt counts once, for any number of choices."""
        return Usage.of(
            prompt=sum(len(state.prompt.token_ids) for state in self.prepared.first_states),
            completion=sum(state.completion_tokens for state in self.states),
            cached=sum(state.cached_tokens for state in self.prepared.first_states),
            details=CompletionTokensDetails.of(
                reasoning=sum(state.reasoning_tokens for state in self.states),
                specs=(state.spec for state in self.states),
            ),
        )

    @property
    def metrics(self) -> Metrics | UnsetType:
        """Speculative-decoding metrics. vLLM gives them for a single choice only."""
        return Metrics(SpeculativeMetrics.of(self.states[0].spec)) if len(self.states) == 1 else UNSET

    def trees(self, output: OutputDelta) -> list[Encoded[TreeBody]] | UnsetType:
        """The draft trees of an output, if the request asks for trees."""
        if not self.body.return_trees:
            return UNSET
        return self._trees[output.index] + trees_of(output.trees, self.service.spelling)

    def token_ids(self, output: OutputDelta) -> list[int] | UnsetType:
        """The tokens of an output, if the request asks for them."""
        return output.token_ids if self.body.return_token_ids else UNSET

    def prompt_token_ids(self, index: int) -> list[int] | UnsetType:
        """The tokens of a choice's prompt, if the request asks for them."""
        return self.states[index].prompt.token_ids if self.body.return_token_ids else UNSET

    def prompt_logprobs(self, index: int) -> PromptLogprobs | UnsetType:
        """The scores of a choice's prompt, if the request asks for them."""
        return self._prompt_logprobs.get(index, UNSET)

    def spell(self, token_id: int) -> str:
        """How log-probabilities name a token."""
        return f"token_id:{token_id}" if self.body.return_tokens_as_token_ids else self.service.spelling(token_id)


class ChunkedAnswer(Answer[B], Generic[B, C]):
    """An answer whose stream has chunks of one type, then [DONE], as in OpenAI's older APIs."""

    chunk_type: type[C]

    def end(self, error: ApiError | None) -> bytes:
        """The error, or a chunk with usage and metrics if the request asks for it; then [DONE]."""
        if error is not None:
            return event(error.body) + DONE
        return (event(self._chunk([], self.usage, self.metrics)) if self._options.include_usage else b"") + DONE

    def stop_reason(self, output: OutputDelta) -> str | int | UnsetType:
        """The stop string or stop token of the request that ended an output, as in vLLM."""
        return UNSET if output.stop_reason is None else output.stop_reason

    @property
    def chunk_usage(self) -> Usage | None | UnsetType:
        """The `usage` of the other chunks. As in OpenAI's API it is null if a usage chunk will follow."""
        if self._options.continuous_usage_stats:
            return self.usage
        return None if self._options.include_usage else UNSET

    @cached_property
    def _options(self) -> StreamOptions:
        return self.body.stream_options or StreamOptions()

    def _chunk(
        self, choices: Sequence[object], usage: Usage | None | UnsetType, metrics: Metrics | UnsetType = UNSET
    ) -> C:
        return self.chunk_type(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=usage, metrics=metrics
        )


@dataclass(frozen=True)
class Endpoint(Generic[B]):
    """A path that generates. `id_prefix` begins the ids of its answers.

    `prepare` turns a checked body into engine requests; nothing is submitted yet. It raises ApiError if the body cannot
    be served. `answer` makes the writer of the answer.
    """

    path: str
    schema: type[B]
    id_prefix: str
    prepare: Callable[[B, Service, Ready, str], Prepared]
    answer: Callable[[B, Prepared, Service], Answer[B]]
