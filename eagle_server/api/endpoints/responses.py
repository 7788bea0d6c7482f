"""POST /v1/responses: OpenAI's Responses API over the generation of a chat. Responses are not kept."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from eagle_server.api.connection import event
from eagle_server.api.endpoints.output_items import ItemBegins, ItemChange, ItemEnds, ItemGrows, OutputItem, OutputItems
from eagle_server.api.endpoints.response_objects import (
    ArgumentsEvent,
    FailureReason,
    FunctionCallItem,
    IncompleteDetails,
    ItemEvent,
    LifecycleEvent,
    MessageItem,
    OutputText,
    PartEvent,
    ReasoningEvent,
    ReasoningItem,
    ReasoningText,
    ResponseBody,
    ResponseEvent,
    ResponseItem,
    ResponseUsage,
    TextEvent,
)
from eagle_server.api.errors import ApiError
from eagle_server.api.generation.endpoint import Answer, Endpoint
from eagle_server.api.generation.prepare import Prepared, prepare_chat
from eagle_server.api.generation.request_state import OutputDelta
from eagle_server.api.schemas.base import Part
from eagle_server.api.schemas.responses import ResponsesRequest
from eagle_server.api.service import Service

ID_PREFIX = "resp_"


class ResponseAnswer(Answer[ResponsesRequest]):
    """The answer to a conversation as a response with items. The last event of a stream has the same response."""

    def __init__(self, asked: ResponsesRequest, prepared: Prepared, service: Service) -> None:
        super().__init__(asked, prepared, service)
        self._items = OutputItems()
        self._sent = 0  # events

    def response(self, outputs: Sequence[OutputDelta]) -> ResponseBody:
        [output] = outputs
        for _ in self._items.add(output):
            pass
        return self._ended(None)

    def events(self, output: OutputDelta) -> bytes:
        changes = (event for change in self._items.add(output) for event in self._events_of(change))
        return self._begin() + b"".join(map(self._send, changes))

    def end(self, error: ApiError | None) -> bytes:
        response = self._ended(error)
        return self._begin() + self._send(LifecycleEvent(f"response.{response.status}", response))

    def _begin(self) -> bytes:
        """The first events, unless they were sent."""
        if self._sent:
            return b""
        response = self._in_state("in_progress")
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._send(LifecycleEvent(kind, response)) for kind in kinds)

    def _send(self, data: ResponseEvent) -> bytes:
        data.sequence_number = self._sent
        self._sent += 1
        return event(data, data.type)

    def _events_of(self, change: ItemChange) -> Iterator[ResponseEvent]:
        """The events of a change, in OpenAI's order."""
        item = change.item
        index, item_id = item.index, self._item_id(item)
        match change:
            case ItemBegins():
                yield ItemEvent("response.output_item.added", index, self._item(item, "in_progress"))
                if item.call is None:
                    yield PartEvent("response.content_part.added", index, item_id, _part(item, ""))
            case ItemGrows(addition=addition):
                yield self._content_event(item, "delta", addition, UNSET)
            case ItemEnds():
                yield self._content_event(item, "done", UNSET, item.content)
                if item.call is None:
                    yield PartEvent("response.content_part.done", index, item_id, _part(item, item.content))
                yield ItemEvent("response.output_item.done", index, self._item(item))

    def _content_event(
        self, item: OutputItem, name: str, delta: str | UnsetType, whole: str | UnsetType
    ) -> ResponseEvent:
        """Content was added, or is complete."""
        place = item.index, self._item_id(item)
        if item.call is not None:
            return ArgumentsEvent(f"response.function_call_arguments.{name}", *place, delta, whole)
        if item.is_thinking:
            return ReasoningEvent(f"response.reasoning_text.{name}", *place, delta, whole)
        return TextEvent(f"response.output_text.{name}", *place, delta, whole)

    def _item(self, item: OutputItem, status: str | None = None) -> ResponseItem:
        """An item by its kind."""
        item_id, status = self._item_id(item), status or ("completed" if item.is_complete else "incomplete")
        if item.is_thinking:
            return ReasoningItem(item_id, status, [ReasoningText(item.content)] if item.content else [])
        if item.call is None:
            return MessageItem(item_id, status, [OutputText(item.content)] if item.content else [])
        namespace, name = self.asked.name_of(item.call.name or "")
        return FunctionCallItem(item_id, status, item.call.id or "", name, item.content, namespace or UNSET)

    def _item_id(self, item: OutputItem) -> str:
        kind = "fc" if item.call is not None else "rs" if item.is_thinking else "msg"
        return f"{kind}_{self.id.removeprefix(ID_PREFIX)}_{item.index}"

    def _ended(self, error: ApiError | None) -> ResponseBody:
        is_cut = self._items.finish_reason == "length"
        response = self._in_state("failed" if error else "incomplete" if is_cut else "completed")
        response.output = [self._item(item) for item in self._items.items]
        response.usage, response.metrics = ResponseUsage.of(self.usage), self.metrics
        if error is not None:
            response.error = FailureReason(error.code or error.kind, error.message)
        elif is_cut:
            response.incomplete_details = IncompleteDetails()
        else:
            response.completed_at = int(time.time())
        return response

    def _in_state(self, status: str) -> ResponseBody:
        body = self.asked
        return ResponseBody(
            id=self.id,
            created_at=self.created,
            status=status,
            model=self.model,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls,
            reasoning={"effort": None, "summary": None, **_given(body.reasoning)},
            temperature=body.temperature,
            text={"format": {"type": "text"}, **_given(body.text)},
            tool_choice=_given(body.tool_choice) if isinstance(body.tool_choice, Part) else body.tool_choice or "auto",
            tools=body.tools,
            top_p=body.top_p,
            user=body.user,
            safety_identifier=body.safety_identifier,
            prompt_cache_key=body.prompt_cache_key,
        )


RESPONSES = Endpoint("/v1/responses", ResponsesRequest, ID_PREFIX, prepare_chat, ResponseAnswer)


def _part(item: OutputItem, content: str) -> OutputText | ReasoningText:
    return ReasoningText(content) if item.is_thinking else OutputText(content)


def _given(part: Part | None) -> dict[str, Any]:
    """The parameters of an object in the request."""
    return {} if part is None else part.model_dump(by_alias=True, exclude_unset=True)
