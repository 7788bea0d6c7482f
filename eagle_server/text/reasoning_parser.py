"""Separates thinking from the answer in a growing text."""

from __future__ import annotations

import re

from eagle_server.text.markers import WHITESPACE, overlap, without_leading_space
from eagle_server.text.reasoning_formats import ReasoningFormat
from eagle_server.text.tools.formats import CALL, CHANNEL, END, GPT_OSS, MESSAGE, RETURN, START
from eagle_server.text.tools.parser import ParsedText, ToolCallParser

_BEGINNINGS = (START, CHANNEL, MESSAGE, "to=")  # of a header, after spaces
_ENDS = (END, RETURN, CALL)
_LONGEST = 512  # characters of a header
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_FUNCTION = re.compile(r"\bto=functions\.([^\s<]+)")


class ReasoningParser:
    """Separates thinking from the answer after it, and hands the answer on to the parser of tool calls.

    The text may arrive in pieces of any size. Text that may be the beginning of a marker is held back. Markers, line
    breaks around the thinking and line breaks before the answer are dropped, but at most WHITESPACE line breaks before
    an end marker. Thinking that never ends stays thinking.
    """

    def __init__(
        self,
        format: ReasoningFormat,
        answer: ToolCallParser | None = None,
        *,
        is_open: bool | None,
        separate: bool = True,
        stream: bool = True,
    ) -> None:
        """`is_open`: see `ReasoningFormat.state_after`; not False. Without `separate` all thinking is content, with its
        markers. Without `stream` the thinking is returned in one piece when it ends.
        """
        self._format, self._answer = format, answer
        self._separate, self._stream = separate, stream
        self._held = ""
        self._kept = ""  # thinking that will be returned in one piece
        self._state = self._at_beginning
        self._has_thinking = self._has_answer = False
        self.thinks = bool(is_open)  # False as long as it is unknown
        self._ended = False

    @property
    def is_answering(self) -> bool:
        """Whether the thinking has ended, or there is none."""
        return self._state == self._in_answer

    @property
    def is_done(self) -> bool:
        """Whether further text is dropped, see `ToolCallParser`."""
        return self._answer is not None and self._answer.is_done

    @property
    def complete(self) -> int:
        """Complete tool calls."""
        return 0 if self._answer is None else self._answer.complete

    def push(self, text: str) -> ParsedText:
        """Add text; return what is certain now."""
        parsed = ParsedText()
        self._held += text
        while self._state(parsed):
            pass
        if not self._stream:
            self._kept, parsed.reasoning = self._kept + parsed.reasoning, ""
            if self._ended or self.is_answering:
                self._kept, parsed.reasoning = "", self._kept
        return parsed

    def flush(self) -> ParsedText:
        """End the text; return what was held back."""
        self._ended = True
        parsed = self.push("")
        if self._answer is not None:
            parsed.extend(self._answer.flush())
        return parsed

    # The parser's states. Each consumes held text, and returns whether the next state should run.

    def _at_beginning(self, parsed: ParsedText) -> bool:
        text = without_leading_space(self._held)
        openings = () if text is None else self._format.openings
        opening = next((marker for marker in openings if text and text.startswith(marker)), None)
        if opening is None and not self._ended and any(marker.startswith(text or "") for marker in openings):
            return False  # it may become an opening
        if opening is not None:
            self.thinks = True
            self._think(parsed, self._held.index(opening) + len(opening), "")
        self._state = self._in_thinking if self.thinks else self._in_answer
        self._has_answer = not self.thinks
        return True

    def _in_thinking(self, parsed: ParsedText) -> bool:
        ends = [(cut, marker) for marker in self._format.closings if (cut := self._held.find(marker)) >= 0]
        cut, closing = min(ends, default=(-1, ""))
        length = cut if ends else len(self._held)
        if not (ends or self._ended):
            length -= max(overlap(self._held, marker) for marker in self._format.closings)
        kept = max(length - WHITESPACE, 0)
        text = self._held[:kept] + self._held[kept:length].rstrip("\n")
        if not ends and not self._ended:
            length = len(text)
        self._think(parsed, length + len(closing), text if self._has_thinking else text.lstrip("\n"))
        if ends:
            self._state = self._in_answer
        return bool(ends)

    def _in_answer(self, parsed: ParsedText) -> bool:
        text = self._held if self._has_answer or not self._separate else self._held.lstrip("\n")
        self._held = ""
        self._has_answer = self._has_answer or bool(text)
        if self._answer is None:
            parsed.content += text
        elif text:
            parsed.extend(self._answer.push(text))
        return False

    def _think(self, parsed: ParsedText, length: int, shown: str) -> None:
        """Consume `length` characters of thinking. `shown` is the part that a response with separate thinking shows."""
        if self._separate:
            parsed.reasoning += shown
            self._has_thinking = self._has_thinking or bool(shown)
        else:
            parsed.content += self._held[:length]
        self._held = self._held[length:]


class ChannelParser(ReasoningParser):
    """The `ReasoningParser` for gpt_oss. It drops headers, but without `separate` thinking keeps its headers.

    A line break separates several messages of one kind. Tool calls go on to the parser of tool calls, with the header
    of its format. Without that parser they are content, as the model wrote them.
    """

    _has_header = False  # whether a message has begun
    _is_call = False

    @property
    def is_answering(self) -> bool:
        """Whether the model is not thinking now."""
        return self._has_header and self._state != self._in_thinking

    # The parser's states, as in `ReasoningParser`.

    def _at_beginning(self, parsed: ParsedText) -> bool:
        """Between messages."""
        if self.thinks and not self._has_header:  # the prompt has the header of the thinking
            self._has_header, self._state = True, self._in_thinking
            return True
        cut, text = self._held.find(MESSAGE), self._held.lstrip()
        if cut < 0 and self._ended and (not text or text.startswith((START, CHANNEL))):
            self._held = ""
        if not self._held or (cut < 0 and not self._ended and self._may_be_header(self._held)):
            return False
        header = self._held[: cut + len(MESSAGE)] if cut >= 0 else ""
        is_header = self._may_be_header(self._held[:cut]) and header.lstrip().startswith(_BEGINNINGS)
        self._begin(parsed, header if is_header else "")
        return True

    def _begin(self, parsed: ParsedText, header: str) -> None:
        """Begin a message. The held text begins with its header; "": the message has none."""
        channel, function = _CHANNEL.search(header), _FUNCTION.search(header)
        self._has_header, self._state, self._is_call = True, self._in_answer, function is not None
        if function is not None:
            self._held = self._held[len(header) :]
            named = f"{GPT_OSS.opening}{function[1]}{MESSAGE}"
            self._add(parsed, header if self._answer is None else named)
        elif channel is not None and channel[1] == "analysis":
            self.thinks, self._state = True, self._in_thinking
            self._think(parsed, len(header), "\n" if self._has_thinking else "")
        elif header:
            self._held = self._held[len(header) :]
            if self._has_answer:
                self._add(parsed, "\n")
        else:  # the first character cannot begin a header
            self._add(parsed, self._held[:1])
            self._held, self._has_answer = self._held[1:], True

    def _in_thinking(self, parsed: ParsedText) -> bool:
        length, marker = self._body()
        self._think(parsed, length + len(marker), self._held[:length])
        return self._after_body(marker)

    def _in_answer(self, parsed: ParsedText) -> bool:
        length, marker = self._body()
        text, self._held = self._held[:length], self._held[length + len(marker) :]
        if text:
            self._has_answer = self._has_answer or not self._is_call
            self._add(parsed, text)
        return self._after_body(marker)

    def _body(self) -> tuple[int, str]:
        """The length of the message in the held text, and the end marker to drop after it."""
        ends = [(cut, end) for end in (*_ENDS, START, CHANNEL) if (cut := self._held.find(end)) >= 0]
        if ends:
            cut, marker = min(ends)
            return cut, marker if marker in _ENDS else ""
        held = 0 if self._ended else max(overlap(self._held, end) for end in (*_ENDS, START, CHANNEL))
        return len(self._held) - held, ""

    def _after_body(self, marker: str) -> bool:
        if not marker and not self._held.startswith((START, CHANNEL)):
            return False
        self._state = self._at_beginning
        return True

    def _add(self, parsed: ParsedText, text: str) -> None:
        if self._answer is None:
            parsed.content += text
        else:
            parsed.extend(self._answer.push(text))

    @staticmethod
    def _may_be_header(text: str) -> bool:
        """Whether the text is a header without its last token, or the beginning of such a header."""
        rest = text.lstrip()
        if len(text) > _LONGEST or len(text) - len(rest) > WHITESPACE:
            return False
        return any(rest.startswith(beginning) or beginning.startswith(rest) for beginning in _BEGINNINGS)
