"""Separates tool calls from content in a growing text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from eagle_server.text.markers import WHITESPACE, overlap, without_leading_space
from eagle_server.text.tools.formats import ToolFormat
from eagle_server.text.tools.json_calls import Functions, NotAToolCall

_BRACES = re.compile(rf"\}}[}}\s]{{0,{WHITESPACE - 1}}}")


@dataclass
class ToolCallDelta:
    """The new part of a tool call. The first delta has `id` and `name`, the last one has `is_complete`.

    A call that is invalid or cut off has `broken` instead: its text as the model wrote it, with the markers.
    `content_before` of the first delta counts the characters of content before the call.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    is_complete: bool = False
    content_before: int = 0
    broken: str = ""

    def extend(self, other: ToolCallDelta) -> None:
        """Append the next delta of the same call."""
        self.arguments += other.arguments
        self.is_complete = other.is_complete
        self.broken += other.broken


def join(calls: list[ToolCallDelta], more: Iterable[ToolCallDelta]) -> None:
    """Append deltas to a list that has one entry per call."""
    for delta in more:
        if calls and calls[-1].index == delta.index:
            calls[-1].extend(delta)
        else:
            calls.append(delta)


@dataclass
class ParsedText:
    """Thinking, content and tool calls that were found in a piece of text."""

    content: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    reasoning: str = ""

    def extend(self, other: ParsedText) -> None:
        """Append what was found in the next piece."""
        self.content += other.content
        self.reasoning += other.reasoning
        join(self.tool_calls, other.tool_calls)


class ToolCallParser:
    """Separates tool calls from content. The text may arrive in pieces of any size.

    Text that may be the beginning of a call is held back, until its name and the first character of its first argument
    have arrived. These are returned, and the arguments follow as the model writes them, as JSON text. What was returned
    as a call stays one: if it turns out to be invalid, or is cut off, it ends with `broken`. A call is valid if its
    arguments are a valid JSON object or can be written as one. Text that is invalid before it was returned as a call is
    content, with its markers. Nothing depends on the pieces, and no text is in a call and in content.

    Repaired are closing brackets that are missing before a marker, surplus ones after a call, line breaks in strings,
    and arguments that are missing or null. Whitespace before a call and after the last call is dropped, up to
    WHITESPACE characters. With more whitespace between a marker and its call there is no call.
    """

    def __init__(
        self, format: ToolFormat, functions: Functions, *, single: bool = False, instead: bool = False
    ) -> None:
        """`functions`: the offered ones. `single`: drop all text after the first call. `instead`: calls come in place
        of content, so all text after the beginning of content is content.
        """
        self._format, self._functions, self._single = format, functions, single
        self._held = ""
        self._ended = False
        self._after_content = self._in_text if instead else self._in_content
        self._state: Callable[[ParsedText], bool] = self._at_beginning if format.bare else self._in_content
        self._call = format.call(0, functions, format.ends)
        self._call_end = ""  # a text that may still follow the newest call
        self._has_marker = False
        self._name: str | None = None
        self._sent = 0  # characters of the call's arguments that were returned
        self._broken = ""  # the newest call, if it was invalid
        self._unsearched = 0  # its end is not before this position
        self._index = 0
        self._is_after_call = False
        self._content_length = 0  # characters of content that were returned
        self.complete = 0  # calls

    @property
    def is_done(self) -> bool:
        """Whether the only allowed call has ended. Further text is dropped."""
        return self._single and self._index > 0

    def push(self, text: str) -> ParsedText:
        """Add text; return what is certain now."""
        return self._advance(text)

    def flush(self) -> ParsedText:
        """End the text; return what was held back."""
        self._ended = True
        return self._advance("")

    def _advance(self, text: str) -> ParsedText:
        parsed = ParsedText()
        held, self._held = self._held, ""
        held += text  # in place, because nothing else refers to it: a call of any length is copied once
        self._held = held
        while not self.is_done and self._state(parsed):
            pass
        if self.is_done:
            self._held = ""
        self._content_length += len(parsed.content)
        return parsed

    # The parser's states. Each consumes held text, and returns whether the next state should run.

    def _at_beginning(self, parsed: ParsedText) -> bool:
        text = self._without_bracket(self._held)
        if self._may_begin(text):
            return False
        self._state = self._in_content
        if text and text.startswith(self._format.begin) and self._has_bracket(self._held):
            self._has_marker = False
            self._begin_call(len(self._held) - len(text))
        return True

    def _in_content(self, parsed: ParsedText) -> bool:
        marker = self._format.opening
        cut = self._held.find(marker) if marker else -1
        if cut < 0 and self._ended:
            if self._held.strip() or not self._is_after_call:
                parsed.content += self._held
            self._held = ""
            return False
        safe = cut if cut >= 0 else len(self._held) - overlap(self._held, marker)
        spaced = max(safe - WHITESPACE, 0)
        text = self._held[:spaced] + self._held[spaced:safe].rstrip()
        self._held = self._held[len(text) :]
        if text:
            parsed.content += text
            self._is_after_call = False
            self._state = self._after_content
        if cut >= 0 and self._state == self._in_content:
            self._state = self._after_marker
        return self._state != self._in_content

    def _in_text(self, parsed: ParsedText) -> bool:
        """Where no call can come any more."""
        parsed.content += self._held
        self._held = ""
        return False

    def _after_marker(self, parsed: ParsedText) -> bool:
        begin = self._held.index(self._format.opening) + len(self._format.opening)
        text = self._without_bracket(self._held[begin:])
        if self._may_begin(text):
            return False
        if not text or not text.startswith(self._format.begin):
            return self._reject_call(parsed, len(self._held) if text == "" else begin)
        self._has_marker = True
        self._begin_call(len(self._held) - len(text))
        return True

    def _in_call(self, parsed: ParsedText) -> bool:
        call = self._call
        try:
            call.read(self._held)
            self._add_call(parsed)
            if call.end is not None:
                return self._complete_call(parsed, call.end)
        except NotAToolCall:
            self._add_call(parsed)
            return self._end_invalid(parsed, call.at if call.end is None else call.end)
        return self._end_invalid(parsed, len(self._held)) if self._ended else False

    def _in_broken(self, parsed: ParsedText) -> bool:
        """In an invalid call whose end only a marker tells."""
        marks = (self._format.opening, self._format.closing)
        ends = [cut for mark in marks if (cut := self._held.find(mark, self._unsearched)) >= 0]
        if not ends and not self._ended:
            self._unsearched = max(self._unsearched, len(self._held) - max(map(len, marks)))
            return False
        end = min(ends, default=len(self._held))
        self._broken = self._held[:end]
        return self._end_call(end)

    def _after_call(self, parsed: ParsedText) -> bool:
        text, closing = without_leading_space(self._held), self._format.closing
        if text is None:
            return self._leave_call(parsed)
        surplus = self._surplus(text)
        if surplus is None:
            return False
        if surplus:
            return self._skip(text[surplus:])
        if self._call_end and text.startswith(self._call_end):
            end, self._call_end = len(self._call_end), ""
            return self._skip(text[end:])
        if closing and text.startswith(closing):
            self._skip(text[len(closing) :])
            return self._leave_call(parsed)
        return self._before_another(parsed, text)

    def _before_another(self, parsed: ParsedText, text: str) -> bool:
        """After a call and its whitespace, without an end marker: another call or content."""
        separator = self._format.separator
        follows = separator is not None and text.startswith(separator)
        another = without_leading_space(text[len(separator or "") :]) if follows else None
        begun = (separator or "", self._format.closing, self._call_end)
        if not self._ended and (self._may_begin(another) or any(mark.startswith(text) for mark in begun)):
            return False
        self._leave_call(parsed)
        if another and another.startswith(self._format.begin):
            self._begin_call(len(self._held) - len(another))
        return True

    def _surplus(self, text: str) -> int | None:
        """Length of closing braces that nothing opened, up to a marker or the end. None: it is not certain yet."""
        braces = _BRACES.match(text)
        if braces is None:
            return 0
        rest = text[braces.end() :]
        marks = [mark for mark in (*self._format.ends, self._format.closing, self._format.separator) if mark]
        if (self._ended and not rest) or rest.startswith(tuple(marks)):
            return braces.end()
        return None if not self._ended and any(mark.startswith(rest) for mark in marks) else 0

    def _skip(self, rest: str) -> bool:
        """Drop the held text before `rest`. It belongs to the call."""
        if self._broken:
            self._broken += self._held[: len(self._held) - len(rest)]
        self._held = rest
        return True

    def _leave_call(self, parsed: ParsedText) -> bool:
        if self._broken:
            join(parsed.tool_calls, [ToolCallDelta(self._index, broken=self._broken)])
            self._broken = ""
            self._index += 1
        self._state = self._in_content
        return True

    # Steps of a tool call.

    def _begin_call(self, position: int) -> None:
        self._call = self._format.call(position, self._functions, self._format.ends)
        self._name, self._sent = None, 0
        self._state = self._in_call

    def _add_call(self, parsed: ParsedText) -> None:
        """Return the name and the arguments that have arrived."""
        call = self._call
        if self._name is None:
            name = call.find_name(self._held)
            if name is None or not self._accepts_name(name):
                return
            self._name = name
            join(parsed.tool_calls, [self._new_call(parsed, name)])
        arguments = call.take_arguments(self._held)
        self._sent += len(arguments)
        join(parsed.tool_calls, [ToolCallDelta(self._index, arguments=arguments)])

    def _new_call(self, parsed: ParsedText, name: str) -> ToolCallDelta:
        before = self._content_length + len(parsed.content)
        return ToolCallDelta(self._index, self._format.new_id(), name, content_before=before)

    def _complete_call(self, parsed: ParsedText, end: int) -> bool:
        """
        Raises:
            NotAToolCall: it is not a call of an offered function.
        """
        name, arguments = self._call.whole(self._held)
        if self._name is None:
            if not self._accepts_name(name):
                raise NotAToolCall("another function")
            join(parsed.tool_calls, [self._new_call(parsed, name)])
        join(parsed.tool_calls, [ToolCallDelta(self._index, arguments=arguments[self._sent :], is_complete=True)])
        self.complete += 1
        self._index += 1
        self._name = None
        return self._end_call(end)

    def _end_call(self, end: int) -> bool:
        self._held = self._held[end:]
        self._is_after_call = True
        self._call_end = self._format.call_end.strip()
        self._state = self._after_call
        return True

    def _end_invalid(self, parsed: ParsedText, end: int) -> bool:
        """The call up to `end` is invalid. It is content, unless it was returned as a call."""
        if self._name is None:
            return self._reject_call(parsed, end)
        self._name = None
        if self._call.end is None and self._format.closing in self._format.markers:
            self._unsearched, self._state = end, self._in_broken
            return True
        self._broken = self._held[:end]
        return self._end_call(end)

    def _reject_call(self, parsed: ParsedText, end: int) -> bool:
        """There is no call: the held text up to `end` is content. Parsing continues after it."""
        parsed.content += self._held[:end]
        self._held = self._held[end:]
        self._is_after_call = False
        self._state = self._after_content
        return True

    def _accepts_name(self, name: str) -> bool:
        return self._has_marker or name in self._functions

    def _without_bracket(self, text: str) -> str | None:
        """The text after whitespace and a bracket, where a call may begin. None: there is too much whitespace."""
        rest = without_leading_space(text)
        if rest and self._format.bracket and rest.startswith(self._format.bracket):
            rest = without_leading_space(rest[len(self._format.bracket) :])
        return rest

    def _has_bracket(self, text: str) -> bool:
        return text.lstrip().startswith(self._format.bracket)

    def _may_begin(self, text: str | None) -> bool:
        """Whether the text is an incomplete beginning of a call."""
        begin = self._format.begin
        return not self._ended and text is not None and len(text) < max(len(begin), 1) and begin.startswith(text)
