"""Converts arguments of tool calls to JSON, from plain text and from Python."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
_PYTHON = {"True": True, "False": False, "None": None}
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_STRING = re.compile(r"""(\"{3}|'{3}|"|')(?:\\.|(?!\1)[^\\])*+(?:\1|\\?\Z)""", re.DOTALL)
_NO_LITERAL = re.compile("#|and|else|for|i[fns]|not|or")  # outside strings
_PYTHON_ESCAPES = frozenset("\\'\"\nabfnrtvxuNU01234567")


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str] | None:
    """The JSON types that a schema allows, None for all. `root` is the schema that references point into.

    The schema is unchecked. An invalid one allows all types.
    """
    types, seen, parts = set[str](), set[int](), [schema]
    while parts:
        part = parts.pop()
        if not isinstance(part, Mapping):
            return None
        if id(part) in seen:  # a reference in a circle
            continue
        seen.add(id(part))
        if "$ref" in part:
            parts.append(_resolved(part["$ref"], root))
        elif (declared := part.get("type")) is not None:
            types.update(str(name) for name in (declared if isinstance(declared, list) else [declared]))
        elif "const" in part or isinstance(part.get("enum"), list):
            types.update(_type(value) for value in ([part["const"]] if "const" in part else part["enum"]))
        else:
            several = part.get("anyOf", part.get("oneOf"))
            parts += several if isinstance(several, list) and several else [None]
    return frozenset(types) or None


def json_of_text(text: str, schema: Any, root: Mapping[str, Any]) -> str:
    """The JSON of a value that is written as text: strings have no quotes. The schema decides the type."""
    types = types_of(schema, root)
    if types == frozenset({"string"}):
        return _dumped(text)
    try:
        value = _PYTHON[text.strip()] if text.strip() in _PYTHON else json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _dumped(text)
    kind = _type(value)
    if types is None or kind in types or (kind == "integer" and "number" in types):
        return text.strip() if text.strip() not in _PYTHON else _dumped(value)
    return _dumped(text)


def json_of_python(text: str) -> str:
    """The JSON of a literal of JSON or Python.

    Raises:
        ValueError: it is neither, or JSON cannot express it.
    """
    try:
        json.loads(text, parse_constant=_refuse)
        return text.strip()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError:
        pass
    # Python warns on stderr about a number that runs into a keyword, as in 1if.
    if _NO_LITERAL.search(_STRING.sub("", text)):
        raise ValueError("an operator or a comment")
    try:
        # Python warns about unknown escapes, but keeps them unchanged.
        value = ast.literal_eval(_ESCAPE.sub(_escape, text.strip()))
        dumped = json.dumps(value, ensure_ascii=False, allow_nan=False)
        dumped.encode()  # fails for half a surrogate pair
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return dumped


def _escape(match: re.Match[str]) -> str:
    return match[0] if match[1] in _PYTHON_ESCAPES else "\\" + match[0]


def _resolved(reference: Any, root: Mapping[str, Any]) -> Any:
    """The schema at a JSON pointer, None if there is none."""
    schema: Any = root
    for part in str(reference).removeprefix("#").strip("/").split("/") if reference != "#" else ():
        schema = schema.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return schema


def _type(value: Any) -> str:
    return "null" if value is None else _TYPES[type(value)]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
