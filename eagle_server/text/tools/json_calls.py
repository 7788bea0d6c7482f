"""Reads the JSON object of a tool call, both while it grows and when it is complete."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn, Protocol

from eagle_server.text.markers import WHITESPACE, overlap, without_leading_space

_S = r"[ \t\n\r]*"  # JSON's whitespace
_FEW = r"[ \t\n\r]{0,64}"  # bounded, because the pattern is tried again for every piece of text
# Matches the beginning of most calls, up to the arguments. Longer names, names with escapes and other key orders are
# read when the object is complete.
_HEAD = re.compile(
    rf'\{{{_FEW}"name"{_FEW}:{_FEW}"([^"\\\x00-\x1f]{{1,256}})"{_FEW},{_FEW}"(?:arguments|parameters)"{_FEW}:{_FEW}(?=\{{)'
)
# The beginning of arguments, up to the first character of the first value or to the end.
_BEGUN = re.compile(rf'\{{{_FEW}(?:\}}|"(?:[^"\\\x00-\x1f]|\\[^\x00-\x1f]){{0,256}}"{_FEW}:{_FEW}["\[{{tfn\-0-9])')
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"|[{}\[\]]', re.DOTALL)
_PAIRS = {"{": "}", "[": "]"}
_INSIDE_STRINGS = re.compile(r'["\\\x00-\x1f]')
_KEY = re.compile(rf'{_S}("(?:[^"\\]|\\.)*"){_S}:{_S}')
NAME = re.compile(r"[^\s<>{}\[\]\"]{1,256}")
_BEGUN_NAME = re.compile(r"[^\s<>{}\[\]\"]{0,256}")
_WORDS = re.compile(r"([^\s<]{1,256})[\s<].{0,256}")
_WITHOUT_ARGUMENTS = {"name", "type", "id"}  # keys of a call that has no arguments
_NEXT = re.compile(rf"{_S}([,}}])")


Functions = Mapping[str, Mapping[str, Any]]  # the schemas of the arguments by name


class NotAToolCall(ValueError):
    """The text is not a tool call."""


class PartialCall(Protocol):
    """A tool call in a growing text. It begins at position `begin`. All positions count from the text's start.

    `read` reads up to the end of the call or of the text. It sets `end` at the end of the call. If it raises
    NotAToolCall, the text before `at` has been read. `find_name` returns the name as soon as it and the beginning of
    the first argument are certain. `take_arguments` then returns the new part of the arguments as JSON. `whole` returns
    name and arguments of a complete call, which begin with what was taken; it may raise NotAToolCall.
    """

    begin: int
    at: int
    end: int | None

    def read(self, text: str) -> None: ...

    def find_name(self, text: str) -> str | None: ...

    def take_arguments(self, text: str) -> str: ...

    def whole(self, text: str) -> tuple[str, str]: ...


@cache
def _outside_strings(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join([*map(re.escape, sorted(markers, key=len, reverse=True)), r'["{}\[\]]']))


@dataclass
class PartialObject:
    """A JSON object with the name and the arguments of a call, see `PartialCall`.

    Outside strings one of `markers` ends it ("]": outside its own brackets). Then closing brackets may be missing. In a
    string a control character is repaired, but beside a marker it ends the object, whose string has no end then.
    """

    begin: int
    functions: Functions
    markers: tuple[str, ...] = ()
    at: int = -1  # the text before this position has been read
    depth: int = 0
    in_string: bool = False
    end: int | None = None
    arguments_end: int | None = None  # end of the first nested object or list
    taken: int = 0  # arguments before this position have been returned
    controls: list[int] = field(default_factory=list)  # positions of control characters to repair

    def __post_init__(self) -> None:
        self.at = self.begin
        self._beside = tuple(marker for marker in self.markers if len(marker) > 1)
        self._string = self.begin  # where the newest string began

    def read(self, text: str) -> None:
        """Read up to the end of the object or of the text."""
        while self.end is None and (self._read_string(text) if self.in_string else self._read_structure(text)):
            pass

    def _read_string(self, text: str) -> bool:
        """Read up to the next special character in a string. False: more text is needed."""
        mark = _INSIDE_STRINGS.search(text, self.at)
        self.at = len(text) if mark is None else mark.start()
        if mark is None:
            return False
        if mark[0] == '"':
            self.in_string = False
        elif mark[0] != "\\":
            return self._read_control(text, self.at)
        elif self.at + 1 == len(text):
            return False  # the escaped character has not arrived yet
        elif text[self.at + 1] < " ":
            return self._read_control(text, self.at + 1)
        else:
            self.at += 1
        self.at += 1
        return True

    def _read_control(self, text: str, position: int) -> bool:
        """Read a control character in a string. False: more text is needed."""
        before = text[max(self._string, position - WHITESPACE) : position].rstrip()
        following = without_leading_space(text[position : position + 2 * WHITESPACE])
        if before.endswith(self._beside) or (following or "").startswith(self._beside):
            self.end = self.at = position
        elif following is not None and any(marker.startswith(following) for marker in self._beside):
            return False
        else:
            if self.at == position:  # with a backslash before it, it stays as it is
                self.controls.append(position)
            self.at = position + 1
        return True

    def _read_structure(self, text: str) -> bool:
        """Read up to the next quote, bracket or marker outside strings. False: more text is needed."""
        mark = _outside_strings(self.markers).search(text, self.at)
        if mark is None:
            held = max((overlap(text, marker) for marker in self.markers), default=0)
            self.at = max(self.at, len(text) - held)
            return False
        self.at = mark.start()
        if mark[0] in self.markers and (mark[0] != "]" or self.depth == 1):
            self.end = self.at
            return True
        if mark[0] == "{" and self._is_next_call(text):
            self.end = self.at = text.rindex(",", self.begin, self.at)
            return True
        rest = text[self.at : self.at + WHITESPACE]
        if any(marker.startswith(rest) and marker != rest for marker in self.markers):
            return False
        if mark[0] == '"':
            self.in_string, self._string = True, self.at
        elif mark[0] in "{[":
            self.depth += 1
        else:
            self._close()
        self.at += 1
        return True

    def _is_next_call(self, text: str) -> bool:
        """Whether the object at this position is the next one in a list of calls, because a brace is missing."""
        is_listed = "]" in self.markers and self.depth == 1 and self.arguments_end is not None
        return is_listed and text[self.begin : self.at].rstrip().endswith(",")

    def _close(self) -> None:
        self.depth -= 1
        if self.depth == 1 and self.arguments_end is None:
            self.arguments_end = self.at + 1
        if self.depth == 0:
            self.end = self.at + 1

    def has_begun(self, text: str, position: int) -> bool:
        """Whether the object at this position has its first value, at least one character of it, or has none."""
        return _BEGUN.match(text, position, self.at) is not None

    def find_name(self, text: str) -> str | None:
        """The function's name, if the text begins with the name and the arguments, in this order."""
        head = _HEAD.match(text, self.begin, self.at)
        if head is None or not self.has_begun(text, head.end()):
            return None
        self.taken = head.end()
        return head[1]

    def take_arguments(self, text: str) -> str:
        """The new part of the arguments. `find_name` must have found the name."""
        start, self.taken = self.taken, self.at if self.arguments_end is None else self.arguments_end
        return self._repaired(text, start, self.taken)

    def written(self, text: str) -> str:
        """The object, with line breaks escaped in strings, and with brackets that are missing before a marker."""
        written = self._repaired(text, self.begin, self.at)
        return written if self.in_string else written + _missing_brackets(written)

    def whole(self, text: str) -> tuple[str, str]:
        """Name and arguments of the complete call."""
        return read_call(self.written(text))

    def _repaired(self, text: str, start: int, end: int) -> str:
        parts = list[str]()
        for position in self.controls[bisect_left(self.controls, start) : bisect_left(self.controls, end)]:
            parts += [text[start:position], json.dumps(text[position])[1:-1]]
            start = position + 1
        return "".join([*parts, text[start:end]])


def _missing_brackets(text: str) -> str:
    """The closing brackets of all that is open at the end."""
    missing = list[str]()
    for mark in _STRING_OR_BRACKET.findall(text):
        if mark in _PAIRS:
            missing.append(_PAIRS[mark])
        elif missing and mark == missing[-1]:
            missing.pop()
    return "".join(reversed(missing))


class NamedCall:
    """A name between two texts, then the arguments as a JSON object, see `PartialCall`.

    `words`: other words may follow the name.
    """

    def __init__(
        self,
        begin: int,
        functions: Functions,
        markers: tuple[str, ...] = (),
        *,
        before: str,
        after: str,
        words: bool = False,
    ) -> None:
        self.begin = self.at = begin
        self.end: int | None = None
        self._before, self._after, self._functions, self._words = before, after, functions, words
        self._markers = markers
        self._name = ""
        self._arguments: PartialObject | None = None  # None also where the model wrote none

    def read(self, text: str) -> None:
        """Read up to the end of the object or of the text.

        Raises:
            NotAToolCall: there is no name, or something else than an object.
        """
        if self._arguments is None and self.end is None:
            self._read_name(text)
        if self._arguments is not None:
            self._arguments.read(text)
            self.at, self.end = self._arguments.at, self._arguments.end

    def _read_name(self, text: str) -> None:
        start = self.begin + len(self._before)
        cut = text.find(self._after, start)
        name = text[start:] if cut < 0 else text[start:cut]
        if self._words and (words := _WORDS.fullmatch(name)):
            name = words[1]
        if not NAME.fullmatch(name) and (cut >= 0 or not _BEGUN_NAME.fullmatch(name[: -len(self._after)])):
            _reject("no name")
        if cut >= 0:
            self._name = name
            self._begin_arguments(text, cut + len(self._after))

    def _begin_arguments(self, text: str, after: int) -> None:
        """An object, or null or a marker where there are no arguments."""
        rest = without_leading_space(text[after:])
        if rest is None:
            _reject("no object")
        at = len(text) - len(rest)
        ends = (*self._markers, "null")
        if rest.startswith("{"):
            self._arguments = PartialObject(at, self._functions, self._markers, taken=at)
        elif rest.startswith(ends):
            self.at = self.end = at + 4 * rest.startswith("null")
        elif not any(end.startswith(rest) for end in ends):
            _reject("no object")

    def find_name(self, text: str) -> str | None:
        arguments = self._arguments
        return self._name if arguments is not None and arguments.has_begun(text, arguments.begin) else None

    def take_arguments(self, text: str) -> str:
        assert self._arguments is not None
        self._arguments.arguments_end = None  # nested objects are parts of the arguments
        return self._arguments.take_arguments(text)

    def whole(self, text: str) -> tuple[str, str]:
        if self._arguments is None:
            return self._name, "{}"
        arguments = self._arguments.written(text)
        try:
            _DECODER.decode(arguments)
        except (ValueError, RecursionError) as error:
            raise NotAToolCall(str(error)) from None
        return self._name, arguments


def _reject(what: str) -> NoReturn:
    raise NotAToolCall(what)


_DECODER = json.JSONDecoder(parse_constant=_reject)  # NaN and Infinity are no JSON


def read_call(text: str) -> tuple[str, str]:
    """Name and arguments of a complete call. The arguments are JSON text, unchanged. Without any they are "{}".

    Raises:
        NotAToolCall: the object is not valid JSON, or not a call.
    """
    try:
        fields = _fields(text)
        name = json.loads(fields["name"])
        given = [fields[key] for key in ("arguments", "parameters") if key in fields]
        [arguments] = given if given or fields.keys() - _WITHOUT_ARGUMENTS else ["{}"]
        arguments = "{}" if arguments == "null" else arguments
        name.encode()  # fails for an unpaired surrogate
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        raise NotAToolCall(str(error)) from None
    if not name or not arguments.startswith("{"):
        _reject("no name, or arguments that are no object")
    return name, arguments


def _fields(text: str) -> dict[str, str]:
    """The values of a JSON object, as text.

    Raises:
        ValueError, RecursionError: it is not valid JSON, or has a key twice.
    """
    fields: dict[str, str] = {}
    at, following = 1, ","
    while following == ",":
        key = _KEY.match(text, at)
        if key is None:
            _reject("no key")
        _, at = _DECODER.raw_decode(text, key.end())
        name = json.loads(key[1])
        if name in fields:
            _reject("a key twice")
        fields[name] = text[key.end() : at]
        end = _NEXT.match(text, at)
        if end is None:
            _reject("no end")
        following, at = end[1], end.end()
    if at != len(text):
        _reject("a bracket too many")
    return fields
