"""POST /v1/chat/completions: a conversation as a prompt, and responses in OpenAI's shape with vLLM's metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from eagle_server.api.connection import event
from eagle_server.api.generation.endpoint import ChunkedAnswer, Endpoint
from eagle_server.api.generation.prepare import Prepared, prepare_chat
from eagle_server.api.generation.request_state import OutputDelta, ScoredToken
from eagle_server.api.generation.response_parts import (
    Encoded,
    Metrics,
    PromptLogprobs,
    TreeBody,
    Usage,
    encoded,
    finite,
)
from eagle_server.api.schemas.chat import ChatRequest
from eagle_server.api.service import Service
from eagle_server.text.tools.parser import ToolCallDelta

ROLE = "assistant"


class ChatToken(msgspec.Struct):
    """`bytes` are the token's own bytes, which may be only a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(ChatToken):
    top_logprobs: list[ChatToken]


class ChatLogprobs(msgspec.Struct):
    """One entry per token."""

    content: list[Encoded[ChatLogprob]]
    refusal: None = None


class CalledFunction(msgspec.Struct):
    """`arguments` is a JSON object as text, in a stream a part of this text."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call that the model made."""

    id: str
    type: str = "function"
    function: CalledFunction


class ToolCallChunk(msgspec.Struct, kw_only=True):
    """The new part of a tool call. Its first chunk has the id and the name."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: CalledFunction


class ChatMessage(msgspec.Struct, kw_only=True):
    """`content` is null where there are only tool calls. `reasoning_content` is there if the model has thought."""

    role: str = ROLE
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | UnsetType = UNSET
    trees: list[Encoded[TreeBody]] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatBody(msgspec.Struct, kw_only=True):
    """A response."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: Metrics | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Delta(msgspec.Struct):
    """The new part of a message. A choice's first delta has the role."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallChunk] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType = UNSET
    trees: list[Encoded[TreeBody]] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChunkBody(msgspec.Struct, kw_only=True):
    """A chunk of a stream."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None | UnsetType = UNSET
    metrics: Metrics | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(ChunkedAnswer[ChatRequest, ChunkBody]):
    """The answers to a conversation."""

    chunk_type = ChunkBody

    def __init__(self, asked: ChatRequest, prepared: Prepared, service: Service) -> None:
        super().__init__(asked, prepared, service)
        self._logprobs: list[list[Encoded[ChatLogprob]]] = [[] for _ in self.states]

    def keep(self, delta: OutputDelta) -> None:
        self._logprobs[delta.index] += self._scored(delta.tokens)
        super().keep(delta)

    def response(self, outputs: Sequence[OutputDelta]) -> ChatBody:
        return ChatBody(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[
                ChatChoice(
                    output.index,
                    _message(output),
                    self._shown(self._logprobs[output.index]),
                    output.finish_reason,
                    self.stop_reason(output),
                    self.trees(output),
                    self.token_ids(output),
                )
                for output in outputs
            ],
            usage=self.usage,
            metrics=self.metrics,
            prompt_logprobs=self.prompt_logprobs(0),  # all choices share the one prompt
            prompt_token_ids=self.prompt_token_ids(0),
        )

    def events(self, output: OutputDelta) -> bytes:
        """The role once per choice, then content, then the finish reason, each in a chunk of its own."""
        choices = []
        if output.is_first:
            choices.append(ChunkChoice(output.index, Delta(role=ROLE, content="")))
        delta = _delta(output)
        token_ids = self.token_ids(output)
        if delta is not None or output.tokens or output.trees or token_ids:
            logprobs = self._shown([*self._scored(output.tokens)])
            delta = delta or Delta(content="")
            choices.append(ChunkChoice(output.index, delta, logprobs, trees=self.trees(output), token_ids=token_ids))
        if output.finish_reason is not None:
            stop_reason = self.stop_reason(output)
            choices.append(
                ChunkChoice(output.index, Delta(), finish_reason=output.finish_reason, stop_reason=stop_reason)
            )
        chunks = [self._chunk([choice], self.chunk_usage) for choice in choices]
        if output.is_first:
            chunks[0].prompt_token_ids = self.prompt_token_ids(output.index)
        return b"".join(map(event, chunks))

    def _scored(self, tokens: Sequence[ScoredToken]) -> Iterator[msgspec.Raw]:
        """The log-probabilities of tokens, if the request asks for them."""
        count = self.body.num_logprobs
        for token in () if count is None else tokens:
            assert token.logprob is not None  # only a prompt's first token has none, and chats do not echo
            chosen = self._token(token.token_id, token.logprob)
            top = [self._token(token_id, logprob) for token_id, logprob in token.top[:count]]
            yield encoded(ChatLogprob(chosen.token, chosen.logprob, chosen.bytes, top))

    def _token(self, token_id: int, logprob: float) -> ChatToken:
        return ChatToken(self.spell(token_id), finite(logprob), list(self.service.spelling.raw(token_id)))

    def _shown(self, scores: list[Encoded[ChatLogprob]]) -> ChatLogprobs | None:
        return None if self.body.num_logprobs is None else ChatLogprobs(scores)


CHAT_COMPLETIONS = Endpoint("/v1/chat/completions", ChatRequest, "chatcmpl-", prepare_chat, ChatAnswer)


def tool_calls_of(output: OutputDelta) -> list[ToolCall]:
    """All calls, as in a stream. The arguments of a broken one are as the model wrote them."""
    return [
        ToolCall(id=call.id, function=CalledFunction(call.name, call.arguments))
        for call in output.tool_calls
        if call.id is not None and call.name is not None
    ]


def _message(output: OutputDelta) -> ChatMessage:
    calls, thinking = tool_calls_of(output), output.reasoning or UNSET
    if not calls:
        return ChatMessage(content=output.text, reasoning_content=thinking)
    return ChatMessage(content=output.text or None, reasoning_content=thinking, tool_calls=calls)


def _delta(output: OutputDelta) -> Delta | None:
    """The thinking, the text and the tool calls of an output, None if it has none of them."""
    calls = [_tool_call_chunk(call) for call in output.tool_calls if call.id is not None or call.arguments]
    if not (output.text or output.reasoning or calls):
        return None
    return Delta(content=output.text or UNSET, reasoning_content=output.reasoning or UNSET, tool_calls=calls or UNSET)


def _tool_call_chunk(call: ToolCallDelta) -> ToolCallChunk:
    if call.id is None or call.name is None:
        return ToolCallChunk(index=call.index, function=CalledFunction(arguments=call.arguments))
    function = CalledFunction(call.name, call.arguments)
    return ToolCallChunk(index=call.index, id=call.id, type="function", function=function)
