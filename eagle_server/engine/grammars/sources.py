"""Grammars of requests as llguidance spells them: Lark, with JSON schemas in it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import llguidance

from eagle_server.request import Grammar
from eagle_server.text.tools.grammars import JSON, json_rule, literal

# Otherwise a mask allows only one tokenization of a text that the grammar forces.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
_OWN_OPTIONS = re.compile(r"^%llguidance .*\n", re.MULTILINE)
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[([^\]]*)\]")
_REGEX_ERROR = re.compile(r"^error: (.*)$", re.MULTILINE)
_PLACE = re.compile(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?(.*)")
_NAMED = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)  # map names to schemas
_VALUES = frozenset({"const", "enum", "default", "examples"})  # have values that are no schemas
_CODE_POINT = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)


def llguidance_source(grammar: Grammar) -> str:
    """The grammar in the form that llguidance's matchers take.

    Raises:
        ValueError: the source has a wrong form. Most errors show only when a matcher is made.
    """
    source = _OWN_OPTIONS.sub("", _lark(grammar))
    if grammar.thinking:
        source = f"start: thinking answer\n{grammar.thinking}answer: %lark {{\n{source}\n}}\n"
    return _OPTIONS + source


def _lark(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_object":
            return json_rule("start", {"type": "object"})
        case "json_schema":
            return json_rule("start", _parsed(grammar.source))
        case "regex":
            return f"start: /{llguidance.regex_to_lark(grammar.source, 'd')}/"
        case "choice":
            # One regular expression compiles faster than many alternatives.
            texts = "|".join(map(literal, json.loads(grammar.source)))
            return f"start: /{texts}/"
        case "ebnf":
            return llguidance.grammar_from("ebnf", _CODE_POINT.sub(_character, grammar.source))
        case "lark":
            return grammar.source


def _parsed(source: str) -> Any:
    try:
        return json.loads(source)
    except ValueError:  # the API has parsed it before, but Python has a limit for the digits of integers
        raise ValueError("its JSON cannot be read: a number may be too long") from None


def readable(error: str, source: str) -> str:
    """llguidance's reason in one line, for the llguidance `source`. It names the place of unknown schema keywords."""
    if match := _UNIMPLEMENTED.search(error):
        keywords = {word.strip(' "') for word in match[1].split(",")}
        places = sorted({place for schema in _schemas(source) for place in _places(schema, keywords)}, key=len)
        return "the JSON schema has keywords that cannot be enforced: " + ", ".join(places[:8] or sorted(keywords))
    if "panic" in error:
        return "llguidance cannot read it"
    if "NoExtension" in error:
        return "it matches no text"
    if match := _REGEX_ERROR.search(error):  # the text before it repeats the expression
        return match[1]
    reason = error.split("<non-verbose/>")[0].split("<state>")[0]
    if match := _PLACE.match(reason):
        line = source.splitlines()[int(match[1]) - 1]
        reason = match[2] if JSON in line else f"{match[2]} in line {line.strip()[:100]}"
    return " ".join(reason.split())[:300]


def _schemas(source: str) -> Iterator[Any]:
    """The schemas that `json_rule` wrote."""
    for line in source.splitlines():
        with suppress(ValueError):
            yield json.loads(line.partition(JSON)[2])


def _places(schema: Any, keywords: set[str], path: str = "#") -> Iterator[str]:
    """JSON pointers to the keywords in a schema."""
    if isinstance(schema, list):
        for number, part in enumerate(schema):
            yield from _places(part, keywords, f"{path}/{number}")
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        place = f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
        if key in keywords:
            yield place
        elif key in _NAMED and isinstance(value, dict):
            for name, part in value.items():
                yield from _places(part, keywords, f"{place}/{name.replace('~', '~0').replace('/', '~1')}")
        elif key not in _VALUES:
            yield from _places(value, keywords, place)


def _character(match: re.Match[str]) -> str:
    """An escaped letter, digit or other word character of EBNF as the character itself."""
    code = match[1] or match[2] or match[3]
    value = sys.maxunicode + 1 if code is None else int(code, 16)
    return chr(value) if value <= sys.maxunicode and chr(value).isalnum() else match[0]
