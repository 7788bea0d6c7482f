"""POST /v1/chat/completions: a conversation as a prompt, and responses in OpenAI's shape with vLLM's metrics."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType
from starlette.routing import Route

from eagle_server.api.answer_format import answer_format
from eagle_server.api.body import process, read_body
from eagle_server.api.errors import ApiError, bad_request
from eagle_server.api.generate import GenerationHandler
from eagle_server.api.prepare import prepare
from eagle_server.api.prompts import encode, render, token_limit
from eagle_server.api.request_id import request_id_of
from eagle_server.api.request_state import OutputDelta, Prompt, ScoredToken
from eagle_server.api.response_parts import Metrics, PromptLogprobs, TreeBody, Usage, encoded, finite
from eagle_server.api.schemas.chat import ChatRequest
from eagle_server.api.schemas.translated import TranslatedBody
from eagle_server.api.service import Service, service_of
from eagle_server.api.sse import DONE, event
from eagle_server.api.tools import tool_use
from eagle_server.request import Ready
from eagle_server.text.tool_parser import ToolCallDelta

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

    content: list[ChatLogprob]
    refusal: None = None

    def extend(self, other: ChatLogprobs) -> None:
        self.content += other.content


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
    trees: list[TreeBody] | UnsetType = UNSET
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
    trees: list[TreeBody] | UnsetType = UNSET
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


async def create_chat_completion(request: Request) -> Response:
    body = await read_body(ChatRequest, request)
    service = service_of(request)
    ready = service.ready_for(body.model)
    response_id = f"chatcmpl-{request_id_of(request)}"
    handler = await process(request, body, body.timeout, lambda: chat_handler(body, service, ready, response_id))
    return await handler.respond(
        request,
        build_logprobs=_logprobs,
        build_response=build_response,
        build_events=build_events,
        build_end=build_end,
    )


# A Starlette route: the handler reads the body itself, and FastAPI's parsing would only add latency.
router = APIRouter(routes=[Route("/v1/chat/completions", create_chat_completion, methods=["POST"])])


def chat_handler(body: ChatRequest, service: Service, ready: Ready, response_id: str) -> GenerationHandler:
    """The generation of a conversation's answer; see `prepare`."""
    template = service.chat_template
    tools, text = tool_use(body, service.call_syntax), render(body.messages, body, template)
    answer = answer_format(body, text, service.reasoning_syntax, tools)
    prompts = partial(_prompts, text, body, service, ready)
    return prepare(body, service, ready, response_id, prompts, template.stops, answer)


def translated_handler(body: TranslatedBody, service: Service, ready: Ready, response_id: str) -> GenerationHandler:
    """The generation of the answer to another API's body."""
    try:
        return chat_handler(body.chat, service, ready, response_id)
    except ApiError as error:
        raise error.renamed(body.renamed) from None


def _prompts(text: str, body: ChatRequest, service: Service, ready: Ready) -> list[Prompt]:
    """The conversation's text in tokens, as a list of one prompt.

    Raises:
        ApiError: it is too long.
    """
    limit, tokenizer = token_limit(body, ready), service.spelling.tokenizer
    token_ids = encode(text, tokenizer, limit, "messages", special=service.chat_template.adds_special)
    if not token_ids:
        raise bad_request("the prompt is empty: it has no tokens", "messages", "invalid_value")
    return [Prompt(token_ids)]


def build_response(handler: GenerationHandler, outputs: Sequence[OutputDelta]) -> ChatBody:
    return ChatBody(
        id=handler.id,
        created=handler.created,
        model=handler.model,
        choices=[
            ChatChoice(
                output.index,
                _message(output),
                cast(ChatLogprobs | None, output.logprobs),
                output.finish_reason,
                handler.trees(output),
                handler.token_ids(output),
            )
            for output in outputs
        ],
        usage=handler.usage,
        metrics=handler.metrics,
        prompt_logprobs=handler.prompt_logprobs(handler.states[0]),  # all choices share the one prompt
        prompt_token_ids=handler.prompt_token_ids(0),
    )


def build_events(handler: GenerationHandler, output: OutputDelta) -> bytes:
    """The role once per choice, then content, then the finish reason, each in a chunk of its own."""
    choices = []
    if output.is_first:
        choices.append(ChunkChoice(output.index, Delta(role=ROLE, content="")))
    delta = _delta(output)
    token_ids = handler.token_ids(output)
    if delta is not None or output.tokens or output.trees or token_ids:
        logprobs = _logprobs(handler, output.tokens)
        delta = delta or Delta(content="")
        choices.append(ChunkChoice(output.index, delta, logprobs, trees=handler.trees(output), token_ids=token_ids))
    if output.finish_reason is not None:
        choices.append(ChunkChoice(output.index, Delta(), finish_reason=output.finish_reason))
    chunks = [_chunk(handler, [choice], handler.chunk_usage) for choice in choices]
    if output.is_first:
        chunks[0].prompt_token_ids = handler.prompt_token_ids(output.index)
    return b"".join(map(event, chunks))


def build_end(handler: GenerationHandler, error: ApiError | None) -> bytes:
    """The error, or the usage if the request asks for it; then [DONE]."""
    if error is not None:
        return event(error.body) + DONE
    usage = event(_chunk(handler, [], handler.usage, handler.metrics)) if handler.include_usage else b""
    return usage + DONE


def _chunk(
    handler: GenerationHandler,
    choices: list[ChunkChoice],
    usage: Usage | None | UnsetType,
    metrics: Metrics | UnsetType = UNSET,
) -> ChunkBody:
    return ChunkBody(
        id=handler.id, created=handler.created, model=handler.model, choices=choices, usage=usage, metrics=metrics
    )


def tool_calls_of(output: OutputDelta) -> list[ToolCall]:
    """Incomplete calls are left out: their text is in the content."""
    return [
        ToolCall(id=call.id, function=CalledFunction(call.name, call.arguments))
        for call in output.tool_calls
        if call.is_complete and call.id is not None and call.name is not None
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


def _logprobs(handler: GenerationHandler, tokens: Sequence[ScoredToken]) -> ChatLogprobs | None:
    count = handler.body.num_logprobs
    if count is None:
        return None

    def spelled(token_id: int, logprob: float) -> ChatToken:
        return ChatToken(handler.spell(token_id), finite(logprob), list(handler.spelling.raw(token_id)))

    content = []
    for token in tokens:
        assert token.logprob is not None  # only a prompt's first token has none, and chats do not echo
        chosen = spelled(token.token_id, token.logprob)
        top = [spelled(token_id, logprob) for token_id, logprob in token.top[:count]]
        content.append(encoded(ChatLogprob(chosen.token, chosen.logprob, chosen.bytes, top)))
    return ChatLogprobs(content)
