"""Calls of functions in a growing text: what is content, what a call's name, what a piece of its arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import NoReturn

from eagle_server.engine.tool_formats import ToolFormat

_S = r"[ \t\n\r]*"  # JSON's white space
# The beginning of most calls, up to the arguments; a longer name, one with escapes or other orders wait for the end.
_HEAD = re.compile(
    rf'\{{{_S}"name"{_S}:{_S}"([^"\\\x00-\x1f]{{1,256}})"{_S},{_S}"(?:arguments|parameters)"{_S}:{_S}(?=\{{)'
)
_OUTSIDE_STRINGS = re.compile(r'["{}\[\]]')
_INSIDE_STRINGS = re.compile(r'["\\\x00-\x1f]')
_KEY = re.compile(rf'{_S}("(?:[^"\\]|\\.)*"){_S}:{_S}')
_NEXT = re.compile(rf"{_S}([,}}])")


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


class _Broken(ValueError):
    """No call after all."""


@dataclass
class _Object:
    """A JSON object in the held text, as far as it is known. Positions count from the beginning of that text."""

    begin: int
    at: int  # up to here it was read
    depth: int = 0
    in_string: bool = False
    end: int | None = None
    arguments_from: int | None = None
    arguments_to: int | None = None  # found while reading on
    sent: int = 0  # position up to which arguments are out

    def read(self, text: str) -> None:
        """Go on to the object's end, or to that of the text.

        Raises:
            _Broken: a string with a line break or the like, at `at`.
        """
        while self.end is None:
            found = (_INSIDE_STRINGS if self.in_string else _OUTSIDE_STRINGS).search(text, self.at)
            if found is None:
                self.at = len(text)
                return
            self.at = found.start()
            match found[0]:
                case "\\":
                    if self.at + 1 == len(text):
                        return  # what is escaped is yet to come
                    self.at += 1
                case '"':
                    self.in_string = not self.in_string
                case "{" | "[":
                    self.depth += 1
                case "}" | "]":
                    self._close()
                case _:
                    raise _Broken("a control character")
            self.at += 1

    def _close(self) -> None:
        self.depth -= 1
        if self.depth == 1 and self.arguments_to is None:
            self.arguments_to = self.at + 1
        if self.depth == 0:
            self.end = self.at + 1


class ToolCallParser:
    """Tells calls from content, whatever pieces the text comes in.

    Text that may be the beginning of a call is held back. As soon as a call's name is known it goes out, and its
    arguments follow as the model writes them, as JSON text. A call counts if its object is valid JSON with a name and
    an object of arguments; else its text, markers included, is content, so that nothing is lost. (What went out of it
    cannot be taken back: such a call never gets `is_complete`.) White space before a call and at the end, after the
    last one, is dropped.
    """

    def __init__(self, format: ToolFormat, names: Collection[str], *, single: bool = False) -> None:
        """`names` are the functions that were offered. `single`: nothing counts after the first call."""
        self._format, self._names, self._single = format, names, single
        self._held = ""
        self._ended = False
        self._state: Callable[[Said], bool] = self._at_beginning if format.bare else self._in_content
        self._object = _Object(0, 0)
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
        text = self._held.lstrip()
        if not text and not self._ended:
            return False
        self._state = self._in_content
        if text.startswith("{"):
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
        text = self._held[:safe].rstrip()
        self._held = self._held[len(text) :]
        if text:
            said.content += text
            self._follows_call = False
        if cut >= 0:
            self._state = self._after_marker
        return cut >= 0

    def _after_marker(self, said: Said) -> bool:
        begin = self._held.index(self._format.opening) + len(self._format.opening)
        text = self._held[begin:].lstrip()
        if self._format.bracket and text.startswith(self._format.bracket):
            text = text[len(self._format.bracket) :].lstrip()
        if not text:
            return self._break(said, len(self._held)) if self._ended else False
        if not text.startswith("{"):
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
        except _Broken:
            self._send(said)
            return self._break(said, found.at if found.end is None else found.end)
        return self._break(said, len(self._held)) if self._ended else False

    def _after_object(self, said: Said) -> bool:
        text, separator, closing = self._held.lstrip(), self._format.separator, self._format.closing
        self._state = self._in_content
        if closing and text.startswith(closing):
            self._held = text[len(closing) :]
            return True
        another = text[len(separator) :].lstrip() if separator and text.startswith(separator) else None
        if another and another.startswith("{"):
            self._open(len(self._held) - len(another))
        elif not self._ended and (another == "" or not text or closing.startswith(text)):
            self._state = self._after_object
            return False
        return True

    # Steps of a call.

    def _open(self, position: int) -> None:
        self._object = _Object(position, position)
        self._name = None
        self._state = self._in_object

    def _send(self, said: Said) -> None:
        """Name and arguments, as far as they are there."""
        found = self._object
        if self._name is None:
            head = _HEAD.match(self._held, found.begin, found.at)
            if head is None or not self._may_be(head[1]):
                return
            self._name = head[1]
            found.arguments_from = found.sent = head.end()
            join(said.calls, [CallDelta(self._index, self._format.new_id(), self._name)])
        end = found.at if found.arguments_to is None else found.arguments_to
        join(said.calls, [CallDelta(self._index, arguments=self._held[found.sent : end])])
        found.sent = end

    def _complete(self, said: Said, end: int) -> bool:
        """
        Raises:
            _Broken: the object is no call.
        """
        name, arguments = _call(self._held[self._object.begin : end])
        if self._name is None:
            if not self._may_be(name):
                _refuse("another function")
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


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` with which `marker` begins."""
    lengths = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(marker[:length])), 0)


def _refuse(what: str) -> NoReturn:
    raise _Broken(what)


_DECODER = json.JSONDecoder(parse_constant=_refuse)  # NaN and Infinity are Python's


def _call(text: str) -> tuple[str, str]:
    """Name and arguments, the latter as they are written, of an object.

    Raises:
        _Broken: it is no valid JSON or no call.
    """
    try:
        fields = _fields(text)
        name = json.loads(fields["name"])
        [arguments] = [fields[key] for key in ("arguments", "parameters") if key in fields]
        name.encode()  # half a surrogate pair is no text
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        raise _Broken(str(error)) from None
    if not name or not arguments.startswith("{"):
        _refuse("no name, or arguments that are no object")
    return name, arguments


def _fields(text: str) -> dict[str, str]:
    """The values of a JSON object, as text; each key once.

    Raises:
        ValueError, RecursionError: it is not valid.
    """
    fields: dict[str, str] = {}
    at, following = 1, ","
    while following == ",":
        key = _KEY.match(text, at)
        if key is None:
            _refuse("no key")
        _, at = _DECODER.raw_decode(text, key.end())
        name = json.loads(key[1])
        if name in fields:
            _refuse("a key twice")
        fields[name] = text[key.end() : at]
        end = _NEXT.match(text, at)
        if end is None:
            _refuse("no end")
        following, at = end[1], end.end()
    if at != len(text):
        _refuse("a bracket too many")
    return fields
