"""Separates thinking from the answer in a growing text."""

from __future__ import annotations

from eagle_server.text.markers import WHITESPACE, overlap, without_leading_space
from eagle_server.text.reasoning_formats import ReasoningFormat
from eagle_server.text.tool_parser import ParsedText, ToolCallParser


class ReasoningParser:
    """Separates thinking from the answer after it, and hands the answer on to the parser of tool calls.

    The text may arrive in pieces of any size. Text that may be the beginning of a marker is held back. Markers, line
    breaks around the thinking and line breaks before the answer are dropped; of those before an end marker at most
    WHITESPACE. Thinking that never ends is thinking.
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
        markers. Without `stream` the thinking is returned when it has ended, in one piece.
        """
        self._format, self._answer = format, answer
        self._separate, self._stream = separate, stream
        self._held = ""
        self._kept = ""  # thinking, for one piece
        self._state = self._at_beginning
        self._has_thinking = self._has_answer = False
        self.thinks = bool(is_open)  # as far as is known
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
        opening = next((each for each in openings if text and text.startswith(each)), None)
        if opening is None and not self._ended and any(each.startswith(text or "") for each in openings):
            return False  # it may become an opening
        if opening is not None:
            self.thinks = True
            self._think(parsed, self._held.index(opening) + len(opening), "")
        self._state = self._in_thinking if self.thinks else self._in_answer
        self._has_answer = not self.thinks
        return True

    def _in_thinking(self, parsed: ParsedText) -> bool:
        found = [(cut, each) for each in self._format.closings if (cut := self._held.find(each)) >= 0]
        cut, closing = min(found, default=(-1, ""))
        length = cut if found else len(self._held)
        if not (found or self._ended):
            length -= max(overlap(self._held, each) for each in self._format.closings)
        kept = max(length - WHITESPACE, 0)
        text = self._held[:kept] + self._held[kept:length].rstrip("\n")
        if not found and not self._ended:
            length = len(text)
        self._think(parsed, length + len(closing), text if self._has_thinking else text.lstrip("\n"))
        if found:
            self._state = self._in_answer
        return bool(found)

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
        """Consume held text; `shown` is what a response that separates thinking has of it."""
        if self._separate:
            parsed.reasoning += shown
            self._has_thinking = self._has_thinking or bool(shown)
        else:
            parsed.content += self._held[:length]
        self._held = self._held[length:]
