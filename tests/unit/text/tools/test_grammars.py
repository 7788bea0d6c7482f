"""Tool-call grammars: the parser finds valid calls in any text that follows the grammar."""

from __future__ import annotations

import itertools
import json
import random
import string
from collections.abc import Callable, Iterator
from typing import Any

import llguidance
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from eagle_server.engine.grammars.check import GrammarCheck
from eagle_server.engine.grammars.grammars import Grammars
from eagle_server.plan import GrammarMatcher, allows
from eagle_server.text.detokenizer import IncrementalDetokenizer
from eagle_server.text.markers import special_markers
from eagle_server.text.tokenizer import FastTokenizer
from eagle_server.text.tools import grammars as tool_grammars
from eagle_server.text.tools.formats import FORMATS
from eagle_server.text.tools.grammars import argument_schema, call_grammar
from eagle_server.text.tools.parser import ToolCallParser, join
from tests.support.covering import deep_unless

END = "<end>"
SPECIAL = (END, *sorted({marker for each in FORMATS.values() for marker in each.markers}))
SIZE = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
FUNCTIONS = [("grow", SIZE), ('say "é"', argument_schema(None))]
SIMPLE = [("say", argument_schema(None))]


def tokenizer(decoder: str, *, special: bool) -> Tokenizer:
    """A tokenizer of characters, with the markers of all formats as tokens, special or not."""
    space = {"ByteLevel": {" ": "Ġ", "\n": "Ċ"}, "ByteFallback": {" ": "▁"}}[decoder]
    letters = [space.get(each, each) for each in string.printable[:95] + "\n"]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate([*SPECIAL, *letters, "Ã", "©", "é"])}, []))
    made.add_special_tokens([AddedToken(END, special=True)])
    markers = [AddedToken(marker, special=special, normalized=False) for marker in SPECIAL[1:]]
    (made.add_special_tokens if special else made.add_tokens)(markers)
    if decoder == "ByteLevel":
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    else:
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def random_text(matcher: GrammarMatcher, size: int, chance: random.Random) -> list[int]:
    """Tokens that the grammar allows, up to its end. The end token, 0, is more probable than the others."""
    tokens: list[int] = []
    while not tokens or tokens[-1]:
        mask = matcher.mask(tokens)
        assert mask is not None
        allowed = [token for token in range(size) if allows(mask, token)]
        assert allowed
        tokens.append(0 if 0 in allowed and chance.random() < 0.3 else chance.choice(allowed))
    return tokens[:-1]


@pytest.mark.parametrize(
    ("format", "special", "decoder"),
    [
        pytest.param(format, special, decoder, marks=deep_unless((special, decoder) == (True, "ByteLevel")))
        for format in FORMATS
        for special in (True, False)
        for decoder in ("ByteLevel", "ByteFallback")
    ],
)
def test_what_a_grammar_allows_is_calls_and_nothing_else(format: str, decoder: str, *, special: bool) -> None:
    made, chance = tokenizer(decoder, special=special), random.Random(format)
    fast, size = FastTokenizer(made), made.get_vocab_size()
    if "deepseek" in format and (decoder == "ByteFallback" or not special):
        pytest.skip("this tokenizer cannot spell its markers")
    functions = [*FUNCTIONS[:1], *(FUNCTIONS[1:] if FORMATS[format].begin == "{" else SIMPLE)]
    markers = special_markers(FORMATS[format].markers, fast)
    assert bool(markers) == (special and bool(FORMATS[format].markers))
    ids = {text: token for token, text in markers.items()}
    grammars, names, most = Grammars(lambda: made, size, [0]), set(), 0
    for single in (True, False):
        grammar = call_grammar(FORMATS[format], functions, ids, single=single)
        compiled = grammars.compile(grammar).result()
        for _ in range(15):
            parser = ToolCallParser(FORMATS[format], dict(functions))
            detokenizer = IncrementalDetokenizer(fast, [1], markers)
            tokens = random_text(compiled.matcher(0, []), size, chance)
            parsed = parser.push("".join(map(detokenizer.push, tokens)) + detokenizer.flush())
            rest = parser.flush()
            join(parsed.tool_calls, rest.tool_calls)
            assert parsed.content + rest.content == ""
            assert all(call.is_complete for call in parsed.tool_calls)
            for call in parsed.tool_calls:
                arguments = json.loads(call.arguments)
                assert (set(arguments) == {"n"}) if call.name == "grow" else (arguments == {})
                names.add(call.name)
            assert len(parsed.tool_calls) == 1 or not single
            most = max(most, len(parsed.tool_calls))
    assert names == {name for name, _ in functions}
    assert (most > 1) == (format not in ("llama3_json", "gpt_oss"))


def test_markers_may_have_large_ids() -> None:
    """A grammar is checked with a vocabulary of bytes, which has these ids too."""
    grammar = call_grammar(FORMATS["hermes"], [("f", {"type": "object"})], {"<tool_call>": 150_000}, single=True)
    assert "<[150000]>" in GrammarCheck(151_000).check(grammar)


def test_special_tokens_are_in_no_string() -> None:
    """The grammar allows a marker only at its place in the format, and no other special tokens."""
    made = tokenizer("ByteLevel", special=True)
    size = made.get_vocab_size()
    schema = {"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]}
    ids = {marker: made.token_to_id(marker) for marker in SPECIAL[1:]}
    grammar = call_grammar(FORMATS["hermes"], [("f", schema)], ids, single=True)
    matcher = Grammars(lambda: made, size, [0]).compile(grammar).result().matcher(0, [])
    spelled = 'Ċ{"name":Ġ"f",Ġ"arguments":Ġ{"s":Ġ"a'
    tokens = [ids["<tool_call>"], *map(made.token_to_id, spelled)]
    mask = matcher.mask(tokens)
    assert mask is not None
    assert allows(mask, made.token_to_id("b"))
    assert not any(allows(mask, token) for token in range(len(SPECIAL)))


@pytest.mark.parametrize(
    ("parameters", "words"),
    [({"type": "string"}, "object"), ({"type": ["object", "null"]}, "object")],
)
def test_arguments_that_need_not_be_an_object_are_refused(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        argument_schema(parameters)


MIXED = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["ab", "b a"]},
        "word": {"type": "string", "minLength": 1, "maxLength": 3},
        "note": {"type": ["string", "null"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 20},
        "flags": {"type": "array", "items": {"$ref": "#/$defs/flag"}, "maxItems": 2},
    },
    "required": ["count", "word"],
    "$defs": {"flag": {"type": "boolean"}},
}


@pytest.mark.parametrize("format", ["qwen3_coder", "pythonic"])
def test_arguments_without_json_follow_their_schemas(format: str) -> None:
    """Also where the model ends a text, leaves out what is optional, or writes marks of the format into a text."""
    made, chance = tokenizer("ByteLevel", special=False), random.Random(format)
    fast, size = FastTokenizer(made), made.get_vocab_size()
    compiled = (
        Grammars(lambda: made, size, [0])
        .compile(
            call_grammar(
                FORMATS[format],
                [("f", MIXED), ("g", {"type": "object", "properties": {"a": {}, "b": {}}})],
                {},
                single=True,
            )
        )
        .result()
    )
    seen = set[str]()
    for _ in range(80):
        parser = ToolCallParser(FORMATS[format], {"f": MIXED, "g": {}})
        tokens = likely_text(compiled.matcher(0, []), size, made, chance)
        parsed = parser.push(fast.decode(tokens))
        parsed.extend(parser.flush())
        assert parsed.content == ""
        [call] = parsed.tool_calls
        assert call.is_complete
        arguments = json.loads(call.arguments)
        seen |= {f"{call.name}.{key}" for key in arguments}
        if call.name == "f":
            assert {"count", "word"} <= set(arguments) <= set(MIXED["properties"])
            assert isinstance(arguments["count"], int) and 0 <= arguments["count"] <= 20
            assert 1 <= len(arguments["word"]) <= 3
            assert arguments.get("kind", "ab") in ("ab", "b a")
            assert all(isinstance(flag, bool) for flag in arguments.get("flags", []))
    assert seen >= {"f.kind", "f.note", "f.flags", "g.a", "g.b"}


def likely_text(matcher: GrammarMatcher, size: int, made: Tokenizer, chance: random.Random) -> list[int]:
    """As `random_text`, but texts of values end soon: what a value may end with is often chosen."""
    ends = [made.token_to_id(each) for each in 'Ċ"</parameter>)]}']
    tokens: list[int] = []
    while not tokens or tokens[-1]:
        mask = matcher.mask(tokens)
        assert mask is not None
        allowed = [token for token in range(size) if allows(mask, token)]
        text = made.decode(tokens[-12:])
        begun = next((cut for cut in range(11, 0, -1) if text.endswith("\n</parameter>"[:cut])), 0)
        following = made.token_to_id("Ċ</parameter>"[begun])
        if len(allowed) > 20 and following in allowed and (begun > 1 or chance.random() < 0.5):
            tokens.append(following)
        elif len(allowed) > 20 and chance.random() < 0.5 and set(ends) & set(allowed):
            tokens.append(chance.choice([end for end in ends if end in allowed]))
        else:
            tokens.append(0 if 0 in allowed else chance.choice(allowed))
    return tokens[:-1]


@pytest.mark.parametrize(
    ("format", "name", "schema", "words"),
    [
        ("qwen3_coder", "f g", {}, "the name 'f g'"),
        ("deepseek_v3", "f g", {}, "the name 'f g'"),
        ("pythonic", "1f", {}, "the name '1f'"),
        ("pythonic", "f", {"properties": {"a b": {}}}, "the name 'a b'"),
        ("qwen3_coder", "f", {"properties": {"a": {"type": "string", "pattern": "b"}}}, "properties.a with pattern"),
        ("qwen3_coder", "f", {"properties": {"a": {"anyOf": [{"type": "string", "format": "date"}]}}}, "with format"),
        ("pythonic", "f", {"minProperties": 1}, "minProperties"),
        ("pythonic", "f", {"required": ["a"]}, "requires a"),
        ("qwen3_coder", "f", {"properties": ["a"]}, "no object"),
        ("qwen3_coder", "f", {"properties": {"a": {"maxLength": [1]}}}, "no integer"),
    ],
)
def test_what_a_format_cannot_enforce_is_refused(format: str, name: str, schema: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call_grammar(FORMATS[format], [(name, schema)], {}, single=True)


@pytest.mark.parametrize("format", ["password", "ipv4network", "x-own"])
def test_a_format_of_a_text_that_is_not_enforced_is_an_annotation(format: str) -> None:
    text = {"type": "string", "format": format}
    for schema in (text, {"anyOf": [text, {"type": "null"}]}):
        assert call_grammar(FORMATS["qwen3_coder"], [("f", {"properties": {"a": schema}})], {}, single=True).source


def ones(optional: int, required: int = 0) -> dict[str, Any]:
    """Parameters o0, r0, o1, r1, ...: as many optional and required ones. The value of each is 1."""
    names = sorted(
        [f"o{n}" for n in range(optional)] + [f"r{n}" for n in range(required)], key=lambda key: int(key[1:])
    )
    return {"properties": dict.fromkeys(names, {"const": 1}), "required": [key for key in names if key[0] == "r"]}


def maker(schema: dict[str, Any], made: Tokenizer) -> Callable[[], llguidance.LLMatcher]:
    grammar = call_grammar(FORMATS["pythonic"], [("f", schema)], {}, single=True)
    return Grammars(lambda: made, made.get_vocab_size(), [0]).compile(grammar).result().make


def texts_of(matcher: llguidance.LLMatcher, made: Tokenizer) -> Iterator[str]:
    """All texts that may follow. The tokens are characters."""
    mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32).copy()
    if allows(mask, 0):
        yield ""
    for token in range(1, made.get_vocab_size()):
        if allows(mask, token):
            matcher.consume_token(token)
            yield from (made.decode([token]) + rest for rest in texts_of(matcher, made))
            matcher.rollback(1)
            matcher.compute_bitmask()  # as LLGuidanceMatcher does


@pytest.mark.parametrize(("optional", "required"), [(0, 0), (1, 0), (2, 0), (5, 0), (0, 2), (1, 1), (4, 2)])
def test_python_arguments_are_the_required_ones_and_then_optional_ones_in_order(optional: int, required: int) -> None:
    made, expected = tokenizer("ByteLevel", special=False), list[str]()
    for chosen in itertools.product([True, False], repeat=optional):
        given = [f"r{n}=1" for n in range(required)] + [f"o{n}=1" for n in range(optional) if chosen[n]]
        expected.append(f"[f({', '.join(given)})]")
    assert sorted(texts_of(maker(ones(optional, required), made)(), made)) == sorted(expected)


@pytest.mark.parametrize("required", [0, 3])
def test_damaged_python_arguments_match_no_grammar(required: int) -> None:
    """Left out, repeated or moved arguments, commas, and single characters."""
    made, chance = tokenizer("ByteLevel", special=False), random.Random(required)
    make, seen = maker(ones(60, required), made), list[bool]()
    order = {
        f"{key}=1": number
        for number, key in enumerate([f"r{n}" for n in range(required)] + [f"o{n}" for n in range(60)])
    }
    for _ in range(200):
        first, rest = list(order)[:required], list(order)[required:]
        given = first + sorted(chance.sample(rest, chance.randrange(8)), key=order.__getitem__)
        match chance.randrange(5):
            case 0 if given:
                given.insert(chance.randrange(len(given) + 1), chance.choice(given))
            case 1 if given:
                given.append(given.pop(chance.randrange(len(given))))
            case 2 if given:
                given.pop(chance.randrange(len(given)))
        text = f"[f({', '.join(given)})]"
        if chance.random() < 0.3:
            at = chance.randrange(len(text))
            text = text[:at] + chance.choice(["", "", ", ", "1", "o", text[at] * 2]) + text[at + 1 :]
        numbers = [order.get(each, -1) for each in text[3:-2].split(", ")] if text != "[f()]" else []
        is_right = (
            (text[:3], text[-2:]) == ("[f(", ")]")
            and numbers == sorted(set(numbers))
            and -1 not in numbers
            and numbers[:required] == list(range(required))
        )
        matcher, tokens = make(), [made.token_to_id({" ": "Ġ"}.get(letter, letter)) for letter in text]
        assert (matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()) == is_right, text
        seen.append(is_right)
    assert 50 < sum(seen) < 150


@pytest.mark.parametrize("format", FORMATS)
def test_a_grammar_grows_with_the_number_of_parameters(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_grammars, "MAX_GRAMMAR_CHARACTERS", 1 << 30)
    each = [len(call_grammar(FORMATS[format], [("f", ones(n))], {}, single=True).source) / n for n in (100, 1000, 8000)]
    assert max(each) < 1.3 * min(each)  # the numbers of the rules grow, and for few parameters the rest counts


@pytest.mark.parametrize("format", FORMATS)
def test_a_grammar_is_bounded_as_clients_own_are(format: str) -> None:
    shared = {**ones(10_000), "$defs": {"a": {"description": "x" * 1_000_000}}}
    for functions in ([("f", ones(30_000))], [("f", shared)], [(f"f{number}", ones(1)) for number in range(10_000)]):
        with pytest.raises(ValueError, match="the grammar would have more than 262,144 characters; offer fewer"):
            call_grammar(FORMATS[format], functions, {}, single=True)


def test_a_grammar_that_is_too_long_is_not_written_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameters share large definitions."""
    definitions, written = {"large": {"enum": ["a" * 50_000]}}, list[str]()
    schema = {"properties": {f"p{n}": {"$ref": "#/$defs/large"} for n in range(1000)}, "$defs": definitions}
    json_rule = tool_grammars.json_rule

    def counted(name: str, value: Any) -> str:
        written.append(name)
        return json_rule(name, value)

    monkeypatch.setattr(tool_grammars, "json_rule", counted)
    with pytest.raises(ValueError, match="more than 262,144 characters"):
        call_grammar(FORMATS["pythonic"], [("f", schema)], {}, single=True)
    assert len(written) == 6


def test_only_parameters_with_references_have_the_definitions() -> None:
    definitions = {"large": {"enum": ["a" * 50_000]}}
    parameters = {"p": {"$ref": "#/$defs/large"}, **{f"q{n}": {"type": "integer"} for n in range(50)}}
    grammar = call_grammar(
        FORMATS["pythonic"], [("f", {"properties": parameters, "$defs": definitions})], {}, single=True
    )
    assert 50_000 < len(grammar.source) < 100_000
