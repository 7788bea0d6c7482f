"""Reads the JSON object of a tool call, both while it grows and when it is complete."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

_S = r"[ \t\n\r]*"  # JSON's whitespace
_FEW = r"[ \t\n\r]{0,64}"  # bounded, because the pattern is tried again for every piece of text
# Matches the beginning of most calls, up to the arguments. Longer names, names with escapes and other key orders are
# read when the object is complete.
_HEAD = re.compile(
    rf'\{{{_FEW}"name"{_FEW}:{_FEW}"([^"\\\x00-\x1f]{{1,256}})"{_FEW},{_FEW}"(?:arguments|parameters)"{_FEW}:{_FEW}(?=\{{)'
)
_OUTSIDE_STRINGS = re.compile(r'["{}\[\]]')
_INSIDE_STRINGS = re.compile(r'["\\\x00-\x1f]')
_KEY = re.compile(rf'{_S}("(?:[^"\\]|\\.)*"){_S}:{_S}')
NAME = re.compile(r"[^\s<>{}\[\]\"]{1,256}")
_BEGUN_NAME = re.compile(r"[^\s<>{}\[\]\"]{0,256}")
_WORDS = re.compile(r"([^\s<]{1,256})[\s<].{0,256}")
_NEXT = re.compile(rf"{_S}([,}}])")


Functions = Mapping[str, Mapping[str, Any]]  # the schemas of the arguments by name


class NotAToolCall(ValueError):
    """The text is not a tool call."""


class PartialCall(Protocol):
    """A tool call in a growing text. It begins at position `begin`. All positions count from the text's start.

    `read` reads up to the end of the call or of the text. It sets `end` at the end of the call. If it raises
    NotAToolCall, the text before `at` has been read. `find_name` returns the name as soon as it is certain.
    `take_arguments` then returns the new part of the arguments as JSON. `whole` returns name and arguments of a
    complete call; it may raise NotAToolCall.
    """

    begin: int
    at: int
    end: int | None

    def read(self, text: str) -> None: ...

    def find_name(self, text: str) -> str | None: ...

    def take_arguments(self, text: str) -> str: ...

    def whole(self, text: str) -> tuple[str, str]: ...


@dataclass
class PartialObject:
    """A JSON object with the name and the arguments of a call, see `PartialCall`."""

    begin: int
    functions: Functions
    at: int = -1  # the text before this position has been read
    depth: int = 0
    in_string: bool = False
    end: int | None = None
    arguments_end: int | None = None  # end of the first nested object or list
    taken: int = 0  # arguments before this position have been returned

    def __post_init__(self) -> None:
        self.at = self.begin

    def read(self, text: str) -> None:
        """Read up to the end of the object or of the text.

        Raises:
            NotAToolCall: a string has a control character, at position `at`.
        """
        while self.end is None:
            mark = (_INSIDE_STRINGS if self.in_string else _OUTSIDE_STRINGS).search(text, self.at)
            if mark is None:
                self.at = len(text)
                return
            self.at = mark.start()
            match mark[0]:
                case "\\":
                    if self.at + 1 == len(text):
                        return  # the escaped character has not arrived yet
                    self.at += 1
                case '"':
                    self.in_string = not self.in_string
                case "{" | "[":
                    self.depth += 1
                case "}" | "]":
                    self._close()
                case _:
                    raise NotAToolCall("a control character")
            self.at += 1

    def _close(self) -> None:
        self.depth -= 1
        if self.depth == 1 and self.arguments_end is None:
            self.arguments_end = self.at + 1
        if self.depth == 0:
            self.end = self.at + 1

    def find_name(self, text: str) -> str | None:
        """The function's name, if the text begins with the name and the arguments, in this order."""
        head = _HEAD.match(text, self.begin, self.at)
        if head is None:
            return None
        self.taken = head.end()
        return head[1]

    def take_arguments(self, text: str) -> str:
        """The new part of the arguments. `find_name` must have found the name."""
        start, self.taken = self.taken, self.at if self.arguments_end is None else self.arguments_end
        return text[start : self.taken]

    def whole(self, text: str) -> tuple[str, str]:
        """Name and arguments of the complete call."""
        return read_call(text[self.begin : self.end])


class NamedCall:
    """A name between two texts, then the arguments as a JSON object, see `PartialCall`.

    `words`: other words may follow the name.
    """

    def __init__(self, begin: int, functions: Functions, *, before: str, after: str, words: bool = False) -> None:
        self.begin = self.at = begin
        self.end: int | None = None
        self._before, self._after, self._functions, self._words = before, after, functions, words
        self._name = ""
        self._arguments: PartialObject | None = None

    def read(self, text: str) -> None:
        """Read up to the end of the object or of the text.

        Raises:
            NotAToolCall: there is no name, no object, or the object has a control character in a string.
        """
        if self._arguments is None and not self._read_name(text):
            return
        assert self._arguments is not None
        try:
            self._arguments.read(text)
        finally:
            self.at, self.end = self._arguments.at, self._arguments.end

    def _read_name(self, text: str) -> bool:
        start = self.begin + len(self._before)
        cut = text.find(self._after, start)
        name = text[start:] if cut < 0 else text[start:cut]
        if self._words and (words := _WORDS.fullmatch(name)):
            name = words[1]
        if not NAME.fullmatch(name) and (cut >= 0 or not _BEGUN_NAME.fullmatch(name[: -len(self._after)])):
            _reject("no name")
        at = cut + len(self._after)
        if cut >= 0 and self._words:
            at += len(text[at:]) - len(text[at:].lstrip(" \n"))
        if cut < 0 or at == len(text):
            return False
        if text[at] != "{":
            _reject("no object")
        self._name, self._arguments = name, PartialObject(at, self._functions, taken=at)
        return True

    def find_name(self, text: str) -> str | None:
        return self._name or None

    def take_arguments(self, text: str) -> str:
        assert self._arguments is not None
        start, self._arguments.taken = self._arguments.taken, self.at
        return text[start : self.at]

    def whole(self, text: str) -> tuple[str, str]:
        assert self._arguments is not None
        arguments = text[self._arguments.begin : self.end]
        try:
            _DECODER.decode(arguments)
        except (ValueError, RecursionError) as error:
            raise NotAToolCall(str(error)) from None
        return self._name, arguments


def _reject(what: str) -> NoReturn:
    raise NotAToolCall(what)


_DECODER = json.JSONDecoder(parse_constant=_reject)  # NaN and Infinity are no JSON


def read_call(text: str) -> tuple[str, str]:
    """Name and arguments of a complete call. The arguments are JSON text, unchanged.

    Raises:
        NotAToolCall: the object is not valid JSON, or not a call.
    """
    try:
        fields = _fields(text)
        name = json.loads(fields["name"])
        [arguments] = [fields[key] for key in ("arguments", "parameters") if key in fields]
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
