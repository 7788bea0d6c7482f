"""Answers of /v1/completions, in OpenAI's legacy shape with vLLM's metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from eagle_server.api.choice import Piece, Scored
from eagle_server.api.responses import Metrics, PromptLogprobs, Usage, finite, prompt_logprobs_of
from eagle_server.api.shape import Header, Shown, Totals
from eagle_server.api.trees import Tree
from eagle_server.request import TokenLogprob


class Logprobs(msgspec.Struct):
    """One entry per token. `text_offset` counts characters from the start of the choice's text."""

    tokens: list[str] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = msgspec.field(default_factory=list)
    text_offset: list[int] = msgspec.field(default_factory=list)


class ChoiceBody(msgspec.Struct):
    """A choice, or on a stream a piece of one."""

    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    trees: list[Tree] | UnsetType = UNSET


class CompletionBody(msgspec.Struct, kw_only=True):
    """An answer, or an event of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[ChoiceBody]
    usage: Usage | None | UnsetType = UNSET
    metrics: Metrics | UnsetType = UNSET


class TextShape:
    """Completions: text, and what it has been scored with."""

    def __init__(self, shown: Shown) -> None:
        self._shown, self._spelling = shown, shown.spelling

    def answer(
        self, header: Header, choices: Sequence[Piece], prompt_logprobs: Sequence[list[TokenLogprob]], totals: Totals
    ) -> CompletionBody:
        bodies = [self._choice(choice) for choice in choices]
        if self._shown.prompt_logprobs is not None:
            for body, entries in zip(bodies, prompt_logprobs, strict=True):
                body.prompt_logprobs = prompt_logprobs_of(entries, self._shown.prompt_logprobs, self._spelling)
        return _body(header, bodies, totals.usage, totals.metrics)

    def events(self, header: Header, piece: Piece, usage: Usage | None | UnsetType) -> Sequence[CompletionBody]:
        return [_body(header, [self._choice(piece)], usage)]

    def closing(self, header: Header, totals: Totals) -> CompletionBody:
        return _body(header, [], totals.usage, totals.metrics)

    def _choice(self, piece: Piece) -> ChoiceBody:
        logprobs = None if self._shown.logprobs is None else self._logprobs(piece.tokens)
        return ChoiceBody(piece.index, piece.text, logprobs, piece.finish_reason, trees=self._shown.trees(piece))

    def _logprobs(self, tokens: Iterable[Scored]) -> Logprobs:
        """`top_logprobs` holds the alternatives and the token itself, so up to one more than were asked for."""
        logprobs = Logprobs()
        for token in tokens:
            logprobs.tokens.append(self._spelling(token.token_id))
            logprobs.text_offset.append(token.offset)
            if token.logprob is None:
                logprobs.token_logprobs.append(None)
                logprobs.top_logprobs.append(None)
                continue
            top: dict[str, float] = {}
            for token_id, value in (*token.top[: self._shown.logprobs], (token.token_id, token.logprob)):
                top.setdefault(self._spelling(token_id), finite(value))
            logprobs.token_logprobs.append(finite(token.logprob))
            logprobs.top_logprobs.append(top)
        return logprobs


def _body(
    header: Header,
    choices: list[ChoiceBody],
    usage: Usage | None | UnsetType,
    metrics: Metrics | UnsetType = UNSET,
) -> CompletionBody:
    return CompletionBody(
        id=header.id, created=header.created, model=header.model, choices=choices, usage=usage, metrics=metrics
    )
