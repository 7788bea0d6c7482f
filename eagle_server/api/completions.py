"""One call of /v1/completions: from a checked body to engine requests, and from their deltas to answers."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus

import msgspec

from eagle_server.api.choice import Choice, Piece, Prompt
from eagle_server.api.errors import ApiError, as_api_error, bad_request
from eagle_server.api.responses import ChoiceBody, CompletionBody, Logprobs, Metrics, SpeculativeMetrics, Usage
from eagle_server.api.schemas import CompletionRequest
from eagle_server.api.service import Service
from eagle_server.api.sse import DONE, event
from eagle_server.engine.client import EngineUnavailable
from eagle_server.request import Ready, Request, SamplingParams

logger = logging.getLogger(__name__)

MAX_SEQUENCES = 1024
GREEDY_BELOW = 1e-5  # a temperature this low only divides by nearly zero
CHARACTERS_PER_PIECE = 4  # normalizers may compose characters, so a token may stand for a few more than it has


class Completion:
    """A call in flight."""

    def __init__(self, body: CompletionRequest, service: Service, choices: list[Choice], prompts: list[Prompt]) -> None:
        self._body = body
        self._service = service
        self._choices = choices
        self._prompts = prompts
        self._id = choices[0].request.request_id.rpartition("-")[0]
        self._created = int(time.time())

    @classmethod
    async def prepare(cls, body: CompletionRequest, service: Service) -> Completion:
        """Check the body against what is served and turn it into requests.

        Raises:
            ApiError: the request cannot be served.
            EngineUnavailable: there is no engine.
        """
        if body.model not in (None, service.model_name):
            message = f"the model {body.model!r} does not exist; this server has {service.model_name!r}"
            raise ApiError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")
        ready = service.client.ready
        if ready is None or not service.client.is_available:
            raise EngineUnavailable("the engine is not running")
        sources = body.prompts
        if not 1 <= len(sources) * body.n <= MAX_SEQUENCES:
            raise bad_request(f"prompt: from 1 to {MAX_SEQUENCES} sequences in one request, prompts times n", "prompt")
        _check_token_ids("stop_token_ids", body.stop_token_ids, ready.vocab_size)
        # Long prompts take long, and the tokenizer releases the interpreter lock.
        prompts = await asyncio.to_thread(_resolve_prompts, body, service, ready)
        sampling = _sampling(body)
        end_token_ids = frozenset((*body.stop_token_ids, *(() if body.ignore_eos else ready.eos_token_ids)))
        name = f"cmpl-{uuid.uuid4().hex}"
        choices = [
            Choice(
                index,
                Request(
                    request_id=f"{name}-{index}",
                    prompt_token_ids=prompts[index // body.n].token_ids,
                    sampling=sampling,
                    # Without a seed nothing is to be repeated: equal prompts of one call get their own noise too.
                    choice=index if body.seed is None else index % body.n,
                    prompt_logprobs=body.echo and body.logprobs is not None,
                ),
                prompts[index // body.n],
                service.spelling,
                body.stops,
                end_token_ids,
                echo=body.echo,
            )
            for index in range(len(prompts) * body.n)
        ]
        return cls(body, service, choices, prompts)

    async def answer(self) -> bytes:
        """The whole answer as one JSON body."""
        bodies = [ChoiceBody(choice.index, "", self._logprobs(Logprobs())) for choice in self._choices]
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                body = bodies[piece.index]
                body.text += piece.text
                body.finish_reason = piece.finish_reason
                if body.logprobs is not None:
                    body.logprobs.extend(piece.logprobs)
        return msgspec.json.encode(self._body_of(bodies, self._usage(), self._metrics()))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events. An error before the first event is raised, a later one is an event."""
        started = False
        try:
            async with aclosing(self._pieces()) as pieces:
                async for piece in pieces:
                    if not piece.is_empty:
                        yield self._event(piece)
                        started = True
            options = self._body.stream_options
            if options is not None and options.include_usage:
                yield event(self._body_of([], self._usage(), self._metrics()))
        except Exception as error:
            if not started:
                raise
            if not isinstance(error, ApiError | EngineUnavailable):
                logger.exception("a stream failed")
            yield event(as_api_error(error).body)
        yield DONE

    async def _pieces(self) -> AsyncGenerator[Piece, None]:
        choices = {choice.request.request_id: choice for choice in self._choices}
        with self._service.client.submit([choice.request for choice in self._choices]) as generation:
            async for delta in generation:
                choice = choices[delta.request_id]
                was_stopped = choice.is_stopped
                if delta.prompt_logprobs:  # thousands of entries are not for the event loop
                    piece = await asyncio.to_thread(choice.advance, delta)
                else:
                    piece = choice.advance(delta)
                if choice.is_stopped and not was_stopped:
                    generation.complete(delta.request_id, choice.completion_tokens)
                yield piece

    def _event(self, piece: Piece) -> bytes:
        options = self._body.stream_options
        usage: Usage | None | msgspec.UnsetType = msgspec.UNSET
        if options is not None and options.continuous_usage_stats:
            usage = self._usage()
        elif options is not None and options.include_usage:
            usage = None
        body = ChoiceBody(piece.index, piece.text, self._logprobs(piece.logprobs), piece.finish_reason)
        return event(self._body_of([body], usage))

    def _body_of(
        self,
        choices: list[ChoiceBody],
        usage: Usage | None | msgspec.UnsetType,
        metrics: Metrics | msgspec.UnsetType = msgspec.UNSET,
    ) -> CompletionBody:
        return CompletionBody(
            id=self._id,
            created=self._created,
            model=self._service.model_name,
            choices=choices,
            usage=usage,
            metrics=metrics,
        )

    def _logprobs(self, logprobs: Logprobs) -> Logprobs | None:
        return None if self._body.logprobs is None else logprobs

    def _usage(self) -> Usage:
        first_choices = self._choices[:: self._body.n]  # the others share the first one's prompt
        return Usage.of(
            prompt=sum(len(prompt.token_ids) for prompt in self._prompts),
            completion=sum(choice.completion_tokens for choice in self._choices),
            cached=sum(choice.cached_tokens for choice in first_choices),
        )

    def _metrics(self) -> Metrics | msgspec.UnsetType:
        if len(self._choices) > 1:
            return msgspec.UNSET
        return Metrics(SpeculativeMetrics.of(self._choices[0].spec))


def _sampling(body: CompletionRequest) -> SamplingParams:
    return SamplingParams(
        max_tokens=body.max_tokens,
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        min_tokens=body.min_tokens,
        temperature=0.0 if body.temperature < GREEDY_BELOW else body.temperature,
        top_p=body.top_p,
        top_k=max(body.top_k, 0),
        ignore_eos=body.ignore_eos,
        stop_token_ids=tuple(body.stop_token_ids),
        logprobs=body.logprobs,
    )


def _resolve_prompts(body: CompletionRequest, service: Service, ready: Ready) -> list[Prompt]:
    limit = ready.max_request_tokens
    return [_resolve(source, body, service, ready.vocab_size, limit) for source in body.prompts]


def _resolve(source: str | list[int], body: CompletionRequest, service: Service, vocab_size: int, limit: int) -> Prompt:
    tokenizer = service.spelling.tokenizer
    if isinstance(source, str):
        most = limit * tokenizer.longest_piece * CHARACTERS_PER_PIECE
        if len(source) > most:
            message = f"the prompt has {len(source)} characters; {limit} tokens never stand for more than {most}"
            raise bad_request(message, "prompt", "context_length_exceeded")
        prompt = Prompt(tokenizer.encode(source), source)
    else:
        _check_token_ids("prompt", source, vocab_size)
        prompt = Prompt(source, tokenizer.decode(source) if body.echo else "")
    tokens = len(prompt.token_ids)
    if tokens == 0:
        raise bad_request("the prompt is empty: it has no tokens", "prompt", "invalid_value")
    if tokens + body.max_tokens > limit:
        message = (
            f"this model's maximum context length is {limit} tokens, however you requested "
            f"{tokens + body.max_tokens} tokens ({tokens} in your prompt; {body.max_tokens} for the completion); "
            f"reduce the prompt or max_tokens"
        )
        raise bad_request(message, "prompt" if tokens >= limit else "max_tokens", "context_length_exceeded")
    return prompt


def _check_token_ids(name: str, token_ids: list[int], vocab_size: int) -> None:
    wrong = next((token for token in token_ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise bad_request(f"{name}: token id {wrong} is outside the vocabulary of {vocab_size}", name, "invalid_value")
