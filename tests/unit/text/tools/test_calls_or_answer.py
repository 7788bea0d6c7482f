"""Tools beside a form of the answer: what the grammar allows is calls, or the answer in its form."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from eagle_server.engine.grammars.grammars import Grammars
from eagle_server.plan import GrammarMatcher
from eagle_server.request import Grammar
from eagle_server.text.detokenizer import IncrementalDetokenizer
from eagle_server.text.markers import special_markers
from eagle_server.text.reasoning_formats import GPT_OSS as CHANNELS
from eagle_server.text.reasoning_formats import QWEN3, ReasoningFormat
from eagle_server.text.reasoning_parser import ChannelParser, ReasoningParser
from eagle_server.text.tokenizer import FastTokenizer
from eagle_server.text.tools.formats import FORMATS
from eagle_server.text.tools.grammars import call_grammar
from eagle_server.text.tools.parser import ParsedText, ToolCallParser
from tests.support.covering import deep_unless
from tests.unit.text.test_reasoning_parser import ways_to_cut
from tests.unit.text.tools.test_grammars import SIMPLE, SIZE, likely_text, tokenizer

THOUGHT = {CHANNELS: "<|channel|>analysis<|message|>Why<|end|><|start|>assistant", QWEN3: "<think>Why</think>\n\n"}

FORM = Grammar(kind="choice", source=json.dumps(['{"a": "<tool_call>"}', "[1]", "no"]))
FUNCTIONS = [("grow", SIZE), *SIMPLE, ("any", None)]


@dataclass(frozen=True)
class After:
    """The masks of a text after some tokens."""

    matcher: GrammarMatcher
    tokens: Sequence[int]

    def mask(self, tokens: Sequence[int]) -> Any:
        return self.matcher.mask([*self.tokens, *tokens])


def parts(reasoning: ReasoningFormat, ids: Mapping[str, int]) -> list[str]:
    """Thinking as special tokens and characters."""
    text = THOUGHT[reasoning]
    found = [part for part in re.split(f"({'|'.join(map(re.escape, ids)) or '(?!)'})", text) if part]
    return [each for part in found for each in ([part] if part in ids else part)]


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize(
    ("format", "special"),
    [
        pytest.param(format, special, marks=deep_unless(special or format in ("hermes", "qwen3_coder", "pythonic")))
        for format in FORMATS
        for special in (True, False)
    ],
)
def test_the_model_may_call_or_answer_in_the_form(format: str, *, special: bool, thinks: bool) -> None:
    made, chance = tokenizer("ByteLevel", special=special), random.Random(format)
    fast, size = FastTokenizer(made), made.get_vocab_size()
    if not special and ("deepseek" in format or format == "gpt_oss"):
        pytest.skip("its markers are special tokens")
    reasoning = CHANNELS if format == "gpt_oss" else QWEN3
    markers = special_markers(FORMATS[format].markers, fast)
    ids = {text: token for token, text in markers.items()}
    calls = call_grammar(FORMATS[format], FUNCTIONS, ids, single=False)
    grammar = replace(FORM, calls=calls.source, thinking=reasoning.lark(ids, is_open=None) if thinks else "")
    compiled, seen = Grammars(lambda: made, size, [0]).compile(grammar).result(), set[str]()
    thought = [ids.get(part) or made.token_to_id("Ċ" if part == "\n" else part) for part in parts(reasoning, ids)]
    for _ in range(60):
        tokens = [*(thought if thinks else [])]
        tokens += likely_text(After(compiled.matcher(0, []), tokens), size, made, chance)
        detokenizer = IncrementalDetokenizer(fast, [1], markers)
        text = "".join(map(detokenizer.push, tokens)) + detokenizer.flush()
        parser = ToolCallParser(FORMATS[format], {name: schema or {} for name, schema in FUNCTIONS}, instead=True)
        kind = ChannelParser if format == "gpt_oss" else ReasoningParser
        whole = kind(reasoning, parser, is_open=None) if thinks else parser
        parsed = whole.push(text)
        parsed.extend(whole.flush())
        names = [call.name for call in parsed.tool_calls]
        assert all(call.is_complete and isinstance(json.loads(call.arguments), dict) for call in parsed.tool_calls)
        assert bool(names) != (parsed.content in json.loads(FORM.source)), text
        assert not (names and parsed.content), text
        seen |= {*names, parsed.content}
    assert seen >= {"grow", "say", "any", "no"}


@pytest.mark.parametrize("format", ["hermes", "qwen3_coder", "llama3_json", "mistral"])
def test_a_marker_in_the_answer_begins_no_call(format: str) -> None:
    written = {"qwen3_coder": "<function=f></function>", "mistral": '[{"name": "f", "arguments": {}}]'}
    body = written.get(format, '{"name": "f", "arguments": {}}')
    call = f"{FORMATS[format].opening}{body}{FORMATS[format].closing}"
    for text in (f"<{call}", f'{{"a": "{call}"}}', f'["{call}", 1]\n'):
        for pieces in ways_to_cut(text):
            parser, whole = ToolCallParser(FORMATS[format], {"f": {}}, instead=True), ParsedText()
            for piece in pieces:
                whole.extend(parser.push(piece))
            whole.extend(parser.flush())
            assert (whole.content, whole.tool_calls) == (text, [])
