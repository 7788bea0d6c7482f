"""Tool calls in texts: each format, all ways to split a text into pieces, and texts without valid calls."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterable

import pytest

from eagle_server.text.chat_template import ChatTemplate
from eagle_server.text.markers import WHITESPACE
from eagle_server.text.tools.formats import FORMATS, find_format
from eagle_server.text.tools.json_calls import Functions
from eagle_server.text.tools.parser import ParsedText, ToolCallDelta, ToolCallParser, join

NAMES: Functions = {"f": {}, "get_weather": {}}
ARGS = '{"city": "S\\u00e3o \\"Paulo\\" {[", "deep": [{"a": [1, -2.5e3, null]}, true], "tag": "</tool_call>"}'
Call = tuple[str, str]

# Format and text, then the expected content and the expected calls as (name, arguments).
WHOLE: list[tuple[str, str, str, list[Call]]] = [
    ("hermes", "", "", []),
    ("hermes", " plain text.\n", " plain text.\n", []),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "", [("f", "{}")]),
    (
        "hermes",
        f'Let me see.\n\n<tool_call>{{"name":"f","arguments":{ARGS}}}</tool_call>\n'
        '<tool_call>\n{"arguments": {"x": 1} , "name": "get\\u005fweather"}\n</tool_call>\n',
        "Let me see.",
        [("f", ARGS), ("get_weather", '{"x": 1}')],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),  # no closing marker
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool', "</tool", [("f", "{}")]),
    ("hermes", 'A <tool_call>{"name": "other", "parameters": {}}</tool_call>\n B ', "A\n B ", [("other", "{}")]),
    ("hermes", "a < b, <tool_calls>, <tool_", "a < b, <tool_calls>, <tool_", []),
    ("llama3_json", '{"name": "f", "parameters": {"x": "é😀"}}', "", [("f", '{"x": "é😀"}')]),
    ("llama3_json", '\n<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    (
        "llama3_json",
        '{"name": "f", "parameters": {}}; {"name": "f", "arguments": {"x": 1}}\n',
        "",
        [("f", "{}"), ("f", '{"x": 1}')],
    ),
    ("llama3_json", '{"name": "f", "parameters": {}}; done', "; done", [("f", "{}")]),
    ("llama3_json", 'See: {"name": "f", "parameters": {}}', 'See: {"name": "f", "parameters": {}}', []),
    ("llama3_json", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),  # just JSON
    ("llama3_json", '<|python_tag|>brave.call("x")', '<|python_tag|>brave.call("x")', []),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}]', "", [("f", "{}")]),
    (
        "mistral",
        f'So.[TOOL_CALLS][{{"name": "f", "arguments": {ARGS}, "id": "012345678"}} ,\n {{"name":"f","arguments":{{}}}}]',
        "So.",
        [("f", ARGS), ("f", "{}")],
    ),
    ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, 7]', ", 7]", [("f", "{}")]),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]', "", 2 * [("f", "{}")]),
]
NO_CALLS = [
    "",
    "\n",
    "none",
    "{",
    "{}",
    '{"name": "f", "x": 1}',
    '{"name": "f", "arguments": {"x": 1}',  # the model ended here
    '{"name": "f", "arguments": {"x": ',
    '{"name": "f", "arguments": {"x": "\\',
    '{"name": "f", "arguments": [1]}',
    '{"name": "f", "arguments": "{}"}',
    '{"name": "f", "arguments": {"x": NaN}}',
    '{"name": "f", "arguments": {"x": 1,}}',
    '{"name": "f", "arguments": {"x": "a\\\nb"}}',
    '{"name": "f", "arguments": {"x": [1}]}',
    '{"name": "f", "arguments": {}, "name": "get_weather"}',
    '{"name": "f", "arguments": {}, "parameters": {}}',
    '{"name": "f", "arguments": {}, }',
    '{"name": "", "arguments": {}}',
    '{"name": 7, "arguments": {}}',
    '{"name": "\\ud800", "arguments": {}}',
    '{"name": "f", "arguments": {"x": ' + "[" * 3000 + "]" * 3000 + "}}",
    '{"name": "f", "arguments": {"x": ' + "1" * 5000 + "}}",
]
# Of the formats whose calls are JSON objects; test_tool_texts.py has the others.
MARKER = {
    "hermes": "<tool_call>\n",
    "llama3_json": "<|python_tag|>",
    "mistral": "[TOOL_CALLS] [",
    "granite": "<|tool_call|>[",
}


def parse(format: str, pieces: Iterable[str]) -> ParsedText:
    parser, whole = ToolCallParser(FORMATS[format], NAMES), ParsedText()
    for parsed in [*map(parser.push, pieces), parser.flush()]:
        whole.content += parsed.content
        join(whole.tool_calls, parsed.tool_calls)
    assert parser.complete == sum(call.is_complete for call in whole.tool_calls)
    assert [call.index for call in whole.tool_calls] == list(range(len(whole.tool_calls)))
    return whole


def complete(parsed: ParsedText) -> list[Call]:
    return [(call.name or "", call.arguments) for call in parsed.tool_calls if call.is_complete]


def without_ids(parsed: ParsedText) -> tuple[str, list[ToolCallDelta]]:
    return parsed.content, [
        ToolCallDelta(call.index, None, call.name, call.arguments, call.is_complete, call.content_before, call.broken)
        for call in parsed.tool_calls
    ]


@pytest.mark.parametrize(("format", "text", "content", "calls"), WHOLE)
def test_calls_are_told_from_content(format: str, text: str, content: str, calls: list[Call]) -> None:
    parsed = parse(format, [text])
    assert (parsed.content, complete(parsed)) == (content, calls)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


def as_written(parsed: ParsedText) -> str:
    """The text of a result without valid calls."""
    text, begin = "", 0
    for call in parsed.tool_calls:
        text += parsed.content[begin : call.content_before] + call.broken
        begin = call.content_before
    return text + parsed.content[begin:]


@pytest.mark.parametrize("format", MARKER)
@pytest.mark.parametrize("broken", NO_CALLS)
def test_what_is_no_valid_call_is_content_or_a_broken_call_and_nothing_is_lost(format: str, broken: str) -> None:
    text = f"Look: \n{MARKER[format]}{broken}"
    parsed = parse(format, [text])
    assert (as_written(parsed), complete(parsed)) == (text, [])
    assert all(call.broken and call.arguments in call.broken for call in parsed.tool_calls)


@pytest.mark.parametrize("format", MARKER)
@pytest.mark.parametrize("broken", NO_CALLS)
def test_calls_after_a_broken_one_are_found(format: str, broken: str) -> None:
    if broken.endswith(("\\", '"')):
        broken += "\n"  # a string that has no end ends at a line break beside a marker
    good = f'{MARKER[format]}{{"name": "f", "arguments": {{"x": 2}}}}'
    assert complete(parse(format, [f"{MARKER[format]}{broken}{good}"]))[-1:] == [("f", '{"x": 2}')]


# Format and text, then the expected content and the expected calls.
NEARLY_RIGHT: list[tuple[str, str, str, list[Call]]] = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1\n</tool_call>', "", [("f", '{"a": [1\n]}')]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"\n</tool_call> x', " x", [("f", '{"a": 1}')]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": </tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": </tool_call>',
        [("g", "{}")],
    ),
    ("hermes", '<tool_call>{"name": "g"}</tool_call>', "", [("g", "{}")]),
    ("hermes", '<tool_call>{"name": "g", "arguments": null}</tool_call>', "", [("g", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}}\n</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}} }', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}} so', "} so", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "a\nb"}}</tool_call>', "", [("f", '{"s": "a\\nb"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "\ta]\r\n;"}}', "", [("f", '{"s": "\\ta]\\r\\n;"}')]),
    ("llama3_json", '{"name": "f"}', "", [("f", "{}")]),
    ("llama3_json", '{"name": "f", "parameters": {"s": "a;\nb"}}', "", [("f", '{"s": "a;\\nb"}')]),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"a": 1}; {"name": "f", "parameters": null}}',
        "",
        [("f", '{"a": 1}'), ("f", "{}")],
    ),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}]', "", [("f", '{"a": [1]}')]),
    (
        "granite",
        '<|tool_call|>[{"name": "f", "arguments": {"a": 1}, {"name": "g"}}, {"name": "g", "arguments": {}}]',
        "",
        [("f", '{"a": 1}'), ("g", "{}"), ("g", "{}")],
    ),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"s": "a]\nb"}}]', "", [("f", '{"s": "a]\\nb"}')]),
    ("mistral_v13", '[TOOL_CALLS]f[ARGS]{"a": 1[TOOL_CALLS]g[ARGS]null', "", [("f", '{"a": 1}'), ("g", "{}")]),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a": 1\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "",
        [("f", '{"a": 1\n}')],
    ),
    (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>g<｜tool▁sep｜><｜tool▁call▁end｜>"
        '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"s": "a\nb"}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "",
        [("g", "{}"), ("f", '{"s": "a\\nb"}')],
    ),
    ("gpt_oss", "<|channel|>commentary to=functions.g <|constrain|>json<|message|>null", "", [("g", "{}")]),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=a>\n1\n<parameter=b>\n2\n</function>\n</tool_call>",
        "",
        [("f", '{"a": 1, "b": 2}')],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=a><parameter=b>1<parameter=c>2</parameter></function></tool_call>",
        "",
        [("f", '{"a": "", "b": 1, "c": 2}')],
    ),
]


@pytest.mark.parametrize(("format", "text", "content", "calls"), NEARLY_RIGHT)
def test_calls_that_are_nearly_right_are_repaired(format: str, text: str, content: str, calls: list[Call]) -> None:
    for pieces in ([text], text, *([text[:cut], text[cut:]] for cut in range(1, len(text)))):
        parsed = parse(format, pieces)
        assert (parsed.content, complete(parsed)) == (content, calls)
        assert len(parsed.tool_calls) == len(calls)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 12', '{"a": 12'),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}', '{"a": 1}'),
        ('<tool_call>{"name": "f", "arguments": {"a": 1]}</tool_call>', '{"a": 1]'),
        ('<tool_call>{"name": "f", "arguments": {"a": "1}}</tool_call>\n', '{"a": "1}}</tool_call>'),
    ],
)
def test_a_call_that_stays_broken_is_a_call_as_it_was_written(text: str, arguments: str) -> None:
    for pieces in ([text], text, *([text[:cut], text[cut:]] for cut in range(1, len(text)))):
        parsed = parse("hermes", pieces)
        assert (parsed.content, complete(parsed)) == ("", [])
        assert [(call.name, call.arguments, call.broken.strip()) for call in parsed.tool_calls] == [
            ("f", arguments, text.strip())
        ]


@pytest.mark.parametrize("format", MARKER)
def test_every_way_to_cut_a_text_gives_the_same(format: str) -> None:
    texts = [text for own, text, *_ in WHOLE if own == format]
    texts += [f"Look: \n{MARKER[format]}{broken}" for broken in NO_CALLS if len(broken) < 100]
    texts += [f"{MARKER[format]}{broken}\n{texts[-1]}" for broken in NO_CALLS[:12]]
    for text in texts:
        once = without_ids(parse(format, [text]))
        assert without_ids(parse(format, text)) == once, text
        for cut in range(1, len(text)):
            assert without_ids(parse(format, [text[:cut], text[cut:]])) == once, (text, cut)


def pieces_of(text: str, chance: random.Random) -> list[str]:
    cuts = sorted(chance.choices(range(len(text) + 1), k=chance.randrange(8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.deep
@pytest.mark.parametrize("format", MARKER)
def test_random_texts_in_random_pieces(format: str) -> None:
    chance = random.Random(format)
    style = FORMATS[format]
    words = [style.opening, style.opening[:4], style.closing, style.bracket, style.separator or "", " ", "\n", "text"]
    words += [
        '{"name": "f", "arguments": ',
        '{"x": 1}',
        "{}",
        "}",
        '"',
        "\\",
        "{",
        "]",
        '{"name": "f", "arguments": {}}',
    ]
    words += 2 * [style.opening + style.bracket + words[-1] + style.closing]
    found = 0
    for _ in range(3000):
        text = "".join(chance.choices(words, k=chance.randrange(1, 12)))
        once = without_ids(parse(format, [text]))
        assert without_ids(parse(format, pieces_of(text, chance))) == once, text
        assert without_ids(parse(format, text)) == once, text
        found += any(call.is_complete for call in once[1])
    assert found > 200


def test_a_call_is_sent_as_it_comes() -> None:
    parser = ToolCallParser(FORMATS["hermes"], NAMES)
    pieces = [
        "Well",
        ", \n",
        "<tool",
        '_call>\n{"name": ',
        '"f", "argu',
        'ments": {"x"',
        ': "<to',
        'ol"}',
        "}",
        "\n</tool_call>",
    ]
    parsed = [parser.push(piece) for piece in pieces]
    assert [each.content for each in parsed] == ["Well", ",", *[""] * 8]
    assert [[(call.name, call.arguments) for call in each.tool_calls] for each in parsed[5:]] == [
        [],
        [("f", '{"x": "<to')],
        [(None, 'ol"}')],
        [(None, "")],
        [],
    ]
    assert parsed[8].tool_calls[0].is_complete
    assert parser.flush() == ParsedText()


def test_of_one_call_that_is_wanted_the_rest_is_dropped() -> None:
    parser = ToolCallParser(FORMATS["hermes"], NAMES, single=True)
    one = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert len(parser.push(one + one).tool_calls) == 1
    assert parser.is_done
    assert (parser.push("more"), parser.flush()) == (ParsedText(), ParsedText())


def test_ids_are_what_templates_take() -> None:
    ids = {name: FORMATS[name].new_id() for name in FORMATS}
    assert all(len(own) == len("call_") + 24 for name, own in ids.items() if "mistral" not in name)
    assert len(ids["mistral"]) == 9
    assert set(ids["mistral"]) <= set(string.ascii_letters + string.digits)
    assert all(FORMATS[name].new_id() != known for name, known in ids.items())


TEMPLATES = {
    # as in the models' files, with line breaks and quotes escaped for Jinja
    r"""{{- "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>" }}""": "hermes",
    r"""{{- "<tool_call>\n{{\"name\": <function-name>, \"arguments\": <args-json-object>}}\n" }}""": "hermes",
    r"""{{- '\n<tool_call>\n{"name": "' }}{{- tool_call.name }}""": "hermes",
    r"""{{- "<tool_call>\n{'name': <function-name>, 'arguments': <args-dict>}\n</tool_call>" }}""": "hermes",
    r"""{{- "<tool_call>\n<function=example_function_name>\n" }}""": "qwen3_coder",
    "format of [func_name1(params_name1=params_value1, params_name2=params_value2...)]": "pythonic",
    "{{ '<|tool_call|>' + message.tool_calls | tojson }}": "granite",
    r"""{{ '<｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\n```json\n' }}""": "deepseek_v3",
    "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments }}": "deepseek_v31",
    r"""{{ '\n<tool_call>' + tc.name }} <tool_call>{function-name}\n<arg_key>{arg-key-1}""": None,  # GLM
    r"""{{- 'in the format {"name": function name, "parameters": dictionary of argument name ' }}""": "llama3_json",
    """{{- "<|python_tag|>" + tool_call.name }}""": "llama3_json",
    """{{- "[TOOL_CALLS] [" }}""": "mistral",
    """{{- "[TOOL_CALLS][" }}""": "mistral",
    """{{- "[TOOL_CALLS]" + name + "[ARGS]" }}""": "mistral_v13",
    """{{- "[TOOL_CALLS]" + name + "[CALL_ID]" + id + "[ARGS]" }}""": None,  # Mistral Small 3.2
    """{{ messages[0].content }}""": None,
}


@pytest.mark.parametrize(("source", "format"), TEMPLATES.items())
def test_a_template_tells_the_format(source: str, format: str | None) -> None:
    template = ChatTemplate("{{ messages }}", tool_source=source)
    found = find_format("auto", template)
    assert (found and found.name) == format
    assert find_format("none", template) is None
    assert find_format("mistral", template) is FORMATS["mistral"]


SPACED = [
    ("{s}x{s}", []),
    ("x{s}<tool_call>{{}}", []),
    ('x{s}<tool_call>{{"name": "f", "arguments": {{}}}}', [("f", "{}")]),
    ('<tool_call>{s}{{"name": "f", "arguments": {{}}}}</tool_call>', []),
    ('<tool_call>{{{s}"name"{s}:{s}"f",{s}"arguments": {{}}{s}}}{s}</tool_call>', [("f", "{}")]),
    ('{s}{{"name": "f", "arguments": {{}}}}', []),
]


@pytest.mark.parametrize("format", ["hermes", "llama3_json"])
@pytest.mark.parametrize(("text", "calls"), SPACED)
@pytest.mark.parametrize("count", [WHITESPACE - 1, WHITESPACE, WHITESPACE + 1, 300])
def test_white_space_in_any_pieces(format: str, text: str, calls: list[Call], count: int) -> None:
    text = text.format(s=" \n" * (count // 2) + " " * (count % 2)).replace("<tool_call>", FORMATS[format].opening)
    text = text.replace("</tool_call>", FORMATS[format].closing)
    chance = random.Random(count)
    once = parse(format, [text])
    if count > WHITESPACE:
        assert complete(once) == calls
    for pieces in (text, pieces_of(text, chance), pieces_of(text, chance)):
        assert without_ids(parse(format, pieces)) == without_ids(once)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("before", ["", "x", "marker", '{"name": "f", "arguments": {}}'])
def test_white_space_without_an_end_is_not_held(format: str, before: str) -> None:
    """Otherwise each token would cost as much as all tokens before it."""
    parser = ToolCallParser(FORMATS[format], NAMES)
    parser.push(FORMATS[format].opening if before == "marker" else before)
    for _ in range(100):
        parser.push(" \n" * 20)
    assert len(parser._held) <= WHITESPACE
