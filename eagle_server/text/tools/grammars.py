"""Grammars for tool calls: any text that matches one is a valid call of an offered function."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eagle_server.request import MAX_GRAMMAR_CHARACTERS, Grammar
from eagle_server.text.tools.formats import HERMES, ToolFormat
from eagle_server.text.tools.json_calls import NAME
from eagle_server.text.tools.text_calls import PYTHON_KEY, PYTHON_NAME, XML_KEY, PythonCall, XmlCall
from eagle_server.text.tools.values import types_of

JSON = "%json "  # before a schema in llguidance's Lark
MAX_WHITESPACE = 32  # characters between two JSON tokens; without a limit a model may write whitespace forever
JSON_OPTIONS = {"whitespace_pattern": rf"[ \n\r\t]{{1,{MAX_WHITESPACE}}}", "lenient": False, "coerce_one_of": False}
STRING_FORMATS = frozenset(
    {"date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
)  # of JSON Schema that llguidance enforces; all others are annotations
_BREAK, _VALUE_END = "\n", "\n</parameter>\n"
_NOTES = frozenset({"title", "description", "default", "examples", "type"})
_OBJECT_KEYWORDS = _NOTES | {"properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
_TEXT_KEYWORDS = _NOTES | {"enum", "const", "minLength", "maxLength", "anyOf", "oneOf"}
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


Signature = tuple[str, Mapping[str, Any] | None]  # a function's name and the schema of its arguments; None: any


def call_grammar(
    format: ToolFormat, functions: Sequence[Signature], tokens: Mapping[str, int], *, single: bool
) -> Grammar:
    """A grammar for one call if `single` or if the format allows only one, else for one or more calls.

    `tokens` has the ids of markers that are special tokens.

    Raises:
        ValueError: a schema cannot be enforced in this format, or the grammar is too long; the message begins after the
            name of the schema.
    """
    opening, closing = terminals(format.opening, tokens), terminals(format.closing, tokens)
    if format.separator is None:
        line = _text(_BREAK) if closing else ""
        one = f"{opening} {line} call {line} {closing}"
        start = one if single or format.single else f"{one} ({line} {one})*"
    elif format.bracket:
        calls = "call" if single else f'call ("{format.separator} " call)*'
        # After a marker that is a special token some models write a space, others do not.
        start = (f'{opening} " "? ' if opening else "") + f'"{format.bracket}" {calls} "{format.closing}"'
    elif format.closing:
        more = "" if single else f" ({_text(_BREAK)}? call)*"
        start = f"{opening} call{more} {closing}"
    else:  # one call at a time
        start = "call"
    calls = " | ".join(f"call_{number}" for number in range(len(functions)))
    rules = [f"start: {start}\n", f"call: {calls}\n"]
    size = sum(map(len, rules))
    for rule in _call_rules(format, functions, tokens):
        rules.append(rule)
        size += len(rule)
        if size > MAX_GRAMMAR_CHARACTERS:  # before the others are written
            raise ValueError(
                f"the grammar would have more than {MAX_GRAMMAR_CHARACTERS:,} characters; "
                "offer fewer functions or parameters, or let the model choose (tool_choice auto)"
            )
    return Grammar(kind="calls", source="".join(rules))


def can_write(format: ToolFormat, name: str) -> bool:
    """Whether a call in this format can have the name of this function."""
    names = PYTHON_NAME if format.call is PythonCall else NAME
    return format.begin == HERMES.begin or names.fullmatch(name) is not None  # JSON can spell all


def _call_rules(format: ToolFormat, functions: Sequence[Signature], tokens: Mapping[str, int]) -> Iterator[str]:
    """Lines of Lark; call_0 is a call of the first function."""
    for number, (name, schema) in enumerate(functions):
        _check_names(format, name, schema)
        if schema is None:
            yield _call_with_any_arguments(f"call_{number}", format, name, tokens)
        elif format.call is XmlCall:
            yield from _xml_call(f"call_{number}", name, schema)
        elif format.call is PythonCall:
            yield from _python_call(f"call_{number}", name, schema)
        else:
            yield _json_call(f"call_{number}", format, name, schema, tokens)


def _check_names(format: ToolFormat, name: str, schema: Mapping[str, Any] | None) -> None:
    """
    Raises:
        ValueError: this format cannot spell a name.
    """
    keys, wrong = PYTHON_KEY if format.call is PythonCall else XML_KEY, list[str]()
    if not can_write(format, name):
        wrong = [name]
    elif format.call in (PythonCall, XmlCall) and schema is not None:
        wrong = [key for key, _, _ in _parameters(schema) if not keys.fullmatch(key)]
    if wrong:
        raise ValueError(f"has the name {wrong[0]!r}, which cannot be written in this model's format")


def _call_with_any_arguments(rule: str, format: ToolFormat, name: str, tokens: Mapping[str, int]) -> str:
    if format.call is XmlCall:
        key, end = f"/<parameter={XML_KEY.pattern}>\\n/", _text(_VALUE_END.strip())
        call = f"{_text(f'<function={name}>{_BREAK}')} {rule}_one* {_text('</function>')}"
        text = f"{rule}_text[suffix={end}]: /(.|\\n)*/\n"
        return f"{rule}: {call}\n{rule}_one: {key} {rule}_text {_text(_BREAK)}\n{text}"
    if format.call is PythonCall:
        value = json_rule(f"{rule}_json", {})
        call = f'{_text(f"{name}(")} ({rule}_one (", " {rule}_one)*)? {_text(")")}'
        return f"{rule}: {call}\n{rule}_one: /{PYTHON_KEY.pattern}=/ {rule}_json\n{value}"
    return _json_call(rule, format, name, {"type": "object"}, tokens)


def _json_call(rule: str, format: ToolFormat, name: str, schema: Mapping[str, Any], tokens: Mapping[str, int]) -> str:
    if format.after_name:
        head, tail = format.begin + name + format.after_name, format.call_end
    else:
        head, tail = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{format.arguments}": ', "}"
    arguments = json_rule(f"{rule}_arguments", schema)
    return f"{rule}: {terminals(head, tokens)} {rule}_arguments {terminals(tail, tokens)}\n{arguments}"


def _xml_call(rule: str, name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """The parameters have their own lines, in the order of the schema."""
    parts = [_text(f"<function={name}>\n")]
    for number, (key, value, is_required) in enumerate(_parameters(schema)):
        value_rule = f"{rule}_{number}"
        parts.append(f"({_text(f'<parameter={key}>{_BREAK}')} {value_rule})" + "?" * (not is_required))
        types = types_of(value, schema)
        if types is None or "string" in types:
            yield _raw_text(value_rule, key, value)
        else:
            yield f"{value_rule}: {value_rule}_json {_text(_VALUE_END)}\n"
            yield json_rule(f"{value_rule}_json", _with_root(value, schema))
    yield f"{rule}: {' '.join(parts)} {_text('</function>')}\n"


def _is_note(keyword: str, value: Any) -> bool:
    """Whether the keyword is a format that is not enforced."""
    return keyword == "format" and isinstance(value, str) and value not in STRING_FORMATS


def _raw_text(rule: str, key: str, schema: Any) -> str:
    """A text without quotes, up to the end of its parameter.

    Raises:
        ValueError: the schema has a keyword for texts that is not supported. Lengths, `enum` and `const` are.
    """
    keywords = schema if isinstance(schema, Mapping) else {}
    parts = [part for name in ("anyOf", "oneOf") for part in _list(keywords.get(name)) if isinstance(part, Mapping)]
    allowed = [(keywords, _TEXT_KEYWORDS), *((part, _NOTES) for part in parts)]
    if unknown := {name for each, names in allowed for name in each.keys() - names if not _is_note(name, each[name])}:
        raise ValueError(f"has properties.{key} with {min(unknown)}, which cannot be enforced in this model's format")
    if texts := [keywords["const"]] if "const" in keywords else _list(keywords.get("enum")):
        values = [value if isinstance(value, str) else json.dumps(value) for value in texts]
        return f"{rule}: ({' | '.join(map(_text, values))}) {_text(_VALUE_END)}\n"
    if keywords.keys() & {"minLength", "maxLength"}:  # the text has no <, so the pattern cannot pass its end
        least, most = keywords.get("minLength", 0), keywords.get("maxLength", "")
        if not (isinstance(least, int) and isinstance(most, int | str)):
            raise ValueError(f"has properties.{key} with a length that is no integer")
        size = f"{{{least},{most}}}"
        return f"{rule}: /[^<]{size}/ {_text(_VALUE_END)}\n"
    return f"{rule}: {rule}_text {_text(_BREAK)}\n{rule}_text[suffix={_text(_VALUE_END.strip())}]: /(.|\\n)*/\n"


def _python_call(rule: str, name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """Keyword arguments, the required ones first, with JSON values."""
    required, optional = list[str](), list[str]()
    parameters = sorted(_parameters(schema), key=lambda parameter: not parameter[2])
    for number, (key, value, is_required) in enumerate(parameters):
        argument = f"{rule}_{number}"
        (required if is_required else optional).append(argument)
        yield f"{argument}: {_text(f'{key}=')} {argument}_json\n"
        yield json_rule(f"{argument}_json", _with_root(value, schema))
    arguments = ' ", " '.join(required)
    if optional:
        yield from _some(f"{rule}_some", optional)
        arguments = f'{arguments} (", " {rule}_some)?' if arguments else f"{rule}_some?"
    yield f"{rule}: {_text(f'{name}(')} {arguments} {_text(')')}\n"


def _some(rule: str, items: Sequence[str]) -> Iterator[str]:
    """One or more of the items, in their order, with commas between.

    They are from the first half, the second half or both, so the rules nest only log2(number of items) deep.
    """
    if len(items) == 1:
        yield f"{rule}: {items[0]}\n"
        return
    half = len(items) // 2
    yield f'{rule}: {rule}a (", " {rule}b)? | {rule}b\n'
    yield from _some(f"{rule}a", items[:half])
    yield from _some(f"{rule}b", items[half:])


def _parameters(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """The properties of an object: name, schema, and whether it is required.

    Raises:
        ValueError: the schema of the object has other rules, or requires what it does not describe.
    """
    if unknown := schema.keys() - _OBJECT_KEYWORDS:
        raise ValueError(f"has {min(unknown)}, which cannot be enforced in this model's format")
    properties, required = schema.get("properties") or {}, {str(key) for key in _list(schema.get("required"))}
    if not isinstance(properties, Mapping):
        raise ValueError("has properties that are no object")
    if missing := required - properties.keys():
        raise ValueError(f"requires {min(missing)}, which it does not describe")
    return [(key, value, key in required) for key, value in properties.items()]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _with_root(schema: Any, root: Mapping[str, Any]) -> Any:
    """A part of `root`, with root's definitions if the part has references."""
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    if not definitions or not isinstance(schema, Mapping) or '"$ref": ' not in json.dumps(schema):
        return schema
    return {**definitions, **schema}


def terminals(text: str, tokens: Mapping[str, int]) -> str:
    """A text in Lark, with the special tokens in it by id."""
    marker = "|".join(map(re.escape, tokens)) or "(?!)"
    return " ".join(terminal(part, tokens) for part in re.split(f"({marker})", text) if part)


def literal(text: str) -> str:
    """A regular expression for exactly this text."""
    return re.sub(r"[^\w ]", lambda match: f"\\x{{{ord(match[0]):X}}}", text)


def terminal(text: str, tokens: Mapping[str, int]) -> str:
    """A text in Lark. `tokens` has the ids of special tokens, which grammars name by id."""
    return f"<[{tokens[text]}]>" if text in tokens else _text(text)


def json_rule(name: str, schema: Any) -> str:
    """A line of Lark: rule `name` is JSON of a schema, an object or a boolean. The schema's x-guidance is replaced."""
    if isinstance(schema, Mapping):
        schema = {**schema, "x-guidance": JSON_OPTIONS}
    return f"{name}: {JSON}{json.dumps(schema)}\n"


def argument_schema(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The schema of a function's arguments. A function without parameters has no arguments.

    Raises:
        ValueError: the parameters allow values that are not objects. The arguments of a call are always an object.
    """
    if parameters is None:
        return NO_PARAMETERS
    if parameters.get("type", "object") != "object":
        raise ValueError('should be of type "object"')
    return {"type": "object", **parameters}


def _text(value: str) -> str:
    return json.dumps(value)
