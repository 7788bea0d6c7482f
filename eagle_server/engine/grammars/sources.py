"""Grammars of requests as llguidance spells them: Lark, with JSON schemas in it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import llguidance

from eagle_server.engine.grammars.json_schemas import places, simplified
from eagle_server.request import Grammar
from eagle_server.text.tools.grammars import JSON, json_rule, literal

# Otherwise a mask allows only one tokenization of a text that the grammar forces.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
_OWN_OPTIONS = re.compile(r"^%llguidance .*\n", re.MULTILINE)
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[([^\]]*)\]")
_REGEX_ERROR = re.compile(r"^error: (.*)$", re.MULTILINE)
_PLACE = re.compile(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?(.*)")
_CALL = re.compile(r"call_(\d+)")  # begins the names of rules of one function's calls
_WORDS = {  # of llguidance, and ours
    re.compile(r"for integer range: min=(?:Some\()?([^),]+)\)?, max=(?:Some\()?([^)\s]+)"): (
        r"the range of an integer cannot be enforced: minimum \1, maximum \2"
    ),
    re.compile(r"for float range: min=(?:Some\()?([^),]+)\)?, max=(?:Some\()?([^)\s]+)"): (
        r"the range of a number cannot be enforced: minimum \1, maximum \2"
    ),
    re.compile(r"Resource '(.*?)' is not present"): r"$ref to another document cannot be followed: \1",
    re.compile(r"Pointer '(.*?)' does not exist"): r"$ref to what the schema does not have: #\1",
    re.compile("panic"): "llguidance cannot read it",
    re.compile("NoExtension"): "it matches no text",
}
_CODE_POINT = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)


def llguidance_source(grammar: Grammar) -> str:
    """The grammar in the form that llguidance's matchers take.

    Raises:
        ValueError: the source has a wrong form. Most errors show only when a matcher is made.
    """
    source = _without_effect_left_out(_OWN_OPTIONS.sub("", _lark(grammar)))
    if not (grammar.thinking or grammar.calls):
        return _OPTIONS + source
    start, rules = "answer", grammar.thinking + _nested("answer", source)
    if grammar.thinking and grammar.kind != "calls":
        start = f"header {start}"
    if grammar.calls:
        start, rules = f"({start} | calls)", rules + _nested("calls", _without_effect_left_out(grammar.calls))
    if grammar.thinking:
        start = f"thinking {start}"
    return f"{_OPTIONS}start: {start}\n{rules}"


def _nested(rule: str, source: str) -> str:
    """A grammar as one rule of another, which may have rules of the same names."""
    return f"{rule}: %lark {{\n{source}\n}}\n"


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
        case "calls":
            return grammar.source


def _without_effect_left_out(source: str) -> str:
    return "".join(map(_simplified, source.splitlines(keepends=True)))


def _simplified(line: str) -> str:
    """A line of Lark. A schema at its end loses the keywords that have no effect."""
    head, mark, schema = line.partition(JSON)
    if not mark:
        return line
    try:
        return f"{head}{mark}{json.dumps(simplified(json.loads(schema)))}\n"
    except ValueError:
        return line


def _parsed(source: str) -> Any:
    try:
        return json.loads(source)
    except ValueError:  # the API has parsed it before, but Python has a limit for the digits of integers
        raise ValueError("its JSON cannot be read: a number may be too long") from None


def param_of(grammar: Grammar, error: str = "", source: str = "") -> str:
    """The client's parameter that llguidance's `error` is about, for the llguidance `source`."""
    if grammar.kind != "calls":
        return grammar.param
    call = _CALL.match(_line(error, source))
    if call is None and len(grammar.call_params) != 1:
        return grammar.param
    return grammar.call_params[0 if call is None else int(call[1])]


def readable(error: str, source: str) -> str:
    """llguidance's reason in one line, for the llguidance `source`. It names the place of unknown schema keywords."""
    line = _line(error, source)
    first = error.partition("\n")[0]  # the client's text may follow
    if match := _UNIMPLEMENTED.search(first):
        keywords = {word.strip(' "') for word in match[1].split(",")}
        found = sorted({place for schema in _schemas(line or source) for place in places(schema, keywords)}, key=len)
        return "the JSON schema has keywords that cannot be enforced: " + ", ".join(found[:8] or sorted(keywords))
    for pattern, words in _WORDS.items():
        if match := pattern.search(first):
            return match.expand(words).replace("minimum None, ", "").replace(", maximum None", "")[:300]
    if match := _REGEX_ERROR.search(error):  # the text before it repeats the expression
        return match[1]
    reason = error.split("<non-verbose/>")[0].split("<state>")[0]
    if match := _PLACE.match(reason):
        reason = match[2] if JSON in line else f"{match[2]} in line {line.strip()[:100]}"
    return " ".join(reason.split())[:300]


def _line(error: str, source: str) -> str:
    """The line of the source that has the error; "" if that is unknown."""
    place = _PLACE.match(error)
    return source.splitlines()[int(place[1]) - 1] if place else ""


def _schemas(source: str) -> Iterator[Any]:
    """The schemas that `json_rule` wrote."""
    for line in source.splitlines():
        with suppress(ValueError):
            yield json.loads(line.partition(JSON)[2])


def _character(match: re.Match[str]) -> str:
    """An escaped letter, digit or other word character of EBNF as the character itself."""
    code = match[1] or match[2] or match[3]
    value = sys.maxunicode + 1 if code is None else int(code, 16)
    return chr(value) if value <= sys.maxunicode and chr(value).isalnum() else match[0]
