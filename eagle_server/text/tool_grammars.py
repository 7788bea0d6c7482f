"""Grammars of calls, in a format of `tool_formats`: whatever follows one is a valid call of an offered function."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from eagle_server.request import Grammar
from eagle_server.text.tool_formats import ToolFormat

WHITESPACE = 32  # characters between two parts of JSON; without an end a model may write nothing else for ever
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_OTHER_ROOTS = (
    "$ref",
    "anyOf",
    "oneOf",
    "allOf",
    "const",
    "enum",
)  # xgrammar follows these, and not `type` beside them

Element = dict[str, Any]  # of a structural tag, see xgrammar's documentation


def call_grammar(
    format: ToolFormat, functions: Sequence[tuple[str, Mapping[str, Any]]], markers: Mapping[str, int], *, single: bool
) -> Grammar:
    """One call or, where the format has several and unless `single`, one or more, and nothing else.

    `functions` are names with schemas of their arguments; `markers` has the ids of those that are special tokens.
    """

    def marker(text: str) -> Element:
        return {"type": "token", "token": markers[text]} if text in markers else _text(text)

    call = _any([_object(format, name, schema) for name, schema in functions])
    # Where a marker is a token of its own, some models have a space after it, and some have none.
    space = {"type": "optional", "content": _text(" ")}
    match format.name:
        case "llama3_json":  # these models make one call at a time
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
    """A function's parameters as the schema of its arguments; without any, there are no arguments.

    Raises:
        ValueError: they need not be an object, so the grammar would allow what is no call.
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
