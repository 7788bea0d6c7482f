"""Answers of /v1/chat/completions, in OpenAI's shape with vLLM's metrics."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from eagle_server.api.choice import Piece, Scored
from eagle_server.api.responses import Metrics, PromptLogprobs, Usage, finite, prompt_logprobs_of
from eagle_server.api.shape import Header, Shown, Totals
from eagle_server.api.trees import Tree
from eagle_server.request import TokenLogprob
from eagle_server.text.tool_parser import CallDelta

ROLE = "assistant"


class ChatToken(msgspec.Struct):
    """A token; `bytes` are those of its text, also where it is only a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(ChatToken):
    top_logprobs: list[ChatToken]


class ChatLogprobs(msgspec.Struct):
    """One entry per token."""

    content: list[ChatLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct):
    """`arguments` is a JSON object as text, in a stream a piece of it."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that the model made."""

    id: str
    type: str = "function"
    function: CalledFunction


class ToolCallChunk(msgspec.Struct, kw_only=True):
    """What a call gained; its first chunk has `id` and name."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: CalledFunction


class ChatMessage(msgspec.Struct, kw_only=True):
    """`content` is null where there is nothing but calls."""

    role: str = ROLE
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    trees: list[Tree] | UnsetType = UNSET


class ChatBody(msgspec.Struct, kw_only=True):
    """An answer."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: Metrics | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Delta(msgspec.Struct):
    """What a message gained; the first of a choice has the role."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallChunk] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    trees: list[Tree] | UnsetType = UNSET


class ChunkBody(msgspec.Struct, kw_only=True):
    """An event of a stream."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None | UnsetType = UNSET
    metrics: Metrics | UnsetType = UNSET


class ChatShape:
    """Chats: a stream gives the role, the content and the reason why it ended apart."""

    def __init__(self, shown: Shown) -> None:
        self._shown, self._spelling = shown, shown.spelling
        self._begun: set[int] = set()

    def answer(
        self, header: Header, choices: Sequence[Piece], prompt_logprobs: Sequence[list[TokenLogprob]], totals: Totals
    ) -> ChatBody:
        scores: PromptLogprobs | UnsetType = UNSET
        if self._shown.prompt_logprobs is not None:  # of the one prompt that all choices share
            scores = prompt_logprobs_of(prompt_logprobs[0], self._shown.prompt_logprobs, self._spelling)
        return ChatBody(
            id=header.id,
            created=header.created,
            model=header.model,
            choices=[
                ChatChoice(
                    each.index,
                    _message(each),
                    self._logprobs(each.tokens),
                    each.finish_reason,
                    self._shown.trees(each),
                )
                for each in choices
            ],
            usage=totals.usage,
            metrics=totals.metrics,
            prompt_logprobs=scores,
        )

    def events(self, header: Header, piece: Piece, usage: Usage | None | UnsetType) -> Sequence[ChunkBody]:
        """The role once, then content, then the reason why it ended, each in an event of its own."""
        choices = []
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            choices.append(ChunkChoice(piece.index, Delta(role=ROLE, content="")))
        gained, logprobs = _delta(piece), self._logprobs(piece.tokens)
        if gained is not None or piece.tokens or piece.trees:
            delta = gained or Delta(content="")
            choices.append(ChunkChoice(piece.index, delta, logprobs, trees=self._shown.trees(piece)))
        if piece.finish_reason is not None:
            choices.append(ChunkChoice(piece.index, Delta(), finish_reason=piece.finish_reason))
        return [_chunk(header, [choice], usage) for choice in choices]

    def closing(self, header: Header, totals: Totals) -> ChunkBody:
        return _chunk(header, [], totals.usage, totals.metrics)

    def _logprobs(self, tokens: Sequence[Scored]) -> ChatLogprobs | None:
        if self._shown.logprobs is None:
            return None
        return ChatLogprobs([self._scored(token) for token in tokens])

    def _scored(self, token: Scored) -> ChatLogprob:
        assert token.logprob is not None  # only a prompt's first token has none, and chats do not echo
        plain = self._token(token.token_id, token.logprob)
        top = [self._token(token_id, logprob) for token_id, logprob in token.top[: self._shown.logprobs]]
        return ChatLogprob(plain.token, plain.logprob, plain.bytes, top)

    def _token(self, token_id: int, logprob: float) -> ChatToken:
        return ChatToken(self._spelling(token_id), finite(logprob), list(self._spelling.raw(token_id)))


def _message(piece: Piece) -> ChatMessage:
    """Calls that broke off are left out: their text is content."""
    calls = [
        ToolCall(id=call.id, function=CalledFunction(call.name, call.arguments))
        for call in piece.calls
        if call.is_complete and call.id is not None and call.name is not None
    ]
    if not calls:
        return ChatMessage(content=piece.text)
    return ChatMessage(content=piece.text or None, tool_calls=calls)


def _delta(piece: Piece) -> Delta | None:
    """The text and the calls of a piece, None if it has neither."""
    calls = [_call_chunk(call) for call in piece.calls if call.id is not None or call.arguments]
    if not (piece.text or calls):
        return None
    return Delta(content=piece.text or UNSET, tool_calls=calls or UNSET)


def _call_chunk(call: CallDelta) -> ToolCallChunk:
    if call.id is None or call.name is None:
        return ToolCallChunk(index=call.index, function=CalledFunction(arguments=call.arguments))
    function = CalledFunction(call.name, call.arguments)
    return ToolCallChunk(index=call.index, id=call.id, type="function", function=function)


def _chunk(
    header: Header,
    choices: list[ChunkChoice],
    usage: Usage | None | UnsetType,
    metrics: Metrics | UnsetType = UNSET,
) -> ChunkBody:
    return ChunkBody(
        id=header.id, created=header.created, model=header.model, choices=choices, usage=usage, metrics=metrics
    )
