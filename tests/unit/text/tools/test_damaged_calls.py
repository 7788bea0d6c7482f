"""Random calls in every format, with random damage, cut at random: a stream says what the whole text says."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_server.text.tools.formats import FORMATS
from eagle_server.text.tools.parser import ParsedText, ToolCallParser
from tests.unit.text.tools.test_parser import as_written
from tests.unit.text.tools.test_texts import FUNCTIONS, pieces_of, random_calls, rendered

MARKS = ["{", "}", "[", "]", '"', "'", "\\", "\n", ",", ":", ";", "(", ")", "=", "<", " ", "x", "null"]
MARKS += ["<parameter=x>", "</parameter>", "<function=f>", "</function>"]


def damaged(format: str, text: str, chance: random.Random) -> str:
    """The text after one to three changes: a piece deleted, inserted or doubled, or the end cut off."""
    style = FORMATS[format]
    marks = [*MARKS, *filter(None, (*style.ends, style.begin, style.bracket, style.opening))]
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(text) + 1)
        found = [(where, mark) for mark in marks if (where := text.find(mark, at)) >= 0]
        if found and chance.random() < 0.7:
            at, mark = chance.choice(found)
        else:
            mark = text[at : at + chance.randrange(1, 4)]
        match chance.randrange(5):
            case 0 | 1:
                text = text[:at] + text[at + len(mark) :]
            case 2:
                text = text[:at] + chance.choice(marks) + text[at:]
            case 3:
                text = text[:at] + mark + text[at:]
            case _ if chance.random() < 0.3:
                text = text[:at]
    return text


def parse(format: str, pieces: Iterable[str], *, single: bool = False) -> ParsedText:
    parser, whole = ToolCallParser(FORMATS[format], FUNCTIONS, single=single), ParsedText()
    for parsed in [*map(parser.push, pieces), parser.flush()]:
        whole.extend(parsed)
    assert parser.complete == sum(call.is_complete for call in whole.tool_calls)
    for call in whole.tool_calls:
        call.id = None
    return whole


@given(format=st.sampled_from(list(FORMATS)), chance=st.randoms(use_true_random=False), single=st.booleans())
def test_a_stream_of_damaged_calls_says_what_the_whole_text_says(
    format: str, chance: random.Random, *, single: bool
) -> None:
    calls = random_calls(chance)
    text = damaged(format, rendered(format, calls, chance), chance)
    once = parse(format, [text], single=single)
    for pieces in (text, pieces_of(text, chance), pieces_of(text, chance)):
        assert parse(format, pieces, single=single) == once, pieces
    assert not single or len(once.tool_calls) <= 1
    for call in once.tool_calls:
        assert call.is_complete != bool(call.broken)
        assert not call.is_complete or isinstance(json.loads(call.arguments), dict)
    if not (single or any(call.is_complete for call in once.tool_calls)):
        assert as_written(once).rstrip() == text.rstrip(), "each character is in a call or in content"


@given(format=st.sampled_from(list(FORMATS)), chance=st.randoms(use_true_random=False))
def test_what_surrounds_damage_is_not_changed(format: str, chance: random.Random) -> None:
    """A call before the damage stays byte for byte."""
    first, second = rendered(format, random_calls(chance)[:1], chance), rendered(format, random_calls(chance), chance)
    [intact] = parse(format, [first]).tool_calls
    if FORMATS[format].opening and not FORMATS[format].single:
        text = f"{first}\n{FORMATS[format].opening}{damaged(format, second, chance)}"
        found = parse(format, pieces_of(text, chance)).tool_calls[0]
        assert (found.name, found.arguments, found.is_complete) == (intact.name, intact.arguments, True)


@pytest.mark.parametrize("format", ["hermes", "mistral", "granite", "mistral_v13", "deepseek_v31", "gpt_oss"])
@given(chance=st.randoms(use_true_random=False))
def test_undamaged_arguments_stay_byte_for_byte(format: str, chance: random.Random) -> None:
    words = ["</tool_call>", *FORMATS[format].ends, "\\n", ";", "]", "}", " ", '\\"', "a"]
    value = "".join(chance.choices(words, k=chance.randrange(8)))
    arguments = '{"a":\n' + f'"{value}" , "b" : [1.50,{{"{value}":null}}]' + "}"
    style = FORMATS[format]
    if style.after_name:
        text = f"{style.opening}{style.begin}f{style.after_name}{arguments}{style.call_end}{style.closing}"
    else:
        text = f'{style.opening}{style.bracket}{{"name": "f", "arguments": {arguments}}}{style.closing}'
    for pieces in ([text], text, pieces_of(text, chance)):
        parsed = parse(format, pieces)
        assert parsed.content == ""
        assert [(call.name, call.arguments, call.is_complete) for call in parsed.tool_calls] == [("f", arguments, True)]
