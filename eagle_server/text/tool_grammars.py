"""Grammars for tool calls: any text that follows one is a valid call of an offered function."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from eagle_server.request import Grammar
from eagle_server.text.tool_formats import ToolFormat

WHITESPACE = 32  # most characters between two JSON tokens; without a limit a model may write whitespace forever
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_OTHER_ROOTS = (
    "$ref",
    "anyOf",
    "oneOf",
    "allOf",
    "const",
    "enum",
)  # beside one of these xgrammar ignores `type`

Element = dict[str, Any]  # a part of a structural tag, see xgrammar's documentation


def call_grammar(
    format: ToolFormat, functions: Sequence[tuple[str, Mapping[str, Any]]], markers: Mapping[str, int], *, single: bool
) -> Grammar:
    """A grammar for exactly one call. Unless `single`, for one or more calls, where the format allows more than one.

    `functions` are names with the schemas of their arguments. `markers` has the ids of markers that are special tokens.
    """

    def marker(text: str) -> Element:
        return {"type": "token", "token": markers[text]} if text in markers else _text(text)

    call = _any([_object(format, name, schema) for name, schema in functions])
    # After a marker that is a special token some models write a space, others do not.
    space = {"type": "optional", "content": _text(" ")}
    match format.name:
        case "llama3_json":  # one call at a time
            elements = [call]
        case "mistral":
            calls = [call] if single else [call, _star(_text(", "), call)]
            elements = [marker(format.opening), space, _text("["), *calls, _text("]")]
        case _:
            one = [marker(format.opening), _text("\n"), call, _text("\n"), marker(format.closing)]
            elements = one if single else [*one, _star(_text("\n"), *one)]
    whole = {"type": "structural_tag", "format": _sequence(*elements)}
    return Grammar(kind="structural_tag", source=json.dumps(whole, ensure_ascii=False))


def argument_schema(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The schema of a function's arguments. A function without parameters has no arguments.

    Raises:
        ValueError: the parameters allow other values than objects, which no call can have.
    """
    if parameters is None:
        return NO_PARAMETERS
    if parameters.get("type", "object") != "object":
        raise ValueError('should be of type "object"')
    for key in _OTHER_ROOTS:
        if key in parameters:
            raise ValueError(f'should be a plain schema of type "object": {key} at its root cannot be enforced')
    return {"type": "object", **parameters}


def _object(format: ToolFormat, name: str, schema: Mapping[str, Any]) -> Element:
    head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{format.arguments}": '
    arguments = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": WHITESPACE}
    return _sequence(_text(head), arguments, _text("}"))


def _text(value: str) -> Element:
    return {"type": "const_string", "value": value}


def _sequence(*elements: Element) -> Element:
    return {"type": "sequence", "elements": list(elements)}


def _star(*elements: Element) -> Element:
    return {"type": "star", "content": _sequence(*elements)}


def _any(elements: list[Element]) -> Element:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}
