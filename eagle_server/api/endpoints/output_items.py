"""An answer as a sequence of items, in the order in which the model wrote them: thinking, texts and tool calls.

/v1/responses calls them output items, /v1/messages content blocks. An answer in one piece and the deltas of its stream
make the same items.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from eagle_server.api.generation.request_state import OutputDelta
from eagle_server.text.tools.parser import ToolCallDelta


@dataclass
class OutputItem:
    """A text, thinking, or a tool call if `call` is not None.

    `content` is the text, or the call's arguments as JSON text. `is_complete` is false while the item grows, and
    afterwards if it was cut off, which happens to texts and thinking only.
    """

    index: int
    call: ToolCallDelta | None = None
    is_thinking: bool = False
    content: str = ""
    is_complete: bool = False


@dataclass(frozen=True)
class ItemBegins:
    item: OutputItem


@dataclass(frozen=True)
class ItemGrows:
    """`addition` is the new end of the item's content."""

    item: OutputItem
    addition: str


@dataclass(frozen=True)
class ItemEnds:
    item: OutputItem


ItemChange = ItemBegins | ItemGrows | ItemEnds


class OutputItems:
    """Separates the output of one choice into items. One item grows at a time.

    A call begins when it is complete: until then it may turn out to be invalid, and clients can take back no item. An
    invalid call is text, as the model wrote it.
    """

    def __init__(self) -> None:
        self.items: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._held: ToolCallDelta | None = None  # the newest call, as far as it has arrived
        self._text_length = 0  # of earlier outputs
        self.finish_reason: str | None = None

    def add(self, output: OutputDelta) -> Iterator[ItemChange]:
        """Add an output, and yield its changes. The caller must iterate to the end."""
        yield from self._add_text(output.reasoning, is_thinking=True)
        text, begin = output.text, 0
        for delta in output.tool_calls:
            call = self._joined(delta)
            if call.is_complete or call.broken:
                end = max(call.content_before - self._text_length, begin)  # earlier outputs may have had the text
                yield from self._add_text(text[begin:end])
                begin = end
            if call.broken:
                yield from self._add_text(call.broken)
            elif call.is_complete:
                yield from self._begin(call=call)
                yield from self._grow(call.arguments)
                yield from self._end()
        yield from self._add_text(text[begin:])
        self._text_length += len(text)
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            yield from self._end()

    def _joined(self, delta: ToolCallDelta) -> ToolCallDelta:
        """The call to which the delta belongs, as far as it has arrived."""
        if self._held is None or delta.id is not None:
            self._held = replace(delta)
        else:
            self._held.extend(delta)
        return self._held

    def _begin(self, *, call: ToolCallDelta | None = None, is_thinking: bool = False) -> Iterator[ItemChange]:
        yield from self._end()
        self._open = OutputItem(len(self.items), call, is_thinking)
        self.items.append(self._open)
        yield ItemBegins(self._open)

    def _add_text(self, text: str, *, is_thinking: bool = False) -> Iterator[ItemChange]:
        if not text:
            return
        if self._open is None or self._open.is_thinking != is_thinking:
            yield from self._begin(is_thinking=is_thinking)
        yield from self._grow(text)

    def _grow(self, addition: str) -> Iterator[ItemChange]:
        if addition and self._open is not None:
            self._open.content += addition
            yield ItemGrows(self._open, addition)

    def _end(self) -> Iterator[ItemChange]:
        """End the item that grows, if one does."""
        if self._open is not None:
            self._open.is_complete = self.finish_reason != "length"
            yield ItemEnds(self._open)
            self._open = None
