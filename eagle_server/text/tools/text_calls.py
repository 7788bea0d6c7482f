"""Reads tool calls that are no JSON object: XML parameters, and calls as in Python. See `PartialCall`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from eagle_server.text.tools.json_calls import NAME, Functions, NotAToolCall
from eagle_server.text.tools.values import json_of_python, json_of_text

XML_KEY = re.compile(r"[^<>\n]{1,256}")
_XML_NAME = re.compile(rf"<function=({NAME.pattern})>")
_XML_KEY = re.compile(rf"\s{{0,64}}<parameter=({XML_KEY.pattern})>")
_XML_END = re.compile(r"\s{0,64}</function>")
_VALUE_END = re.compile(
    rf"</parameter>|<parameter=(?P<key>{XML_KEY.pattern})>|(?=</function>\s{{0,64}}</tool_call>)|(?=</tool_call>\s{{0,64}}<tool_call>)"
)
_LONGEST_END = 400  # characters
PYTHON_NAME, PYTHON_KEY = re.compile(r"[^\W\d][\w.\-]{0,255}"), re.compile(r"[^\W\d]\w{0,255}")
_PYTHON_NAME = re.compile(rf"({PYTHON_NAME.pattern})\(")
_PYTHON_KEY = re.compile(rf"\s{{0,16}}({PYTHON_KEY.pattern})\s{{0,16}}=")
_PYTHON_VALUE = re.compile(r"""\s{0,16}(?:['"\d\-\[(]|\{\s{0,16}['"}])""")  # the beginning; words may be no literals
_PYTHON_END = re.compile(r"\s{0,64}\)")
# The characters to stop at: outside strings, and inside a string by its quote.
_MARKS = {"": re.compile(r"""['"()\[\]{},]""")} | {quote: re.compile(rf"[{quote}\\]") for quote in "'\""}
_LONGEST_HEAD = 340  # characters; a longer name or key is refused


class _TextCall:
    """Base of both forms: a name, then keys with values, then an end. The arguments become JSON one by one."""

    head: re.Pattern[str]
    key: re.Pattern[str]
    closing: re.Pattern[str]

    def __init__(self, begin: int, functions: Functions, markers: tuple[str, ...] = ()) -> None:
        self.begin = self.at = begin
        self._scanned = begin  # the end of the value is not before this position
        self.end: int | None = None
        self._functions = functions
        self._name: str | None = None
        self._key: str | None = None
        self._arguments = ""
        self._keys = set[str]()
        self._taken = 0

    def read(self, text: str) -> None:
        """Read up to the end of the call or of the text.

        Raises:
            NotAToolCall: the text from `begin` is no call.
        """
        while self.end is None and self._step(text):
            pass

    def find_name(self, text: str) -> str | None:
        return self._name if len(self._arguments) > 1 or (self._key is not None and self._has_begun(text)) else None

    def take_arguments(self, text: str) -> str:
        start, self._taken = self._taken, len(self._arguments)
        return self._arguments[start:]

    def whole(self, text: str) -> tuple[str, str]:
        assert self._name is not None
        return self._name, self._arguments

    def _step(self, text: str) -> bool:
        """Read the next part. False: it is not complete yet."""
        if self._name is None:
            head = self._match(self.head, text)
            if head is not None:
                self._name, self._arguments = head[1], "{"
            return head is not None
        if self._key is not None:
            return self._read_value(text)
        if (ended := self.closing.match(text, self.at)) is not None:
            self.at = self.end = ended.end()
            self._arguments += "}"
            return True
        key = self._match(self.key, text)
        if key is not None:
            if key[1] in self._keys:
                raise NotAToolCall("a key twice")
            self._keys.add(key[1])
            self._key = key[1]
        return key is not None

    def _match(self, pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
        """The match at this position. None: it needs more text."""
        match = pattern.match(text, self.at)
        if match is None and not self._may_match(text[self.at : self.at + _LONGEST_HEAD]):
            raise NotAToolCall("neither a key nor an end")
        if match is not None:
            self.at = match.end()
        return match

    def _may_match(self, rest: str) -> bool:
        raise NotImplementedError

    def _has_begun(self, text: str) -> bool:
        """Whether the value of the first key certainly begins at this position."""
        return True

    def _read_value(self, text: str) -> bool:
        raise NotImplementedError

    def _add(self, value: str) -> None:
        """Add the argument, whose value is JSON."""
        quoted = json_of_text(self._key or "", {"type": "string"}, {})
        self._arguments += ("" if self._arguments == "{" else ", ") + f"{quoted}: {value}"
        self._key = None


class XmlCall(_TextCall):
    """<function=name>, then <parameter=key> value </parameter> for each argument, then </function>."""

    head, key, closing = _XML_NAME, _XML_KEY, _XML_END

    def _may_match(self, rest: str) -> bool:
        if ">" in rest or len(rest) == _LONGEST_HEAD:
            return False
        rest = rest.lstrip() if self._name is not None else rest
        heads = ("<function=",) if self._name is None else ("<parameter=", "</function>")
        return any(rest.startswith(head) or head.startswith(rest) for head in heads)

    def _read_value(self, text: str) -> bool:
        properties = (self._functions.get(self._name or "") or {}).get("properties")
        start = max(self._scanned, self.at)
        end = next((end for end in _VALUE_END.finditer(text, start) if self._ends_value(end, properties)), None)
        if end is None:
            self._scanned = max(start, len(text) - _LONGEST_END)
            return False
        value = text[self.at : end.start()].removeprefix("\n").removesuffix("\n")
        root = self._functions.get(self._name or "") or {}
        schema = properties.get(self._key) if isinstance(properties, dict) else None
        self._add(json_of_text(value, schema, root))
        self.at = end.end() if end[0] == "</parameter>" else end.start()
        return True

    def _ends_value(self, end: re.Match[str], properties: Any) -> bool:
        """Another parameter ends a value without an end, but not one that the schema does not know, within a line."""
        is_known = not (isinstance(properties, Mapping) and properties) or end["key"] in properties
        begins_line = end.start() == self.at or end.string[end.start() - 1] == "\n"
        return end["key"] is None or is_known or begins_line


class PythonCall(_TextCall):
    """name(key=value, ...) with literals of Python or JSON."""

    head, key, closing = _PYTHON_NAME, _PYTHON_KEY, _PYTHON_END

    def __init__(self, begin: int, functions: Functions, markers: tuple[str, ...] = ()) -> None:
        super().__init__(begin, functions, markers)
        self._brackets: list[str] = []
        self._quote = ""  # of the string at `_scanned`

    def _may_match(self, rest: str) -> bool:
        return len(rest) < _LONGEST_HEAD and re.fullmatch(r"\s*([^\W\d][\w.\-]*\s*)?", rest) is not None

    def _has_begun(self, text: str) -> bool:
        return _PYTHON_VALUE.match(text, self.at) is not None

    def _read_value(self, text: str) -> bool:
        self._scanned = max(self._scanned, self.at)
        while (match := _MARKS[self._quote].search(text, self._scanned)) is not None:
            mark = match[0]
            if mark == "\\" and match.end() == len(text):
                self._scanned = match.start()  # the escaped character has not arrived
                return False
            self._scanned = match.end() + (mark == "\\")
            if self._quote:
                self._quote = self._quote if mark == "\\" else ""
            elif mark in "'\"":
                self._quote = mark
            elif not self._brackets and mark in ",)":
                return self._complete(text, match.start())
            elif mark in "([{":
                self._brackets.append(mark)
            elif mark != "," and (not self._brackets or self._brackets.pop() + mark not in ("()", "[]", "{}")):
                raise NotAToolCall("a bracket too many")
        self._scanned = len(text)
        return False

    def _complete(self, text: str, end: int) -> bool:
        try:
            self._add(json_of_python(text[self.at : end]))
        except ValueError as error:
            raise NotAToolCall(str(error)) from None
        self.at = end + (text[end] == ",")
        return True
