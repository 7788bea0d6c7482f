"""The JSON object of a call, while it grows and when it is complete."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import NoReturn

_S = r"[ \t\n\r]*"  # JSON's white space
_FEW = r"[ \t\n\r]{0,64}"  # as much as is looked for again and again, while a text grows
# The beginning of most calls, up to the arguments; a longer one, names with escapes or other orders wait for the end.
_HEAD = re.compile(
    rf'\{{{_FEW}"name"{_FEW}:{_FEW}"([^"\\\x00-\x1f]{{1,256}})"{_FEW},{_FEW}"(?:arguments|parameters)"{_FEW}:{_FEW}(?=\{{)'
)
_OUTSIDE_STRINGS = re.compile(r'["{}\[\]]')
_INSIDE_STRINGS = re.compile(r'["\\\x00-\x1f]')
_KEY = re.compile(rf'{_S}("(?:[^"\\]|\\.)*"){_S}:{_S}')
_NEXT = re.compile(rf"{_S}([,}}])")


class Broken(ValueError):
    """No call after all."""


@dataclass
class CallObject:
    """A JSON object that begins in a growing text at `begin`. All positions count from the beginning of that text."""

    begin: int
    at: int  # up to here it was read
    depth: int = 0
    in_string: bool = False
    end: int | None = None
    arguments_to: int | None = None  # where the first value in brackets ends
    taken: int = 0  # up to here arguments were taken

    def read(self, text: str) -> None:
        """Go on to the object's end, or to that of the text.

        Raises:
            Broken: a string with a line break or the like, at `at`.
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
                    raise Broken("a control character")
            self.at += 1

    def _close(self) -> None:
        self.depth -= 1
        if self.depth == 1 and self.arguments_to is None:
            self.arguments_to = self.at + 1
        if self.depth == 0:
            self.end = self.at + 1

    def find_name(self, text: str) -> str | None:
        """The call's name, if that is certain by now because name and arguments come first and in this order."""
        head = _HEAD.match(text, self.begin, self.at)
        if head is None:
            return None
        self.taken = head.end()
        return head[1]

    def take_arguments(self, text: str) -> str:
        """What was read of the arguments since the last time, after `find_name`."""
        start, self.taken = self.taken, self.at if self.arguments_to is None else self.arguments_to
        return text[start : self.taken]


def _refuse(what: str) -> NoReturn:
    raise Broken(what)


_DECODER = json.JSONDecoder(parse_constant=_refuse)  # NaN and Infinity are Python's


def read_call(text: str) -> tuple[str, str]:
    """Name and arguments, the latter as they are written, of an object.

    Raises:
        Broken: it is no valid JSON or no call.
    """
    try:
        fields = _fields(text)
        name = json.loads(fields["name"])
        [arguments] = [fields[key] for key in ("arguments", "parameters") if key in fields]
        name.encode()  # half a surrogate pair is no text
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        raise Broken(str(error)) from None
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
