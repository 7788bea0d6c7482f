"""Tool-call grammars: the parser finds valid calls in any text that follows the grammar."""

from __future__ import annotations

import itertools
import json
import random
import string
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from eagle_server.engine.grammar_check import GrammarCheck
from eagle_server.engine.grammars import Grammars
from eagle_server.plan import GrammarMatcher, allows
from eagle_server.text.detokenizer import IncrementalDetokenizer
from eagle_server.text.markers import special_markers
from eagle_server.text.tokenizer import FastTokenizer
from eagle_server.text.tool_formats import FORMATS
from eagle_server.text.tool_grammars import argument_schema, call_grammar
from eagle_server.text.tool_parser import ToolCallParser, join

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


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("decoder", ["ByteLevel", "ByteFallback"])
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
    assert (most > 1) == (format != "llama3_json")


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


def optional(count: int, required: int = 0) -> dict[str, Any]:
    properties = {f"p{number}": {"type": "integer"} for number in range(count)}
    return {"type": "object", "properties": properties, "required": [f"p{n}" for n in range(required)]}


@pytest.mark.parametrize("format", FORMATS)
def test_a_grammar_grows_with_the_parameters_and_no_faster(format: str) -> None:
    sizes = [len(call_grammar(FORMATS[format], [("f", optional(n))], {}, single=True).source) for n in (100, 200, 400)]
    assert sizes[2] - sizes[1] < 2.2 * (sizes[1] - sizes[0])


@pytest.mark.parametrize("format", FORMATS)
def test_a_grammar_is_bounded_as_clients_own_are(format: str) -> None:
    """The last is a megabyte of definitions beside ten thousand parameters, each of which would get a copy."""
    many = [("f", optional(30_000))]
    shared = [("f", {**optional(10_000), "$defs": {"a": {"description": "x" * 1_000_000}}})]
    for functions in (many, shared, [(f"f{number}", optional(1)) for number in range(10_000)]):
        with pytest.raises(ValueError, match="the grammar would have more than 262,144 characters; offer fewer"):
            call_grammar(FORMATS[format], functions, {}, single=True)


@pytest.mark.parametrize(("count", "required"), [(0, 0), (1, 0), (1, 1), (2, 0), (4, 0), (4, 1), (4, 2), (4, 4)])
def test_the_calls_in_python_are_those_with_the_arguments_in_order(count: int, required: int) -> None:
    """All subsets of the optional arguments, each once and in order; nothing else of what has commas and arguments."""
    made = tokenizer("ByteLevel", special=False)
    grammar = call_grammar(FORMATS["pythonic"], [("f", optional(count, required))], {}, single=True)
    compiled = Grammars(lambda: made, made.get_vocab_size(), [0]).compile(grammar).result()
    names = [f"p{number}" for number in range(count)]
    wanted = {
        tuple(name for name in names if name in names[:required] or name in chosen)
        for size in range(count + 1)
        for chosen in itertools.combinations(names, size)
    }
    given = {order for size in range(count + 2) for order in itertools.product(names, repeat=size)}
    texts = {order: "[f(" + ", ".join(f"{name}=1" for name in order) + ")]" for order in given | wanted}
    texts[("a comma first",)] = "[f(, p0=1)]"
    texts[("a comma last",)] = "[f(p0=1, )]"
    texts[("no comma",)] = "[f(p0=1p1=1)]"
    for order, text in texts.items():
        matcher = compiled.make()
        tokens = [made.token_to_id({" ": "Ġ"}.get(each, each)) for each in text]
        accepted = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        assert accepted == (order in wanted), text
