"""POST /v1/completions: prompts from the body, and responses in OpenAI's legacy shape with vLLM's metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from eagle_server.api.connection import event
from eagle_server.api.errors import bad_request
from eagle_server.api.generation.endpoint import ChunkedAnswer, Endpoint
from eagle_server.api.generation.prepare import Prepared, prepare
from eagle_server.api.generation.prompts import check_token_ids, encode
from eagle_server.api.generation.request_state import OutputDelta, Prompt, ScoredToken
from eagle_server.api.generation.response_parts import (
    Encoded,
    Metrics,
    PromptLogprobs,
    TreeBody,
    Usage,
    encoded,
    finite,
)
from eagle_server.api.schemas.completion import CompletionRequest
from eagle_server.api.service import Service
from eagle_server.request import Ready


class Logprobs(msgspec.Struct):
    """One entry per token. `text_offset` counts characters from the start of the choice's text."""

    tokens: list[str] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)
    top_logprobs: list[Encoded[dict[str, float]] | None] = msgspec.field(default_factory=list)
    text_offset: list[int] = msgspec.field(default_factory=list)


class ChoiceBody(msgspec.Struct):
    """A whole choice, or in a stream a part of one."""

    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    trees: list[Encoded[TreeBody]] | UnsetType = UNSET


class CompletionBody(msgspec.Struct, kw_only=True):
    """A response, or a chunk of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[ChoiceBody]
    usage: Usage | None | UnsetType = UNSET
    metrics: Metrics | UnsetType = UNSET


class CompletionAnswer(ChunkedAnswer[CompletionRequest, CompletionBody]):
    """The continuations of a request's prompts."""

    chunk_type = CompletionBody

    def __init__(self, asked: CompletionRequest, prepared: Prepared, service: Service) -> None:
        super().__init__(asked, prepared, service)
        self._logprobs = [Logprobs() for _ in self.states]

    def keep(self, delta: OutputDelta) -> None:
        self._add(delta.tokens, self._logprobs[delta.index])
        super().keep(delta)

    def response(self, outputs: Sequence[OutputDelta]) -> CompletionBody:
        choices = [self._choice(output, self._logprobs[output.index]) for output in outputs]
        for number, choice in enumerate(choices):
            choice.prompt_logprobs = self.prompt_logprobs(choice.index)
            choice.prompt_token_ids = self.prompt_token_ids(choice.index)
            choice.index = number  # `best_of` has more sequences than choices
        return self._chunk(choices, self.usage, self.metrics)

    def events(self, output: OutputDelta) -> bytes:
        logprobs = Logprobs()
        self._add(output.tokens, logprobs)
        choice = self._choice(output, logprobs)
        if output.is_first:
            choice.prompt_token_ids = self.prompt_token_ids(output.index)
        return event(self._chunk([choice], self.chunk_usage))

    def _choice(self, output: OutputDelta, logprobs: Logprobs) -> ChoiceBody:
        shown = None if self.body.num_logprobs is None else logprobs
        choice = ChoiceBody(output.index, output.text, shown, output.finish_reason, self.stop_reason(output))
        choice.trees, choice.token_ids = self.trees(output), self.token_ids(output)
        return choice

    def _add(self, tokens: Iterable[ScoredToken], logprobs: Logprobs) -> None:
        """Append the scores of tokens, if the request asks for them.

        `top_logprobs` gets the alternatives and the token itself, so it may have one entry more than was asked for."""
        count = self.body.num_logprobs
        for token in () if count is None else tokens:
            logprobs.tokens.append(self.spell(token.token_id))
            logprobs.text_offset.append(token.offset)
            if token.logprob is None:
                logprobs.token_logprobs.append(None)
                logprobs.top_logprobs.append(None)
                continue
            top: dict[str, float] = {}
            for token_id, value in (*token.top[:count], (token.token_id, token.logprob)):
                top.setdefault(self.spell(token_id), finite(value))
            logprobs.token_logprobs.append(finite(token.logprob))
            logprobs.top_logprobs.append(encoded(top))


def _prepared(body: CompletionRequest, service: Service, ready: Ready, response_id: str) -> Prepared:
    """
    Raises:
        ApiError: the request cannot be served.
    """
    prompts = _prompts(body, service, ready)
    return prepare(body, service, ready, response_id, prompts, strict=service.strict_max_tokens)


def _prompts(body: CompletionRequest, service: Service, ready: Ready) -> Iterator[Prompt]:
    """The prompts in tokens.

    Raises:
        ApiError: a prompt is empty or too long, or has a token outside the vocabulary.
    """
    tokenizer, limit, last = service.spelling.tokenizer, ready.max_request_tokens, body.truncate_prompt_tokens
    for source in body.prompts:
        if isinstance(source, str):
            token_ids, text = encode(source, tokenizer, limit, "prompt", special=True, last=last), source
        else:
            check_token_ids("prompt", source, ready.vocab_size)
            token_ids, text = source, tokenizer.decode(source) if body.echo else ""
        if not token_ids:
            raise bad_request("the prompt is empty: it has no tokens", "prompt", "invalid_value")
        yield Prompt(token_ids, text if body.echo else None)


COMPLETIONS = Endpoint("/v1/completions", CompletionRequest, "cmpl-", _prepared, CompletionAnswer)
