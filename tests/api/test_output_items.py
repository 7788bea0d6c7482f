"""An answer in one piece and its stream make the same items, however the text is cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_server.api.endpoints.output_items import ItemBegins, ItemEnds, ItemGrows, OutputItems
from eagle_server.api.generation.request_state import OutputDelta
from eagle_server.text.reasoning_formats import REASONING_FORMATS
from eagle_server.text.reasoning_parser import ReasoningParser
from eagle_server.text.tools.formats import FORMATS
from eagle_server.text.tools.parser import ToolCallParser

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
BROKEN = '<tool_call>{"name": "f", "arguments": {"a": 1]}</tool_call>'
# What models write, and is no JSON: the arguments of a call.
INVALID = ['{"a": True}', '{"a": 1,}', "{'a': 1}", '{"a": "x\\\ny"}', '{"a": "x\\q"}', '{"a": x}']
ANSWERS = ["", "text", CALL, f"before{CALL}after", f"{CALL}{CALL}", f"a{CALL}b{CALL}c", f"a{BROKEN}b{CALL}", CALL[:-20]]
ANSWERS += [f'{CALL} <tool_call>{{"name": "f", "arguments": {given}}}</tool_call>{CALL}' for given in INVALID]
ANSWERS += [f"<think>why?\n</think>\n\n{answer}" for answer in ANSWERS]


def deltas(text: str, cuts: list[int], finish_reason: str = "stop") -> list[OutputDelta]:
    """What RequestState makes of the text in pieces."""
    parser = ReasoningParser(REASONING_FORMATS["qwen3"], ToolCallParser(FORMATS["hermes"], {"f"}), is_open=None)
    bounds = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    outputs = [OutputDelta(0) for _ in bounds]
    for output, begin, end in zip(outputs, bounds, bounds[1:], strict=False):
        output.add_parsed(parser.push(text[begin:end]))
    outputs[-1].add_parsed(parser.flush())
    outputs[-1].finish_reason = finish_reason
    return outputs


def shown(items: OutputItems) -> list[tuple[str | None, str, bool]]:
    return [
        ("thinking" if item.is_thinking else item.call and item.call.name, item.content, item.is_complete)
        for item in items.items
    ]


CUTS = st.lists(st.integers(0, 200), max_size=12)


@given(text=st.sampled_from(ANSWERS), cuts=CUTS, other_cuts=CUTS)
def test_pieces_of_any_size_make_the_same_items(text: str, cuts: list[int], other_cuts: list[int]) -> None:
    streamed, whole = OutputItems(), OutputItems()
    changes = [change for output in deltas(text, cuts) for change in streamed.add(output)]
    joined = OutputDelta(0)
    for output in deltas(text, other_cuts):
        joined.extend(output)
    list(whole.add(joined))
    assert shown(streamed) == shown(whole)
    assert [change.item for change in changes if isinstance(change, ItemBegins)] == streamed.items
    depth = 0
    for change in changes:
        match change:
            case ItemBegins(item):
                depth += 1
                assert item.call is None or item.call.is_complete
            case ItemGrows(item, addition):
                assert addition and item.content
            case ItemEnds():
                depth -= 1
        assert depth in (0, 1), "one item grows at a time"
    assert depth == 0


@pytest.mark.parametrize(
    ("text", "reason", "expected"),
    [
        ("", "stop", []),
        ("text", "stop", [(None, "text", True)]),
        ("text", "length", [(None, "text", False)]),
        (
            f"a{CALL}b{CALL}",
            "tool_calls",
            [(None, "a", True), ("f", '{"a": 1}', True), (None, "b", True), ("f", '{"a": 1}', True)],
        ),
        (f"a{BROKEN}", "stop", [(None, f"a{BROKEN}", True)]),
        (f"{CALL}{BROKEN}", "tool_calls", [("f", '{"a": 1}', True), (None, BROKEN, True)]),
        (CALL[:-20], "length", [(None, CALL[:-20], False)]),
        ("<think>why?</think>so", "length", [("thinking", "why?", True), (None, "so", False)]),
        (f"<think>why?</think>{CALL}", "tool_calls", [("thinking", "why?", True), ("f", '{"a": 1}', True)]),
        (f"<think>{CALL}", "length", [("thinking", CALL, False)]),
        ("<think></think>so", "stop", [(None, "so", True)]),
    ],
)
def test_items_come_in_the_order_of_the_text(
    text: str, reason: str, expected: list[tuple[str | None, str, bool]]
) -> None:
    items = OutputItems()
    for output in deltas(text, [3, 30], reason):
        list(items.add(output))
    assert shown(items) == expected
