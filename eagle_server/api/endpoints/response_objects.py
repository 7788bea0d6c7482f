"""OpenAI's objects of /v1/responses: a response, its output items and the events of its stream."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from eagle_server.api.generation.response_parts import Metrics, Usage


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """What the model thought before the answer. There are no summaries."""

    id: str
    status: str
    content: list[ReasoningText]
    summary: list[Any] = []


class MessageItem(msgspec.Struct, tag_field="type", tag="message"):
    """A text of the answer."""

    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    """`arguments` is a JSON object as text."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


ResponseItem = ReasoningItem | MessageItem | FunctionCallItem


class CachedTokens(msgspec.Struct):
    cached_tokens: int


class ReasoningTokens(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Usage with the names of this API."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> ResponseUsage:
        cached = CachedTokens(usage.prompt_tokens_details.cached_tokens)
        thinking = ReasoningTokens(usage.completion_tokens_details.reasoning_tokens)
        return cls(usage.prompt_tokens, cached, usage.completion_tokens, thinking, usage.total_tokens)


class FailureReason(msgspec.Struct):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: str = "max_output_tokens"


class ResponseBody(msgspec.Struct, kw_only=True):
    """A response. The fields from `instructions` to `prompt_cache_key` repeat the request's."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    error: FailureReason | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[ResponseItem] = []
    usage: ResponseUsage | None = None
    metrics: Metrics | UnsetType = UNSET
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: dict[str, Any]
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    previous_response_id: None = None
    store: bool = False
    background: bool = False
    truncation: str = "disabled"
    service_tier: str = "default"


class LifecycleEvent(msgspec.Struct):
    """response.created, in_progress, completed, incomplete and failed."""

    type: str
    response: ResponseBody
    sequence_number: int = 0  # of this and the other events: set when it is sent


class ItemEvent(msgspec.Struct):
    """response.output_item.added and done."""

    type: str
    output_index: int
    item: ResponseItem
    sequence_number: int = 0


class PartEvent(msgspec.Struct):
    """response.content_part.added and done, of a text or thinking. An item has one part."""

    type: str
    output_index: int
    item_id: str
    part: OutputText | ReasoningText
    content_index: int = 0
    sequence_number: int = 0


class TextEvent(msgspec.Struct):
    """response.output_text.delta, which has `delta`, and done, which has `text`."""

    type: str
    output_index: int
    item_id: str
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[Any] = []
    content_index: int = 0
    sequence_number: int = 0


class ReasoningEvent(msgspec.Struct):
    """response.reasoning_text.delta, which has `delta`, and done, which has `text`."""

    type: str
    output_index: int
    item_id: str
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    content_index: int = 0
    sequence_number: int = 0


class ArgumentsEvent(msgspec.Struct):
    """response.function_call_arguments.delta, which has `delta`, and done, which has `arguments`."""

    type: str
    output_index: int
    item_id: str
    delta: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    sequence_number: int = 0


ResponseEvent = LifecycleEvent | ItemEvent | PartEvent | TextEvent | ReasoningEvent | ArgumentsEvent
