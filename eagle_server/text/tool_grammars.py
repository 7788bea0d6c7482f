"""Grammars for tool calls: any text that follows one is a valid call of an offered function."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from eagle_server.request import Grammar
from eagle_server.text.tool_formats import ToolFormat

JSON = "%json "  # before a schema in llguidance's Lark
MAX_WHITESPACE = 32  # characters between two JSON tokens; without a limit a model may write whitespace forever
JSON_OPTIONS = {"whitespace_pattern": rf"[ \n\r\t]{{1,{MAX_WHITESPACE}}}", "lenient": False, "coerce_one_of": False}
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def call_grammar(
    format: ToolFormat, functions: Sequence[tuple[str, Mapping[str, Any]]], markers: Mapping[str, int], *, single: bool
) -> Grammar:
    """A grammar for exactly one call. Unless `single`, for one or more calls, where the format allows more than one.

    `functions` are names with the schemas of their arguments. `markers` has the ids of markers that are special tokens.
    """
    opening, closing = terminal(format.opening, markers), terminal(format.closing, markers)
    # After a marker that is a special token some models write a space, others do not.
    match format.name:
        case "llama3_json":  # one call at a time
            start = "call"
        case "mistral":
            calls = "call" if single else 'call (", " call)*'
            start = f'{opening} " "? "[" {calls} "]"'
        case _:
            one = f'{opening} "\\n" call "\\n" {closing}'
            start = one if single else f'{one} ("\\n" {one})*'
    calls = " | ".join(f"call_{number}" for number in range(len(functions)))
    rules = [f"start: {start}\n", f"call: {calls}\n"]
    for number, (name, schema) in enumerate(functions):
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{format.arguments}": '
        rules.append(f'call_{number}: {_text(head)} arguments_{number} "}}"\n')
        rules.append(json_rule(f"arguments_{number}", schema))
    return Grammar(kind="lark", source="".join(rules))


def terminal(text: str, tokens: Mapping[str, int]) -> str:
    """A text in Lark. `tokens` has the ids of special tokens, which grammars name by id."""
    return f"<[{tokens[text]}]>" if text in tokens else _text(text)


def json_rule(name: str, schema: Any) -> str:
    """A line of Lark: rule `name` is JSON of a schema, which is an object or a boolean. Its own options are dropped."""
    if isinstance(schema, Mapping):
        schema = {**schema, "x-guidance": JSON_OPTIONS}
    return f"{name}: {JSON}{json.dumps(schema)}\n"


def argument_schema(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The schema of a function's arguments. A function without parameters has no arguments.

    Raises:
        ValueError: the parameters allow other values than objects, which no call can have.
    """
    if parameters is None:
        return NO_PARAMETERS
    if parameters.get("type", "object") != "object":
        raise ValueError('should be of type "object"')
    return {"type": "object", **parameters}


def _text(value: str) -> str:
    return json.dumps(value)
