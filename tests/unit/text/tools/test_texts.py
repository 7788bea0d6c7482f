"""Random calls in every format come back as they were, from any pieces; and calls that are no JSON object."""

from __future__ import annotations

import json
import random
import time
import warnings
from collections.abc import Iterable
from typing import Any, get_args

import pytest

from eagle_server.config.sections import ModelSection
from eagle_server.text.reasoning_formats import REASONING_FORMATS
from eagle_server.text.tools.formats import FORMATS
from eagle_server.text.tools.json_calls import Functions
from eagle_server.text.tools.parser import ParsedText, ToolCallParser
from eagle_server.text.tools.text_calls import XmlCall
from eagle_server.text.tools.values import json_of_python, json_of_text, types_of
from tests.unit.text.tools.test_parser import as_written

ANY = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": ["boolean", "null"]},
        "parts": {"type": "array"},
        "more": {"$ref": "#/$defs/more"},
    },
    "$defs": {"more": {"type": "object"}},
}
FUNCTIONS: Functions = {"get_weather": ANY, "f": ANY}
Call = tuple[str, dict[str, Any]]


def random_value(key: str, chance: random.Random) -> Any:
    letters = [
        "a",
        "é",
        "😀",
        " ",
        "\n",
        '"',
        "'",
        "\\",
        "<",
        ">",
        "{",
        "[",
        ")",
        ",",
        "=",
        "</",
        "5",
        "true",
        "\\d",
        "</x>",
    ]
    text = "".join(chance.choices(letters, k=chance.randrange(6)))
    made = {
        "text": text,
        "count": chance.randrange(-5, 5000),
        "ratio": chance.choice([0.5, -2e30, 3]),
        "flag": chance.choice([True, False, None]),
        "parts": [text, 1, [None, {"a": text}]][: chance.randrange(4)],
        "more": {text: [text], "b": chance.random()} if chance.random() < 0.7 else {},
    }
    return made[key]


def random_calls(chance: random.Random) -> list[Call]:
    keys = list(ANY["properties"])
    return [
        (
            chance.choice(list(FUNCTIONS)),
            {key: random_value(key, chance) for key in chance.sample(keys, chance.randrange(6))},
        )
        for _ in range(chance.randrange(1, 4))
    ]


def rendered(format: str, calls: list[Call], chance: random.Random) -> str:  # noqa: PLR0911
    """The calls as the format's chat template writes them."""

    def dumped(value: Any) -> str:
        return json.dumps(value, ensure_ascii=chance.random() < 0.3)

    match format:
        case "hermes":
            return "\n".join(
                f'<tool_call>\n{{"name": "{name}", "arguments": {dumped(own)}}}\n</tool_call>' for name, own in calls
            )
        case "qwen3_coder":
            return "\n".join(f"<tool_call>\n{xml(name, own)}\n</tool_call>" for name, own in calls)
        case "llama3_json":
            return "; ".join(f'{{"name": "{name}", "parameters": {dumped(own)}}}' for name, own in calls)
        case "mistral" | "granite":
            objects = ", ".join(f'{{"name": "{name}", "arguments": {dumped(own)}}}' for name, own in calls)
            return f"{FORMATS[format].opening}[{objects}]"
        case "pythonic":
            write = repr if chance.random() < 0.7 else dumped
            texts = (f"{name}({', '.join(f'{k}={write(v)}' for k, v in own.items())})" for name, own in calls)
            return f"[{', '.join(texts)}]"
        case "mistral_v13":
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumped(own)}" for name, own in calls)
        case "gpt_oss":
            header = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
            return "".join(header.format(name) + dumped(own) for name, own in calls)
        case "deepseek_v3":
            each = (
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumped(own)}\n```<｜tool▁call▁end｜>"
                for name, own in calls
            )
            return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"
        case _:
            each = (f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumped(own)}<｜tool▁call▁end｜>" for name, own in calls)
            return "<｜tool▁calls▁begin｜>" + "".join(each) + "<｜tool▁calls▁end｜>"


def xml(name: str, own: dict[str, Any]) -> str:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in own.items()}
    parameters = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    return f"<function={name}>\n{parameters}</function>"


def pieces_of(text: str, chance: random.Random) -> list[str]:
    cuts = sorted(chance.choices(range(len(text) + 1), k=chance.randrange(12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def parse(format: str, pieces: Iterable[str]) -> ParsedText:
    parser, whole = ToolCallParser(FORMATS[format], FUNCTIONS), ParsedText()
    for parsed in [*map(parser.push, pieces), parser.flush()]:
        whole.extend(parsed)
    return whole


def without_ids(parsed: ParsedText) -> Any:
    return parsed.content, [
        (call.index, call.name, call.arguments, call.is_complete, call.broken) for call in parsed.tool_calls
    ]


def test_the_options_name_all_formats() -> None:
    for option, formats in (("tool_call_parser", FORMATS), ("reasoning_parser", REASONING_FORMATS)):
        assert get_args(ModelSection.model_fields[option].annotation) == ("auto", "none", *formats)


@pytest.mark.parametrize("format", FORMATS)
def test_random_calls_in_random_pieces_come_back(format: str) -> None:
    chance = random.Random(format)
    for _ in range(300):
        calls = random_calls(chance)
        text = rendered(format, calls, chance)
        once = parse(format, [text])
        assert once.content == "", text
        assert [(call.name, json.loads(call.arguments)) for call in once.tool_calls] == calls, text
        assert all(call.is_complete for call in once.tool_calls)
        for pieces in (text, pieces_of(text, chance), pieces_of(text, chance)):
            assert without_ids(parse(format, pieces)) == without_ids(once), (text, pieces)


class Searched(str):
    """A text that counts the characters in which it is searched."""

    count = 0

    def find(self, wanted: str, start: int = 0, *rest: Any) -> int:  # type: ignore[override]
        found = super().find(wanted, start, *rest)
        Searched.count += (len(self) if found < 0 else found) - start
        return found


def test_the_end_of_a_value_is_looked_for_once_in_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Searched, "count", 0)
    value = "a </par" * 2000
    text = f"<function=f><parameter=text>{value}</parameter></function>"
    call = XmlCall(0, FUNCTIONS)
    for end in range(1, len(text) + 1):
        call.read(Searched(text[:end]))
    assert json.loads(call.whole(text)[1]) == {"text": value}
    assert Searched.count < 20 * len(text)


@pytest.mark.parametrize("format", FORMATS)
def test_calls_that_break_off_or_are_damaged_are_the_same_in_any_pieces(format: str) -> None:
    chance = random.Random(format)
    words = [
        "<",
        ">",
        "</parameter>",
        "<parameter=",
        "<function=",
        "(",
        ")",
        "=",
        ",",
        "'",
        '"',
        "{",
        "}",
        "]",
        "\\",
        "\n",
        "x",
    ]
    complete = 0
    for _ in range(300):
        text = rendered(format, random_calls(chance)[:2], chance)
        cut = chance.randrange(len(text) + 1)
        text = (
            text[:cut]
            if chance.random() < 0.5
            else text[:cut] + chance.choice(words) + text[cut + chance.randrange(3) :]
        )
        once = parse(format, [text])
        for pieces in (text, pieces_of(text, chance), pieces_of(text, chance)):
            assert without_ids(parse(format, pieces)) == without_ids(once), (text, pieces)
        for call in once.tool_calls:
            assert not call.is_complete or isinstance(json.loads(call.arguments), dict)
            complete += call.is_complete
        if not any(call.is_complete for call in once.tool_calls):
            assert as_written(once) == text
    assert complete


# Format and text, then the expected content and calls.
WHOLE: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("qwen3_coder", "Well.\n<tool_call>\n<function=f>\n</function>\n</tool_call>", "Well.", [("f", "{}")]),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=text>5</parameter><parameter=count>5</parameter>"
        "<parameter=flag>True</parameter><parameter=new>[1]</parameter></function></tool_call>",
        "",
        [("f", '{"text": "5", "count": 5, "flag": true, "new": [1]}')],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=g><parameter=a>five</parameter></function>",
        "",
        [("g", '{"a": "five"}')],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=a>1</parameter><parameter=a>1</parameter></function></tool_call>",
        "",
        [],
    ),
    ("qwen3_coder", '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
    ("pythonic", "[f()]", "", [("f", "{}")]),
    (
        "pythonic",
        " [f(text='a', parts=[1, (2, 3)], flag=None,)] ",
        "",
        [("f", '{"text": "a", "parts": [1, [2, 3]], "flag": null}')],
    ),
    ("pythonic", "[f(text='\\d\\n')]", "", [("f", '{"text": "\\\\d\\n"}')]),
    ("pythonic", "[f(text='\\'],)')]", "", [("f", '{"text": "\'],)"}')]),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "[g(x=1)]", "[g(x=1)]", []),  # no such function
    ("pythonic", "[f(1)]", "[f(1)]", []),
    ("pythonic", "[f(text=open('x'))]", "[f(text=open('x'))]", []),
    ("pythonic", "[f(parts={1, 2})]", "[f(parts={1, 2})]", []),
    ("pythonic", "[f(ratio=float)]", "[f(ratio=float)]", []),
    ("pythonic", "See [f()]", "See [f()]", []),
    (
        "deepseek_v31",
        'So.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>',
        "So.",
        [("f", '{"a": 1}')],
    ),
    (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f g<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f g<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        [],
    ),
]


@pytest.mark.parametrize(("format", "text", "content", "calls"), WHOLE)
def test_calls_are_told_from_content(format: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for pieces in ([text], list(text)):
        parsed = parse(format, pieces)
        assert parsed.content == content
        assert [(call.name, call.arguments) for call in parsed.tool_calls if call.is_complete] == calls


@pytest.mark.parametrize("format", ["qwen3_coder", "pythonic"])
def test_arguments_come_one_by_one(format: str) -> None:
    parser = ToolCallParser(FORMATS[format], FUNCTIONS)
    text = rendered(format, [("f", {"text": "a", "count": 1})], random.Random(0))
    gained = [call.arguments for character in text for call in parser.push(character).tool_calls if call.arguments]
    assert gained[:2] == ["{", '"text": "a"']
    assert "".join(gained[2:]) == ', "count": 1}'


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": ["string", "integer"]}, 5),
        ("5", {"type": "number"}, 5),
        ("5.5", {"type": "integer"}, "5.5"),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("null", {"type": "string"}, "null"),
        ("a", {"enum": ["a", 1]}, "a"),
        ("1", {"enum": ["a", 1]}, 1),
        ("1", {"enum": ["1"]}, "1"),
        ("NaN", {}, "NaN"),
        ("{'a': 1}", {"type": "object"}, "{'a': 1}"),
        ("1" * 5000, {}, "1" * 5000),
        ("[" * 100_000, {}, "[" * 100_000),
    ],
)
def test_a_text_becomes_what_the_schema_says(text: str, schema: Any, value: Any) -> None:
    assert json.loads(json_of_text(text, schema, {})) == value


def test_references_in_a_circle_end() -> None:
    root = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    assert types_of({"$ref": "#/$defs/a"}, root) is None
    assert types_of({"$ref": "#"}, {"type": "object"}) == {"object"}
    root = {"$defs": {"a": {"anyOf": 50 * [{"$ref": "#/$defs/a"}] + [{"type": "integer"}]}}}
    assert types_of({"$ref": "#/$defs/a"}, root) == {"integer"}


@pytest.mark.parametrize(
    "schema", [True, 5, {"type": 5}, {"type": [{}]}, {"$ref": 5}, {"anyOf": 5}, {"enum": 5}, {"anyOf": []}]
)
def test_what_is_no_schema_does_no_harm(schema: Any) -> None:
    assert json.loads(json_of_text("5", schema, {"properties": 5})) in (5, "5")
    functions: Functions = {"f": {"properties": {"a": schema}}}
    parser = ToolCallParser(FORMATS["qwen3_coder"], functions)
    [call] = parser.push("<tool_call><function=f><parameter=a>5</parameter></function></tool_call>").tool_calls
    assert json.loads(call.arguments)["a"] in (5, "5")


@pytest.mark.parametrize(
    "text", ["x", "f()", "{1}", "b'a'", "'\\ud800'", "(" * 500, "-" * 100_000 + "1", "[" * 3000, ""]
)
def test_what_is_no_literal_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        json_of_python(text)


@pytest.mark.parametrize("text", ["[1if 1else 1]", "[0xfor 1]", "[1 # '\n, 1if 1else 1 # '\n]", "'''a'b''' 1if 'c'"])
def test_python_does_not_warn_of_what_the_model_writes(text: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match="an operator or a comment"):
            json_of_python(text)
    assert not caught


def test_words_in_strings_are_no_operators() -> None:
    text = """{'a': 'if 1or', "b": r'it\\'s # and', 'c': '''5in 'quotes' ''', 'd': [0x1f, 1e5, None, True]}"""
    expected = {"a": "if 1or", "b": "it\\'s # and", "c": "5in 'quotes' ", "d": [31, 1e5, None, True]}
    assert json.loads(json_of_python(text)) == expected


@pytest.mark.parametrize("string", ["x" * 200_000, "\\" * 200_000])
def test_a_long_string_is_read_once(string: str) -> None:
    text, parser = f"[f(text='{string}')]", ToolCallParser(FORMATS["pythonic"], FUNCTIONS)
    began = time.thread_time()
    for begin in range(0, len(text), 4):
        parser.push(text[begin : begin + 4])
    assert parser.complete == 1
    assert time.thread_time() - began < 5, "seconds of the processor; to read it again with each piece takes far more"
