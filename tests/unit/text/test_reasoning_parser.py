"""Thinking in texts: each format, all ways to split a text into pieces, prompts that begin or end the thinking."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from eagle_server.text.chat_template import ChatTemplate
from eagle_server.text.markers import WHITESPACE
from eagle_server.text.reasoning_formats import REASONING_FORMATS, find_reasoning_format
from eagle_server.text.reasoning_parser import ReasoningParser
from eagle_server.text.tools.formats import FORMATS
from eagle_server.text.tools.parser import ParsedText, ToolCallParser

# Format, whether the prompt has begun the thinking, text; then the expected thinking and content.
WHOLE: list[tuple[str, bool | None, str, str, str]] = [
    ("qwen3", None, "<think>\nWhy?\n\nSo.\n</think>\n\nYes.\n", "Why?\n\nSo.", "Yes.\n"),
    ("qwen3", None, " \n<think>Why?</think>Yes.", "Why?", "Yes."),
    ("qwen3", None, "<think>\n\n</think>\n\nYes.", "", "Yes."),
    ("qwen3", None, "\n Yes. <think>Why?</think>", "", "\n Yes. <think>Why?</think>"),
    ("qwen3", None, "<thi", "", "<thi"),
    ("qwen3", None, "", "", ""),
    ("qwen3", None, "<think>Why? </thin", "Why? </thin", ""),
    ("qwen3", None, "<think>a </think >\n<think> b</think>c</think>", "a </think >\n<think> b", "c</think>"),
    ("qwen3", True, "\nWhy?\n</think>\n\nYes.", "Why?", "Yes."),
    ("qwen3", True, "<think>\nWhy?\n</think>Yes.", "Why?", "Yes."),  # the model repeats what the prompt ends with
    ("qwen3", True, "  never ends\n\n", "  never ends", ""),
    ("deepseek-r1", True, "Why?</think>Yes.", "Why?", "Yes."),
    ("deepseek-r1", True, "</think>Yes.", "", "Yes."),
    ("deepseek-r1", True, "<thi", "<thi", ""),
    (
        "granite",
        None,
        "Here's my thought process:\nHere is a reason.\nHere is my response:\nHere.",
        "Here is a reason.",
        "Here.",
    ),
    ("mistral", None, "[THINK]Why?[/THINK]Yes.", "Why?", "Yes."),
    ("granite", None, "Here is my answer: Here is my response: 3", "", "Here is my answer: Here is my response: 3"),
]
CASES = pytest.mark.parametrize(("format", "is_open", "text", "reasoning", "content"), WHOLE)


def parse(parser: ReasoningParser, pieces: Iterable[str]) -> tuple[str, str]:
    whole = ParsedText()
    for piece in pieces:
        whole.extend(parser.push(piece))
    whole.extend(parser.flush())
    assert not whole.tool_calls
    return whole.reasoning, whole.content


def ways_to_cut(text: str) -> Iterable[list[str]]:
    yield list(text)
    for cut in range(len(text) + 1):
        yield [text[:cut], text[cut:]]
    chance = random.Random(text)
    for _ in range(20):
        cuts = sorted(chance.choices(range(len(text) + 1), k=chance.randrange(8)))
        yield [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@CASES
def test_thinking_is_told_from_content_however_the_text_is_cut(
    format: str, is_open: bool | None, text: str, reasoning: str, content: str
) -> None:
    for pieces in ways_to_cut(text):
        parser = ReasoningParser(REASONING_FORMATS[format], is_open=is_open)
        assert parse(parser, pieces) == (reasoning, content), pieces


@CASES
def test_thinking_that_is_not_separated_is_the_text_as_it_was_written(
    format: str, is_open: bool | None, text: str, reasoning: str, content: str
) -> None:
    for pieces in ways_to_cut(text):
        parser = ReasoningParser(REASONING_FORMATS[format], is_open=is_open, separate=False)
        assert parse(parser, pieces) == ("", text), pieces


@CASES
def test_thinking_that_is_not_streamed_comes_in_one_piece(
    format: str, is_open: bool | None, text: str, reasoning: str, content: str
) -> None:
    parser = ReasoningParser(REASONING_FORMATS[format], is_open=is_open, stream=False)
    pieces = [*map(parser.push, text), parser.flush()]
    assert [each.reasoning for each in pieces if each.reasoning] == [reasoning] * bool(reasoning)
    assert "".join(each.content for each in pieces) == content


def test_thinking_is_sent_as_it_comes() -> None:
    parser = ReasoningParser(REASONING_FORMATS["qwen3"], is_open=None)
    said, thinking = [], []
    for piece in ("<th", "ink>\n", "Why", "?\n", "\nSo", "\n</th", "ink", ">\n\nYes", "."):
        said.append((parsed := parser.push(piece)).reasoning + "|" + parsed.content)
        thinking.append((parser.thinks, parser.is_answering))
    assert said == ["|", "|", "Why|", "?|", "\n\nSo|", "|", "|", "|Yes", "|."]
    assert thinking == [(False, False), *[(True, False)] * 6, *[(True, True)] * 2]


def test_tool_calls_are_looked_for_after_the_thinking() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    text = f"<think>Perhaps {call}</think>\nWell. {call}"
    for separate in (True, False):
        for pieces in ways_to_cut(text):
            calls = ToolCallParser(FORMATS["hermes"], ["f"], single=True)
            parser, whole = (
                ReasoningParser(REASONING_FORMATS["qwen3"], calls, is_open=None, separate=separate),
                ParsedText(),
            )
            for piece in [*pieces, "dropped"]:
                whole.extend(parser.push(piece))
            assert parser.is_done
            whole.extend(parser.flush())
            assert [(each.name, each.is_complete) for each in whole.tool_calls] == [("f", True)]
            thought = f"Perhaps {call}" if separate else ""
            assert (whole.reasoning, parser.complete) == (thought, 1)
            assert whole.content == ("Well." if separate else text.partition("</think>")[0] + "</think>\nWell.")


@pytest.mark.parametrize("count", [WHITESPACE - 1, WHITESPACE, WHITESPACE + 1, 300])
@pytest.mark.parametrize("text", ["{s}<think>a{s}</think>{s}b", "<think>{s}a{s}b{s}</thi{s}nk></think>", "<think>{s}"])
def test_line_breaks_in_any_pieces(text: str, count: int) -> None:
    text = text.format(s="\n" * count)
    once = parse(ReasoningParser(REASONING_FORMATS["qwen3"], is_open=None), [text])
    for pieces in ways_to_cut(text):
        parser = ReasoningParser(REASONING_FORMATS["qwen3"], is_open=None)
        assert parse(parser, pieces) == once
    held = ReasoningParser(REASONING_FORMATS["qwen3"], is_open=None)
    for character in text:
        held.push(character)
        assert len(held._held) <= WHITESPACE + len("</think>")


TEMPLATES = {
    "{{ 'assistant\\n' }}{% if not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}": "qwen3",
    "{% if '</think>' in content %}{% endif %}{{ '<｜Assistant｜>' }}": "deepseek-r1",
    "{{ '<｜Assistant｜><think>\\n' }}": "deepseek-r1",
    "Write your thoughts after 'Here is my thought process:' and your response after 'Here is my response:'": "granite",
    "{{ '[THINK]' + block.thinking + '[/THINK]' }}": "mistral",
    "{{ messages[0].content }}": None,
}


@pytest.mark.parametrize(("source", "format"), TEMPLATES.items())
def test_a_template_tells_the_format(source: str, format: str | None) -> None:
    template = ChatTemplate(source)
    found = find_reasoning_format("auto", template)
    assert (found and found.name) == format
    assert find_reasoning_format("none", template) is None
    assert find_reasoning_format("granite", template) is REASONING_FORMATS["granite"]


@pytest.mark.parametrize(
    ("prompt", "qwen3", "deepseek"),
    [
        ("user: hi\nassistant:\n", None, True),
        ("user: hi\nassistant:<think>\n", True, True),
        ("user: hi\nassistant:\n<think>\n\n</think>\n\n", False, False),
        ("<think>what?</think>\nassistant:", None, True),
        ("<think>\nassistant:", None, True),
    ],
)
def test_the_prompt_tells_whether_the_model_thinks(prompt: str, qwen3: bool | None, deepseek: bool | None) -> None:
    assert REASONING_FORMATS["qwen3"].state_after(prompt) == qwen3
    assert REASONING_FORMATS["deepseek-r1"].state_after(prompt) == deepseek


@pytest.mark.parametrize(
    ("reply", "is_open"), [("", False), ("Yes", False), ("<think>Why", True), ("<think>Why</think>Yes", False)]
)
def test_a_reply_that_is_continued_tells_whether_the_model_thinks(reply: str, is_open: bool) -> None:
    assert REASONING_FORMATS["deepseek-r1"].state_after(f"assistant: {reply}", reply=reply) == is_open
