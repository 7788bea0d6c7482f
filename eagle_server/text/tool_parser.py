"""Calls of functions in a growing text: what is content, what a call's name, what a piece of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from eagle_server.text.tool_formats import ToolFormat
from eagle_server.text.tool_json import Broken, CallObject, read_call

WHITESPACE = 64  # characters before and within a call; without an end every token would look at all that came before it


@dataclass
class CallDelta:
    """What a call gained. Its first delta has `id` and `name`, and `is_complete` comes with the last.

    A call without the latter broke off; its text is content then.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    is_complete: bool = False

    def extend(self, other: CallDelta) -> None:
        """Join what follows of the same call."""
        self.arguments += other.arguments
        self.is_complete = other.is_complete


def join(calls: list[CallDelta], more: Iterable[CallDelta]) -> None:
    """Add deltas to a list that has one entry per call."""
    for delta in more:
        if calls and calls[-1].index == delta.index:
            calls[-1].extend(delta)
        else:
            calls.append(delta)


@dataclass
class Said:
    """What a piece of text turned out to be."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class ToolCallParser:
    """Tells calls from content, whatever pieces the text comes in.

    Text that may be the beginning of a call is held back. As soon as a call's name is known it goes out, and its
    arguments follow as the model writes them, as JSON text. A call counts if its object is valid JSON with a name and
    an object of arguments; else its text, markers included, is content, so that nothing is lost. (What went out of it
    cannot be taken back: such a call never gets `is_complete`.) White space before a call and at the end, after the
    last one, is dropped, up to WHITESPACE characters; more of it between a marker and its object makes it no call.
    """

    def __init__(self, format: ToolFormat, names: Collection[str], *, single: bool = False) -> None:
        """`names` are the functions that were offered. `single`: nothing counts after the first call."""
        self._format, self._names, self._single = format, names, single
        self._held = ""
        self._ended = False
        self._state: Callable[[Said], bool] = self._at_beginning if format.bare else self._in_content
        self._object = CallObject(0, 0)
        self._is_marked = False
        self._name: str | None = None
        self._index = 0
        self._follows_call = False
        self.complete = 0  # calls

    @property
    def is_done(self) -> bool:
        """The one call that was wanted is complete; what comes further is dropped."""
        return self._single and self.complete > 0

    def push(self, text: str) -> Said:
        """What is certain by now."""
        return self._advance(text)

    def flush(self) -> Said:
        """What was held back: the text ends here."""
        self._ended = True
        return self._advance("")

    def _advance(self, text: str) -> Said:
        said = Said()
        self._held += text
        while not self.is_done and self._state(said):
            pass
        if self.is_done:
            self._held = ""
        return said

    # States. Each takes what it can from the held text, and says whether the next one should go on.

    def _at_beginning(self, said: Said) -> bool:
        text = _unspaced(self._held)
        if text == "" and not self._ended:
            return False
        self._state = self._in_content
        if text and text.startswith("{"):
            self._is_marked = False
            self._open(len(self._held) - len(text))
        return True

    def _in_content(self, said: Said) -> bool:
        marker = self._format.opening
        cut = self._held.find(marker)
        if cut < 0 and self._ended:
            if self._held.strip() or not self._follows_call:
                said.content += self._held
            self._held = ""
            return False
        safe = cut if cut >= 0 else len(self._held) - _overlap(self._held, marker)
        spaced = max(safe - WHITESPACE, 0)
        text = self._held[:spaced] + self._held[spaced:safe].rstrip()
        self._held = self._held[len(text) :]
        if text:
            said.content += text
            self._follows_call = False
        if cut >= 0:
            self._state = self._after_marker
        return cut >= 0

    def _after_marker(self, said: Said) -> bool:
        begin = self._held.index(self._format.opening) + len(self._format.opening)
        text = _unspaced(self._held[begin:])
        if text and self._format.bracket and text.startswith(self._format.bracket):
            text = _unspaced(text[len(self._format.bracket) :])
        if text == "":
            return self._break(said, len(self._held)) if self._ended else False
        if text is None or not text.startswith("{"):
            return self._break(said, begin)
        self._is_marked = True
        self._open(len(self._held) - len(text))
        return True

    def _in_object(self, said: Said) -> bool:
        found = self._object
        try:
            found.read(self._held)
            self._send(said)
            if found.end is not None:
                return self._complete(said, found.end)
        except Broken:
            self._send(said)
            return self._break(said, found.at if found.end is None else found.end)
        return self._break(said, len(self._held)) if self._ended else False

    def _after_object(self, said: Said) -> bool:
        text, separator, closing = _unspaced(self._held), self._format.separator, self._format.closing
        self._state = self._in_content
        if text is None:
            return True
        if closing and text.startswith(closing):
            self._held = text[len(closing) :]
            return True
        another = _unspaced(text[len(separator) :]) if separator and text.startswith(separator) else None
        if another and another.startswith("{"):
            self._open(len(self._held) - len(another))
        elif not self._ended and (another == "" or not text or closing.startswith(text)):
            self._state = self._after_object
            return False
        return True

    # Steps of a call.

    def _open(self, position: int) -> None:
        self._object = CallObject(position, position)
        self._name = None
        self._state = self._in_object

    def _send(self, said: Said) -> None:
        """Name and arguments, as far as they are there."""
        found = self._object
        if self._name is None:
            name = found.find_name(self._held)
            if name is None or not self._may_be(name):
                return
            self._name = name
            join(said.calls, [CallDelta(self._index, self._format.new_id(), self._name)])
        join(said.calls, [CallDelta(self._index, arguments=found.take_arguments(self._held))])

    def _complete(self, said: Said, end: int) -> bool:
        """
        Raises:
            Broken: the object is no call.
        """
        name, arguments = read_call(self._held[self._object.begin : end])
        if self._name is None:
            if not self._may_be(name):
                raise Broken("another function")
            join(said.calls, [CallDelta(self._index, self._format.new_id(), name, arguments)])
        join(said.calls, [CallDelta(self._index, is_complete=True)])
        self.complete += 1
        self._index += 1
        self._name = None
        self._held = self._held[end:]
        self._follows_call = True
        self._state = self._after_object
        return True

    def _break(self, said: Said, end: int) -> bool:
        """No call: the held text is content up to `end`, and what follows it is looked at anew."""
        said.content += self._held[:end]
        self._held = self._held[end:]
        self._follows_call = False
        if self._name is not None:
            self._name = None
            self._index += 1
        self._state = self._in_content
        return True

    def _may_be(self, name: str) -> bool:
        return self._is_marked or name in self._names


def _unspaced(text: str) -> str | None:
    """A text without the white space that it begins with; None if that is more than WHITESPACE characters."""
    rest = text.lstrip()
    return rest if len(text) - len(rest) <= WHITESPACE else None


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` with which `marker` begins."""
    lengths = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(marker[:length])), 0)
