"""Every keyword of JSON Schema that forbids something is enforced or refused by name, as the table in the docs says."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

import llguidance
import pytest
from msgspec.structs import replace

from eagle_server.engine.grammars.grammars import CompiledGrammar, Grammars, Vocabulary
from eagle_server.request import Grammar, GrammarError
from eagle_server.text.tools.formats import HERMES
from eagle_server.text.tools.grammars import STRING_FORMATS, call_grammar, json_rule
from tests.support.grammars import VOCAB, json_tokenizer

DOCUMENT = Path(__file__).parents[3] / "docs" / "structured-output.md"
TAGGED = {"properties": {"kind": {"const": "b"}, "n": {"type": "integer"}}, "required": ["kind"], "type": "object"}
EVEN = {"type": "integer", "multipleOf": 2}

# (schema, values that conform to it, values that do not)
ENFORCED: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "string"}, ["a"], [1, None]),
    ({"type": ["integer", "null"]}, [1, None], ["a", 1.5]),
    ({"enum": ["a", 1, None]}, ["a", 1, None], ["b", 2]),
    ({"type": "string", "enum": ["a", 1]}, ["a"], [1]),
    ({"const": {"a": [1]}}, [{"a": [1]}], [{"a": [2]}]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "abc"], ["a", "abcd"]),
    ({"type": "string", "pattern": "^a+$"}, ["aa"], ["ab"]),
    ({"type": "string", "pattern": "b"}, ["abc"], ["aac"]),
    ({"type": "string", "pattern": "^a*$", "maxLength": 2}, ["aa"], ["aaa"]),
    ({"type": "string", "format": "date"}, ["2026-11-22"], ["2026-13-22", "today"]),
    ({"type": "string", "format": "date-time"}, ["2026-11-22T10:00:00Z"], ["2026-11-22"]),
    ({"type": "string", "format": "time"}, ["10:00:00Z"], ["25:00:00Z"]),
    ({"type": "string", "format": "duration"}, ["P1D"], ["1D"]),
    ({"type": "string", "format": "email"}, ["a@b.com"], ["a"]),
    ({"type": "string", "format": "hostname"}, ["a.com"], ["-a"]),
    ({"type": "string", "format": "ipv4"}, ["1.2.3.4"], ["1.2.3.400"]),
    ({"type": "string", "format": "ipv6"}, ["::1"], ["1.2.3.4"]),
    ({"type": "string", "format": "uri"}, ["http://a/b"], ["a b"]),
    ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123"]),
    ({"type": "integer", "minimum": -2, "maximum": 30}, [-2, 30], [-3, 31]),
    ({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 3}, [2], [1, 3]),
    ({"type": "number", "minimum": 0.5}, [0.5, 7], [0.4, -1]),
    (EVEN, [4, 0], [3]),
    ({"type": "number", "multipleOf": 0.5}, [1.5], [1.3]),
    ({"type": "array", "items": EVEN}, [[2, 4], []], [[2, 3]]),
    ({"type": "array", "prefixItems": [EVEN], "items": {"type": "string"}}, [[2, "a"]], [[1], [2, 2]]),
    ({"type": "array", "prefixItems": [EVEN], "items": False}, [[2]], [[2, 2]]),
    ({"type": "array", "minItems": 2}, [[1, 2]], [[1]]),
    ({"type": "array", "maxItems": 1}, [[], [1]], [[1, 2]]),
    ({"type": "object", "properties": {"a": EVEN}}, [{"a": 2}, {}, {"b": 1}], [{"a": 1}]),
    ({"type": "object", "properties": {"a": EVEN}, "required": ["a"]}, [{"a": 2}], [{}]),
    ({"type": "object", "properties": {"a": {}}, "additionalProperties": False}, [{"a": 1}, {}], [{"b": 1}]),
    ({"type": "object", "additionalProperties": EVEN}, [{"b": 2}], [{"b": 1}]),
    ({"type": "object", "patternProperties": {"^a": EVEN}}, [{"a1": 2, "b": 1}], [{"a1": 1}]),
    ({"type": "object", "minProperties": 1, "maxProperties": 2}, [{"a": 1}], [{}, {"a": 1, "b": 1, "c": 1}]),
    ({"anyOf": [EVEN, {"type": "string"}]}, [2, "a"], [1]),
    ({"oneOf": [EVEN, {"type": "string"}]}, [2, "a"], [1]),
    ({"oneOf": [TAGGED, {**TAGGED, "properties": {"kind": {"const": "c"}}}]}, [{"kind": "c"}], [{"kind": "d"}]),
    ({"allOf": [EVEN, {"minimum": 3}]}, [4], [2, 5]),
    ({"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": 1}]}, [0, 7], [3]),
    ({"$defs": {"e": EVEN}, "$ref": "#/$defs/e"}, [2], [1]),
    ({"definitions": {"e": EVEN}, "$ref": "#/definitions/e", "maximum": 2}, [2], [1, 4]),
    ({"$defs": {"e": {"$anchor": "even", **EVEN}}, "$ref": "#even"}, [2], [1]),
    ({"type": "object", "properties": {"next": {"$ref": "#"}}}, [{"next": {}}], [{"next": 1}]),
    ({"title": "t", "description": "d", "default": 1, "examples": [1], "$comment": "c", **EVEN}, [2], [3]),
    (True, [1, {"a": []}], []),
    ({"type": "array", "items": [EVEN], "additionalItems": {"type": "string"}}, [[2, "a"]], [[2, 2], [1]]),
    ({"type": "array", "items": [EVEN], "additionalItems": False}, [[2], []], [[2, 2]]),
    ({"contains": {"type": "string"}, "minContains": 0}, [[1], [], 1], []),
    ({"if": {"type": "string"}, "then": {}, "else": True}, [1, "a"], []),
    ({"if": {"type": "string"}}, [1, "a"], []),
    ({"propertyNames": {"format": "x"}}, [{"a": 1}], []),
    ({"dependentRequired": {"a": []}, "dependentSchemas": {"a": True}, "dependencies": {"a": {}}}, [{"a": 1}], []),
    ({"properties": {"uniqueItems": EVEN, "not": False}}, [{"uniqueItems": 2}], [{"uniqueItems": 1}, {"not": 1}]),
    ({"type": "string", "format": "password"}, ["a", ""], [1]),
    ({"type": "string", "format": "binary", "maxLength": 1}, ["a"], ["ab"]),
    ({"format": "int32"}, [1, "a", None], []),
    ({"type": "object", "additionalProperties": {"type": "string", "format": "path"}}, [{"a": "/"}], [{"a": 1}]),
    ({"anyOf": [{"type": "string", "format": "phone"}, {"type": "null"}]}, ["1", None], [1]),
    ({"$defs": {"c": {"type": "string", "format": "color"}}, "$ref": "#/$defs/c"}, ["red"], [1]),
    ({"properties": {"format": {"type": "string", "format": "x"}}}, [{"format": "a"}], [{"format": 1}]),
    ({"const": {"format": "x"}}, [{"format": "x"}], [{}, {"format": "y"}]),
    ({"enum": [{"format": "x"}, 1], "default": {"format": "x"}}, [{"format": "x"}, 1], [{}]),
]  # fmt: skip
ANNOTATIONS = {"password", "binary", "byte", "path", "file-path", "color", "phone", "ipv4network", "ipv6interface"} | {
    *("uri-reference", "uri-template", "iri", "iri-reference", "idn-email", "idn-hostname", "json-pointer", "regex"),
    *("relative-json-pointer", "int32", "int64", "float", "double", "decimal", "char", "base64url", "json-string"),
}  # formats of the standard, OpenAPI, pydantic and .NET
INTEGER, NUMBER, INT64 = {"type": "integer"}, {"type": "number"}, 2**63
# (schema, numbers within it, numbers outside)
BOUNDS: list[tuple[dict[str, Any], list[float], list[float]]] = [
    ({**INTEGER, "minimum": -INT64, "maximum": INT64 - 1}, [-INT64, -1, 0, INT64 - 1], [INT64, 10**20]),
    ({**INTEGER, "minimum": -INT64}, [-INT64, 0, 10**30], []),
    ({**INTEGER, "minimum": 1 - INT64, "maximum": INT64 - 1}, [1 - INT64, INT64 - 1], [INT64]),
    ({**INTEGER, "minimum": 0, "maximum": INT64 - 1}, [0, INT64 - 1], [-1, INT64]),
    ({**INTEGER, "exclusiveMinimum": -INT64 - 1, "exclusiveMaximum": INT64}, [-INT64, INT64 - 1], [INT64]),
    ({**INTEGER, "minimum": -INT64, "exclusiveMaximum": 5}, [-INT64, 4], [5]),
    ({**INTEGER, "minimum": 0, "maximum": 2**64 - 1}, [0, INT64, 2**64 - 1], [-1]),
    ({**INTEGER, "minimum": 1, "exclusiveMaximum": 2**64}, [1, 2**64 - 1], [0]),
    ({**INTEGER, "minimum": -(2**31), "maximum": 2**31 - 1}, [-(2**31), 2**31 - 1], [-(2**31) - 1, 2**31]),
    ({**INTEGER, "minimum": 0, "maximum": 2**32 - 1}, [0, 2**32 - 1], [-1, 2**32]),
    ({**INTEGER, "minimum": -(2**53), "maximum": 2**53}, [-(2**53), 2**53], [-(2**53) - 1, 2**53 + 1]),
    ({**INTEGER, "exclusiveMinimum": -(2**60), "exclusiveMaximum": 2**60}, [0, 2**59], [-(2**60), 2**60]),
    ({**INTEGER, "maximum": 2**53 + 3}, [0, 2**53], [2**53 + 4]),
    ({**INTEGER, "minimum": -(2**60), "maximum": 2**60, "exclusiveMaximum": True}, [0, -(2**60)], [2**60]),
    ({**INTEGER, "minimum": 0, "maximum": 9223372036854775806}, [0, 2**62], [-1, INT64 - 1, INT64]),
    ({"type": ["integer", "null"], "minimum": -INT64, "maximum": INT64 - 1}, [-INT64, INT64 - 1], [INT64]),
    ({**INTEGER, "minimum": -9.223372036854776e18, "maximum": 9.223372036854776e18, "multipleOf": 5}, [-5, 10], [3]),
    ({"anyOf": [{**INTEGER, "minimum": -INT64}, {"type": "null"}]}, [-INT64, 3], [0.5]),
    ({**NUMBER, "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, [-1e17, 0.5, 1e300], []),
    ({**NUMBER, "minimum": 0, "maximum": 3.4028235e38}, [0.5, 3e38], [-0.5]),
    ({**NUMBER, "minimum": -79228162514264337593543950335, "exclusiveMaximum": 0.5}, [-1e15, 0.25], [0.5]),
    ({**NUMBER, "exclusiveMinimum": -1e308, "maximum": 9e18}, [-1.5, 9 * 10**18], [9 * 10**18 + 1]),
    ({"minimum": -INT64, "maximum": 3}, [-INT64, 2.5], [4]),
]  # fmt: skip
REFUSED: dict[str, Any] = {
    "#/not": {"not": {"type": "string"}},
    "#/if": {"if": {"type": "string"}, "then": {"maxLength": 2}, "else": {"type": "integer"}},
    "#/properties/a/uniqueItems": {"properties": {"a": {"type": "array", "uniqueItems": True}}},
    "#/items/0/contains": {"items": [{"contains": {}}]},
    "#/minContains": {"contains": {}, "minContains": 2},
    "#/maxContains": {"contains": {}, "maxContains": 2},
    "#/propertyNames": {"propertyNames": {"maxLength": 3}},
    "#/dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "#/dependentSchemas": {"dependentSchemas": {"a": {"required": ["b"]}}},
    "#/then": {"if": {}, "then": False},
    "#/else": {"if": {"type": "string"}, "else": False},
    "#/uniqueItems": {"uniqueItems": True},
    "#/contains": {"contains": {}, "minContains": 0, "maxContains": 1},
    "#/$recursiveRef": {"$recursiveRef": "#"},
    "#/dependencies": {"dependencies": {"a": ["b"]}},
    "#/unevaluatedProperties": {"unevaluatedProperties": False},
    "#/unevaluatedItems": {"unevaluatedItems": False},
    "#/$dynamicRef": {"$dynamicRef": "#a"},
    "maxProperties only supported when": {"type": "object", "properties": {"a": {}}, "maxProperties": 1},
    "the range of an integer cannot be enforced: minimum 9000000000000000000": {
        "minimum": 9e18,
        **INTEGER,
    },
    "the range of a number cannot be enforced: minimum 1e18": {"type": "number", "minimum": 10**18},
    "$ref to another document cannot be followed: http://a/b": {"$ref": "http://a/b"},
    "$ref to what the schema does not have: #/$defs/a": {"$ref": "#/$defs/a"},
    "minimum (5) is greater": {"type": "integer", "minimum": 5, "maximum": 3, "title": "panic NoExtension"},
    "Expected f64": {"type": "integer", "exclusiveMaximum": 2**62, "maximum": "a"},
    "oneOf": {"oneOf": [{"minimum": 1}, {"maximum": 3}]},
    "not disjoint": {"patternProperties": {"a": {}, "b": {"type": "string"}}},
    "minLength (3) is greater than maxLength (1)": {"type": "string", "minLength": 3, "maxLength": 1},
    "anyOf is empty": {"enum": []},
    "required property 'b' is unsatisfiable": {"type": "object", "required": ["b"], "additionalProperties": False},
    "required item is unsatisfiable": {"type": "array", "items": False, "minItems": 1},
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(json_tokenizer, VOCAB, [0])


def compiled(grammars: Grammars, schema: Any) -> CompiledGrammar:
    return grammars.compile(Grammar(kind="json_schema", source=json.dumps(schema))).result()


@pytest.mark.parametrize(("schema", "right", "wrong"), ENFORCED, ids=lambda value: json.dumps(value)[:60])
def test_a_keyword_is_enforced(grammars: Grammars, schema: Any, right: list[Any], wrong: list[Any]) -> None:
    found = compiled(grammars, schema)
    for value in (*right, *wrong):
        assert conforms(found, json.dumps(value)) == (value in right), value


def conforms(found: CompiledGrammar, text: str) -> bool:
    matcher, tokenizer = found.make(), json_tokenizer()
    tokens = [tokenizer.token_to_id(character) for character in text]
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(("schema", "right", "wrong"), BOUNDS, ids=lambda value: json.dumps(value)[:80])
def test_bounds_of_schema_generators_are_served(
    grammars: Grammars, schema: Any, right: list[float], wrong: list[float]
) -> None:
    found = compiled(grammars, schema)
    for value in (*right, *wrong):
        digits = format(Decimal(value), "f")
        assert conforms(found, digits) == (value in right), digits


def test_random_numbers_are_within_the_bounds(grammars: Grammars) -> None:
    """Every number that is allowed conforms. Within 2^53 every number that conforms is allowed."""
    draw = random.Random(7)
    for _ in range(60):
        kind, low = draw.choice(["integer", "number"]), _any_integer(draw, 59)
        high = low + abs(_any_integer(draw, 60))
        strict_low, strict_high = draw.random() < 0.5, draw.random() < 0.5
        lower, upper = "exclusiveMinimum" if strict_low else "minimum", "exclusiveMaximum" if strict_high else "maximum"
        if high - low < 3:
            continue
        found = compiled(grammars, {"type": kind, lower: low, upper: high})
        steps = [draw.randint(low, high), *(bound + step for bound in (low, high) for step in (-129, -1, 0, 1, 129))]
        for value in steps:
            right = low + strict_low <= value <= high - strict_high
            allowed = conforms(found, str(value))
            assert right or not allowed, (kind, low, high, value)
            assert allowed or not right or max(abs(low), abs(high)) > 2**53, (kind, low, high, value)


def _any_integer(draw: random.Random, bits: int) -> int:
    most = 2 ** draw.randint(2, bits)
    return draw.randint(-most, most)


def documented(row: str) -> list[str]:
    """The code in a row of the table of keywords."""
    line = re.search(rf"^\| {row} \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert line is not None
    return re.findall(r"`(.+?)`", line[1])


def keywords_of(schemas: Iterable[Any]) -> set[str]:
    found = set[str]()
    for schema in schemas:
        if isinstance(schema, dict):
            found |= schema.keys() | keywords_of(schema.values())
        elif isinstance(schema, list):
            found |= keywords_of(schema)
    return found


def test_every_documented_keyword_has_an_example() -> None:
    examples = keywords_of(schema for schema, _, wrong in ENFORCED if wrong)
    assert {*documented("enforced"), *documented("enforced in part, otherwise refused")} <= examples
    places = {words.rpartition("/")[2] for words in REFUSED if words.startswith("#")}
    assert {*documented("refused")} - {"$ref", "pattern"} == places


@pytest.mark.parametrize(
    "code", documented("taken without effect") + documented("taken, since these values allow everything")
)
def test_a_documented_keyword_that_allows_everything_is_taken(grammars: Grammars, code: str) -> None:
    key, _, value = code.partition(": ")
    schema = {key: json.loads(value or '"a"')}
    alone, nested = compiled(grammars, schema), compiled(grammars, {"properties": {"a": {"items": schema}}})
    for text in ("1", '"a"', "[1, 1]", '{"a": 1, "b": {}}'):
        assert conforms(alone, text)
        assert conforms(nested, f'{{"a": [{text}]}}')


def test_the_formats_that_are_enforced_are_those_that_the_library_knows() -> None:
    known = {
        name for name in STRING_FORMATS | ANNOTATIONS if not _matcher({"type": "string", "format": name}).is_error()
    }
    assert known == STRING_FORMATS
    listed = re.search(r"^Enforced formats: (.*)\.", DOCUMENT.read_text(), re.MULTILINE)
    assert listed is not None
    assert set(re.findall(r"`(.+?)`", listed[1])) == STRING_FORMATS


def _matcher(schema: Any) -> llguidance.LLMatcher:
    """llguidance's own, without what is changed before a schema goes to it."""
    vocabulary = Vocabulary.of(json_tokenizer(), VOCAB, 0)
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary), n_vocab=VOCAB, eos_token=[0])
    return llguidance.LLMatcher(tokenizer, json_rule("start", schema), log_level=0)


def test_a_format_at_every_depth_is_taken(grammars: Grammars) -> None:
    schema: Any = {"type": "string", "format": "ipv4network"}
    nested = {"type": "array", "prefixItems": [{"allOf": [schema]}], "items": {"oneOf": [schema, {"type": "null"}]}}
    compiled(grammars, {"properties": {"a": nested}, "patternProperties": {"^b": schema}})


@pytest.mark.parametrize("words", REFUSED)
def test_a_keyword_that_cannot_be_enforced_is_refused_by_name(grammars: Grammars, words: str) -> None:
    with pytest.raises(ValueError, match="grammar cannot be followed: ") as error:
        compiled(grammars, REFUSED[words])
    assert words in str(error.value)


THINKING = 'thinking: /a*/\nheader: ""\n'


@pytest.mark.parametrize("thinking", ["", THINKING])
@pytest.mark.parametrize("beside", [False, True])
def test_a_schema_of_a_tool_is_refused_with_its_parameter(grammars: Grammars, thinking: str, *, beside: bool) -> None:
    schemas = [{"type": "object"}, {"type": "object", "not": {}}, {"type": "object", "if": {}, "then": False}]
    calls = call_grammar(HERMES, [(f"f{number}", schema) for number, schema in enumerate(schemas)], {}, single=True)
    params = tuple(f"tool {number}" for number in range(3))
    grammar = replace(calls, thinking=thinking, call_params=params)
    if beside:
        answer = Grammar(kind="ebnf", source='root ::= call-2\ncall-2 ::= "a"', thinking=thinking, call_params=params)
        grammar = replace(answer, calls=calls.source)
    with pytest.raises(GrammarError, match="tool 1 cannot be followed: .* enforced: #/not") as error:
        grammars.compile(grammar).result()
    assert error.value.param == "tool 1"


@pytest.mark.parametrize("thinking", ["", THINKING])
def test_beside_tools_an_error_of_the_answer_names_its_parameter(grammars: Grammars, thinking: str) -> None:
    calls = call_grammar(HERMES, [("f", {"type": "object"})], {}, single=True).source
    for kind, source in (("json_schema", json.dumps({"not": {}})), ("regex", "(a"), ("ebnf", "root ::= call-0")):
        grammar = Grammar(kind=kind, source=source, calls=calls, thinking=thinking, param="form", call_params=("f",))
        with pytest.raises(GrammarError, match="form cannot be followed: "):
            grammars.compile(grammar).result()


def test_the_clients_own_compiler_options_are_dropped(grammars: Grammars) -> None:
    with pytest.raises(ValueError, match="#/not"):
        compiled(grammars, {"x-guidance": {"lenient": True}, "not": {}})
