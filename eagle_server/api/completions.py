"""POST /v1/completions: prompts from the body, and responses in OpenAI's legacy shape with vLLM's metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import cast

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType
from starlette.routing import Route

from eagle_server.api.body import process, read_body
from eagle_server.api.errors import ApiError, bad_request
from eagle_server.api.generate import GenerationHandler
from eagle_server.api.prepare import prepare
from eagle_server.api.prompts import check_token_ids, encode, token_limit
from eagle_server.api.request_id import request_id_of
from eagle_server.api.request_state import OutputDelta, Prompt, ScoredToken
from eagle_server.api.response_parts import Metrics, PromptLogprobs, TreeBody, Usage, encoded, finite
from eagle_server.api.schemas.completion import CompletionRequest
from eagle_server.api.service import Service, service_of
from eagle_server.api.sse import DONE, event
from eagle_server.request import Ready


class Logprobs(msgspec.Struct):
    """One entry per token. `text_offset` counts characters from the start of the choice's text."""

    tokens: list[str] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = msgspec.field(default_factory=list)
    text_offset: list[int] = msgspec.field(default_factory=list)

    def extend(self, other: Logprobs) -> None:
        for name in self.__struct_fields__:
            getattr(self, name).extend(getattr(other, name))


class ChoiceBody(msgspec.Struct):
    """A whole choice, or in a stream a part of one."""

    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    trees: list[TreeBody] | UnsetType = UNSET


class CompletionBody(msgspec.Struct, kw_only=True):
    """A response, or a chunk of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[ChoiceBody]
    usage: Usage | None | UnsetType = UNSET
    metrics: Metrics | UnsetType = UNSET


async def create_completion(request: Request) -> Response:
    body = await read_body(CompletionRequest, request)
    service = service_of(request)
    ready = service.ready_for(body.model)
    response_id = f"cmpl-{request_id_of(request)}"
    handler = await process(request, body, body.timeout, lambda: completion_handler(body, service, ready, response_id))
    return await handler.respond(
        request,
        build_logprobs=_logprobs,
        build_response=build_response,
        build_events=build_events,
        build_end=build_end,
    )


# A Starlette route: the handler reads the body itself, and FastAPI's parsing would only add latency.
router = APIRouter(routes=[Route("/v1/completions", create_completion, methods=["POST"])])


def completion_handler(body: CompletionRequest, service: Service, ready: Ready, response_id: str) -> GenerationHandler:
    """The generation of prompts' continuations; see `prepare`."""
    return prepare(body, service, ready, response_id, partial(_prompts, body, service, ready))


def _prompts(body: CompletionRequest, service: Service, ready: Ready) -> list[Prompt]:
    """The prompts in tokens.

    Raises:
        ApiError: a prompt is empty or too long, or has a token outside the vocabulary.
    """
    tokenizer = service.spelling.tokenizer
    prompts, limit = [], token_limit(body, ready)
    for source in body.prompts:
        if isinstance(source, str):
            token_ids, text = encode(source, tokenizer, limit, "prompt", special=True), source
        else:
            check_token_ids("prompt", source, ready.vocab_size)
            token_ids, text = source, tokenizer.decode(source) if body.echo else ""
        if not token_ids:
            raise bad_request("the prompt is empty: it has no tokens", "prompt", "invalid_value")
        prompts.append(Prompt(token_ids, text if body.echo else None))
    return prompts


def build_response(handler: GenerationHandler, outputs: Sequence[OutputDelta]) -> CompletionBody:
    choices = [_choice(handler, output, cast(Logprobs | None, output.logprobs)) for output in outputs]
    for number, choice in enumerate(choices):
        choice.prompt_logprobs = handler.prompt_logprobs(handler.states[choice.index])
        choice.prompt_token_ids = handler.prompt_token_ids(choice.index)
        choice.index = number  # `best_of` has more sequences than choices
    return _body(handler, choices, handler.usage, handler.metrics)


def build_events(handler: GenerationHandler, output: OutputDelta) -> bytes:
    choice = _choice(handler, output, _logprobs(handler, output.tokens))
    if output.is_first:
        choice.prompt_token_ids = handler.prompt_token_ids(output.index)
    return event(_body(handler, [choice], handler.chunk_usage))


def build_end(handler: GenerationHandler, error: ApiError | None) -> bytes:
    """The error, or the usage if the request asks for it; then [DONE]."""
    if error is not None:
        return event(error.body) + DONE
    usage = event(_body(handler, [], handler.usage, handler.metrics)) if handler.include_usage else b""
    return usage + DONE


def _body(
    handler: GenerationHandler,
    choices: list[ChoiceBody],
    usage: Usage | None | UnsetType,
    metrics: Metrics | UnsetType = UNSET,
) -> CompletionBody:
    return CompletionBody(
        id=handler.id, created=handler.created, model=handler.model, choices=choices, usage=usage, metrics=metrics
    )


def _choice(handler: GenerationHandler, output: OutputDelta, logprobs: Logprobs | None) -> ChoiceBody:
    choice = ChoiceBody(output.index, output.text, logprobs, output.finish_reason, trees=handler.trees(output))
    choice.token_ids = handler.token_ids(output)
    return choice


def _logprobs(handler: GenerationHandler, tokens: Iterable[ScoredToken]) -> Logprobs | None:
    """None unless the request asks for them.

    `top_logprobs` holds the alternatives and the token itself, so it may have one entry more than was asked for."""
    spell, count = handler.spell, handler.body.num_logprobs
    if count is None:
        return None
    logprobs = Logprobs()
    for token in tokens:
        logprobs.tokens.append(spell(token.token_id))
        logprobs.text_offset.append(token.offset)
        if token.logprob is None:
            logprobs.token_logprobs.append(None)
            logprobs.top_logprobs.append(None)
            continue
        top: dict[str, float] = {}
        for token_id, value in (*token.top[:count], (token.token_id, token.logprob)):
            top.setdefault(spell(token_id), finite(value))
        logprobs.token_logprobs.append(finite(token.logprob))
        logprobs.top_logprobs.append(encoded(top))
    return logprobs
