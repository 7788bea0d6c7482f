"""The pieces of a chat's answer: their text is the answer's, and each token has its origin."""

from __future__ import annotations

from typing import Any

import pytest

from eagle_tools.chat.answer import Origin, StreamedAnswer
from eagle_tools.chat.screen import harmless

D, T = Origin.DRAFT, Origin.TARGET


def cycle(tokens: list[str], accepted: list[int], bonus: str | None, seconds: float) -> dict[str, Any]:
    return {"tokens": tokens, "accepted": accepted, "bonus": bonus, "seconds": seconds}


def event(text: str = "", *trees: dict[str, Any], reasoning: str = "", finish: str | None = None) -> dict[str, Any]:
    delta = {"content": text, "reasoning_content": reasoning}
    return {"choices": [{"index": 0, "delta": delta, "trees": list(trees), "finish_reason": finish}]}


def taken(answer: StreamedAnswer, *events: dict[str, Any]) -> list[tuple[str, Origin | None, bool]]:
    return [(p.text, p.origin, p.is_reasoning) for each in events for p in answer.take(each)]


def test_each_token_has_its_origin_and_cycles_are_counted() -> None:
    answer = StreamedAnswer(has_trees=True)
    first = cycle(["He", "xx", "ll", "o"], [2, 3], "!", 0.01)
    second = cycle(["!", "?"], [], " end", 0.02)
    pieces = taken(answer, event("Hello!", first), event(" end", second, finish="stop"), usage(5))
    assert pieces == [
        ("He", T, False),
        ("ll", D, False),
        ("o", D, False),
        ("!", T, False),
        (" end", T, False),
    ]
    assert (answer.text, answer.tokens, answer.finish_reason) == ("Hello! end", 5, "stop")
    assert answer.speed == pytest.approx(4 / 0.02)
    assert answer.tokens_per_cycle == 2.0


def usage(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"completion_tokens": tokens}}


def test_the_first_token_may_come_before_any_tree() -> None:
    answer = StreamedAnswer(has_trees=True)
    pieces = taken(answer, event("A"), event("bc", cycle(["A", "b"], [1], "c", 0.1)))
    assert pieces == [("A", T, False), ("b", D, False), ("c", T, False)]


def test_thinking_and_answer_may_share_a_cycle() -> None:
    answer = StreamedAnswer(has_trees=True)
    shared = cycle(["a", "b", "<end>"], [1, 2], "c", 0.1)
    pieces = taken(answer, event("c", shared, reasoning="ab"))
    assert pieces == [("a", T, True), ("b", D, True), ("c", T, False)]
    assert answer.text == "c"


def test_text_that_no_token_spells_is_shown_without_an_origin() -> None:
    answer = StreamedAnswer(has_trees=True)
    halves = cycle(["a", "\ufffd"], [1], "\ufffd", 0.1)
    assert taken(answer, event("a\u00e9", halves)) == [("a", T, False), ("\u00e9", None, False)]


def test_without_trees_the_speed_is_that_of_this_clock() -> None:
    times = iter([10.0, 12.0])
    answer = StreamedAnswer(has_trees=False, clock=lambda: next(times))
    assert taken(answer, event("ab"), event("cd"), usage(9)) == [("ab", None, False), ("cd", None, False)]
    assert answer.speed == 4.0
    assert answer.tokens_per_cycle is None
    assert StreamedAnswer(has_trees=True).speed is None


def test_a_model_cannot_steer_the_terminal() -> None:
    assert harmless("a\x1b[2Jb\x9bc\r\n\té\x07") == "a\\x1b[2Jb\\x9bc\\x0d\n\té\\x07"
