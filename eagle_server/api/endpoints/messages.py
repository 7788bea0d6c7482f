"""POST /v1/messages: Anthropic's Messages API over the generation of a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from eagle_server.api.connection import event
from eagle_server.api.endpoints.output_items import ItemBegins, ItemChange, ItemEnds, ItemGrows, OutputItem, OutputItems
from eagle_server.api.errors import ApiError
from eagle_server.api.generation.endpoint import Answer, Endpoint
from eagle_server.api.generation.prepare import Prepared, prepare_chat
from eagle_server.api.generation.request_state import OutputDelta
from eagle_server.api.generation.response_parts import Metrics, Usage
from eagle_server.api.schemas.messages import MessagesRequest
from eagle_server.api.service import Service


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """What the model thought before the answer. It is not signed."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """`input` is a JSON object."""

    id: str
    name: str
    input: msgspec.Raw


ContentBlock = ThinkingBlock | TextBlock | ToolUseBlock


class ThinkingTokens(msgspec.Struct):
    thinking_tokens: int


class MessageUsage(msgspec.Struct):
    """`input_tokens` does not include the tokens from the prefix cache, `cache_read_input_tokens`."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens
    cache_creation_input_tokens: int = 0  # counts marks of the request, which have no effect here

    @classmethod
    def of(cls, usage: Usage) -> MessageUsage:
        cached = usage.prompt_tokens_details.cached_tokens
        thinking = ThinkingTokens(usage.completion_tokens_details.reasoning_tokens)
        return cls(usage.prompt_tokens - cached, cached, usage.completion_tokens, thinking)


class MessageBody(msgspec.Struct, kw_only=True):
    """An answer, or in message_start its beginning."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    metrics: Metrics | UnsetType = UNSET


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    message: MessageBody


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: ContentBlock


class AddedText(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class AddedThinking(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class AddedInput(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: AddedThinking | AddedText | AddedInput


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    index: int


class StopReason(msgspec.Struct):
    stop_reason: str | None
    stop_sequence: str | None


class MessageEnd(msgspec.Struct, tag_field="type", tag="message_delta"):
    """How the message ended. The usage is of the whole message."""

    delta: StopReason
    usage: MessageUsage
    metrics: Metrics | UnsetType


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    pass


MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageEnd | MessageStop


class MessageAnswer(Answer[MessagesRequest]):
    """The answer to a conversation as a message with content blocks."""

    def __init__(self, asked: MessagesRequest, prepared: Prepared, service: Service) -> None:
        super().__init__(asked, prepared, service)
        self._items = OutputItems()
        self._has_begun = False

    def response(self, outputs: Sequence[OutputDelta]) -> MessageBody:
        [output] = outputs
        for _ in self._changes(output):
            pass
        stop = self._stop()
        return MessageBody(
            id=self.id,
            model=self.model,
            content=[_block(item, item.content) for item in self._items.items],
            stop_reason=stop.stop_reason,
            stop_sequence=stop.stop_sequence,
            usage=MessageUsage.of(self.usage),
            metrics=self.metrics,
        )

    def events(self, output: OutputDelta) -> bytes:
        return self._begin() + b"".join(_encoded(_event_of(change)) for change in self._changes(output))

    def end(self, error: ApiError | None) -> bytes:
        if error is not None:
            return event(error.anthropic_body, "error")
        end = MessageEnd(self._stop(), MessageUsage.of(self.usage), self.metrics)
        return self._begin() + _encoded(end) + _encoded(MessageStop())

    def _changes(self, output: OutputDelta) -> Iterator[ItemChange]:
        if self.asked.omits_thinking:
            output.reasoning = ""
        return self._items.add(output)

    def _begin(self) -> bytes:
        """The first event, unless it was sent."""
        if self._has_begun:
            return b""
        self._has_begun = True
        message = MessageBody(id=self.id, model=self.model, content=[], usage=MessageUsage.of(self.usage))
        return _encoded(MessageStart(message))

    def _stop(self) -> StopReason:
        match self._items.finish_reason:
            case "length":
                return StopReason("max_tokens", None)
            case "tool_calls":
                return StopReason("tool_use", None)
        stop = self.states[0].stop_string
        if stop in self.asked.stop_sequences:
            return StopReason("stop_sequence", stop)
        return StopReason("end_turn", None)  # the model ended it, or a stop string of the chat template


MESSAGES = Endpoint("/v1/messages", MessagesRequest, "msg_", prepare_chat, MessageAnswer)


def _event_of(change: ItemChange) -> MessageEvent:
    item = change.item
    match change:
        case ItemBegins():
            return BlockStart(item.index, _block(item, ""))
        case ItemGrows(addition=addition):
            return BlockDelta(item.index, _addition(item, addition))
        case ItemEnds():
            return BlockStop(item.index)


def _addition(item: OutputItem, addition: str) -> AddedThinking | AddedText | AddedInput:
    if item.is_thinking:
        return AddedThinking(addition)
    return AddedText(addition) if item.call is None else AddedInput(addition)


def _block(item: OutputItem, content: str) -> ContentBlock:
    """An item by its kind."""
    if item.is_thinking:
        return ThinkingBlock(content)
    if item.call is None:
        return TextBlock(content)
    return ToolUseBlock(item.call.id or "", item.call.name or "", msgspec.Raw(content.encode() or b"{}"))


def _encoded(data: MessageEvent) -> bytes:
    return event(data, str(type(data).__struct_config__.tag))
