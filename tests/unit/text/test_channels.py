"""gpt-oss's channels in texts: all ways to split a text, headers in every form, and what a broken message becomes."""

from __future__ import annotations

import json
import random

import pytest
from msgspec.structs import replace

from eagle_server.engine.grammars.grammars import Grammars
from eagle_server.request import Grammar
from eagle_server.text.chat_template import ChatTemplate, Conversation
from eagle_server.text.detokenizer import IncrementalDetokenizer
from eagle_server.text.markers import special_markers
from eagle_server.text.reasoning_formats import REASONING_FORMATS, find_reasoning_format
from eagle_server.text.reasoning_parser import ChannelParser
from eagle_server.text.tokenizer import FastTokenizer
from eagle_server.text.tools.formats import FORMATS, GPT_OSS, find_format
from eagle_server.text.tools.grammars import call_grammar
from eagle_server.text.tools.parser import ParsedText, ToolCallParser
from tests.unit.text.test_reasoning_parser import ways_to_cut
from tests.unit.text.tools.test_grammars import SIMPLE, random_text, tokenizer

FORMAT = REASONING_FORMATS["gpt_oss"]
THINK = "<|channel|>analysis<|message|>Why 😀?<|end|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>So.\n"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": [1]}<|call|>'
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|>"
# Text, whether the prompt has begun the thinking; then the expected thinking, content and call.
WHOLE: list[tuple[str, bool | None, str, str, str]] = [
    (f"{THINK}{NEXT}{FINAL}<|return|>", None, "Why 😀?", "So.\n", ""),
    (FINAL, None, "", "So.\n", ""),
    (f"Why?<|end|>{NEXT}{FINAL}", True, "Why?", "So.\n", ""),
    (f"{THINK}{NEXT}{THINK}{NEXT}{FINAL}", None, "Why 😀?\nWhy 😀?", "So.\n", ""),
    (THINK.removesuffix("?<|end|>"), None, "Why 😀", "", ""),
    (f"{THINK}{NEXT}<|channel|>fin", None, "Why 😀?", "", ""),
    (f"{THINK}{NEXT}{CALL}", None, "Why 😀?", "", "f"),
    (f"{THINK}{NEXT}{PREAMBLE}{NEXT}{CALL}", None, "Why 😀?", "I look.", "f"),
    (f"{PREAMBLE}{NEXT}{THINK}{NEXT}{FINAL}", None, "Why 😀?", "I look.\nSo.\n", ""),
    (f'{THINK}{NEXT} to=functions.f<|channel|>commentary json<|message|>{{"x": [1]}}', None, "Why 😀?", "", "f"),
    (' to=functions.f<|channel|>commentary json<|message|>{"x": [1]}<|call|>', None, "", "", "f"),
    (f"{GPT_OSS.opening}f code<|message|>\n no JSON", None, "", f"{GPT_OSS.opening}f<|message|>\n no JSON", ""),
    ("So. <|channel|>final<|message|>No.", None, "", "So. \nNo.", ""),
    ("to=5 is <|wrong|>", None, "", "to=5 is <|wrong|>", ""),
    ("<|channel|>final <|chan", None, "", "", ""),
    ("<|message|>So.", None, "", "So.", ""),
    ("<|<|message|>So.", None, "", "<|<|message|>So.", ""),
    ("t", None, "", "t", ""),
    ("", None, "", "", ""),
    ("<|start|>" + "x" * 600, None, "", "<|start|>" + "x" * 600, ""),
]


def parse(pieces: list[str], *, is_open: bool | None, tools: bool = True, separate: bool = True) -> ParsedText:
    calls = ToolCallParser(FORMATS["gpt_oss"], {"f": {}}, single=True) if tools else None
    parser, whole = ChannelParser(FORMAT, calls, is_open=is_open, separate=separate), ParsedText()
    for piece in pieces:
        whole.extend(parser.push(piece))
    whole.extend(parser.flush())
    return whole


@pytest.mark.parametrize(("text", "is_open", "reasoning", "content", "call"), WHOLE)
def test_every_way_to_cut_a_text_gives_its_messages(
    text: str, is_open: bool | None, reasoning: str, content: str, call: str
) -> None:
    for pieces in ways_to_cut(text):
        found = parse(pieces, is_open=is_open)
        calls = [(each.name, json.loads(each.arguments)) for each in found.tool_calls if each.is_complete]
        assert (found.reasoning, found.content, calls) == (reasoning, content, [("f", {"x": [1]})] if call else [])


def test_without_tools_a_call_is_content_and_without_separation_thinking_is_too() -> None:
    for pieces in ways_to_cut(f"{THINK}{NEXT}{CALL}"):
        found = parse(pieces, is_open=None, tools=False)
        assert (found.reasoning, found.content) == ("Why 😀?", NEXT + CALL.removesuffix("<|call|>"))
    for pieces in ways_to_cut(f"{THINK}{NEXT}{FINAL}"):
        found = parse(pieces, is_open=None, separate=False)
        assert (found.reasoning, found.content) == ("", f"{THINK}So.\n")


def test_a_call_is_found_without_the_parser_of_thinking_too() -> None:
    for pieces in ways_to_cut(f"{THINK}{NEXT}{CALL}"):
        parser, whole = ToolCallParser(FORMATS["gpt_oss"], {}, single=True), ParsedText()
        for piece in pieces:
            whole.extend(parser.push(piece))
        assert parser.is_done and whole.content == THINK + NEXT
        assert [(each.name, each.arguments) for each in whole.tool_calls] == [("f", '{"x": [1]}')]


TEMPLATE = """\
{%- for message in messages %}{% if message.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' }}
{%- if message.content and message.tool_calls %}{{ raise_exception('content and thinking') }}{% endif %}
{{- message.thinking }}{% endif %}{% if message.tool_calls %}{{ '<|channel|>commentary json' }}{% endif %}
{{- message.content }}{% endfor %}{{ reasoning_effort }}{% if tools %}{% endif %}"""


def test_a_template_tells_the_formats_and_gets_earlier_thinking() -> None:
    template = ChatTemplate(TEMPLATE)
    assert find_reasoning_format("auto", template) is FORMAT
    assert find_format("auto", template) is GPT_OSS
    call = [{"type": "function", "id": "1", "function": {"name": "f", "arguments": {}}}]
    said = [
        {"role": "assistant", "content": "", "reasoning_content": "Why?", "tool_calls": call},
        {"role": "assistant", "content": "So.", "reasoning_content": "dropped", "tool_calls": call},
    ]
    text = template.render(Conversation(said, hints={"reasoning_effort": "low"}))
    assert text.count("<|message|>Why?") == 1 and "So." in text and "dropped" not in text and text.endswith("low")


def test_the_prompt_tells_where_the_model_goes_on() -> None:
    assert FORMAT.state_after("<|start|>user<|message|>Hi<|end|><|start|>assistant") is None
    assert FORMAT.state_after("<|start|>assistant<|channel|>analysis<|message|>") is True
    assert FORMAT.state_after("<|start|>assistant<|channel|>final<|message|>So", reply="So") is False


@pytest.mark.parametrize("is_call", [True, False])
def test_what_a_grammar_after_the_thinking_allows_is_the_answer_alone(*, is_call: bool) -> None:
    made, chance = tokenizer("ByteLevel", special=True), random.Random(5)
    fast, size = FastTokenizer(made), made.get_vocab_size()
    markers = special_markers(FORMAT.markers, fast)
    ids = {text: token for token, text in markers.items()}
    words = Grammar(kind="choice", source='["So", "No"]')
    grammar = call_grammar(GPT_OSS, SIMPLE, ids, single=True) if is_call else words
    compiled, thought = Grammars(lambda: made, size, [0]), 0
    for is_open in (True, None) * 4:
        thinking = FORMAT.lark(ids, is_open=is_open)
        matcher = compiled.compile(replace(grammar, thinking=thinking)).result().matcher(0, [])
        detokenizer = IncrementalDetokenizer(fast, [1], markers)
        text = "".join(map(detokenizer.push, random_text(matcher, size, chance))) + detokenizer.flush()
        found = parse([text], is_open=is_open)
        thought += bool(found.reasoning)
        assert [(each.name, each.is_complete) for each in found.tool_calls] == ([("say", True)] if is_call else [])
        assert found.content in ([""] if is_call else ["So", "No"]), text
    assert thought
