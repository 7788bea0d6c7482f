"""Tool-call grammars: the parser finds valid calls in any text that follows the grammar."""

from __future__ import annotations

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
SPECIAL = (END, *sorted({marker for each in FORMATS.values() for marker in (each.opening, each.closing) if marker[1:]}))
SIZE = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
FUNCTIONS = [("grow", SIZE), ('say "é"', argument_schema(None))]


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
    markers = special_markers((FORMATS[format].opening, FORMATS[format].closing), fast)
    assert bool(markers) == special
    ids = {text: token for token, text in markers.items()}
    grammars, names, most = Grammars(lambda: made, size, [0]), set(), 0
    for single in (True, False):
        grammar = call_grammar(FORMATS[format], FUNCTIONS, ids, single=single)
        compiled = grammars.compile(grammar).result()
        for _ in range(15):
            parser = ToolCallParser(FORMATS[format], [name for name, _ in FUNCTIONS])
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
    assert names == {name for name, _ in FUNCTIONS}
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
