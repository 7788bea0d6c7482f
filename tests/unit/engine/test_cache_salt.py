"""No other request drafts from the text of a salted one, and compiled grammars are shared within a salt only."""

from __future__ import annotations

from threading import Event
from typing import Any

import pytest

from eagle_server.engine.engine import Engine
from eagle_server.engine.grammars.grammars import _CHECKS, Grammars
from eagle_server.plan import Chunk, CyclePlan, CycleResult, Decode
from eagle_server.request import FinishReason
from tests.support.engines import plain, random_target, request, run
from tests.support.grammars import GRAMMARS, VOCAB, json_tokenizer

PROMPT = range(1, 38)


def sharing() -> Engine:
    return plain(random_target(400), nodes=8, ngram_steps=5, ngram_share_tokens=1 << 12)


def drafted(engine: Engine, salt: str | None) -> int:
    """How many tokens are drafted for a text that does not repeat itself."""
    before = engine.stats().drafted_tokens
    ended = run(engine, [request("one", PROMPT, max_tokens=6, ignore_eos=True, cache_salt=salt)])["one"]
    text = [*PROMPT, *ended.tokens]
    assert len(set(text)) == len(text)
    return engine.stats().drafted_tokens - before


@pytest.mark.parametrize(("first", "second"), [("a", None), (None, "a"), ("a", "b"), ("a", "a")])
def test_no_request_drafts_from_a_salted_one_and_no_salted_one_from_others(
    first: str | None, second: str | None
) -> None:
    engine = sharing()
    assert drafted(engine, first) == 0
    assert drafted(engine, second) == 0


def test_equal_texts_without_salts_are_drafted() -> None:
    engine = sharing()
    assert drafted(engine, None) == 0
    assert drafted(engine, None) > 0


@pytest.mark.parametrize("salt", [None, "a"])
def test_all_chunks_and_decodes_of_a_request_tell_whether_it_shares(
    salt: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = plain(random_target(), chunked_prefill_size=16)
    seen, run_plan = list[Chunk | Decode](), engine.worker.run

    def recorded(plan: CyclePlan, *args: Any) -> CycleResult:
        seen.extend((*plan.chunks, *plan.decodes))
        return run_plan(plan, *args)

    monkeypatch.setattr(engine.worker, "run", recorded)
    run(engine, [request("one", PROMPT, max_tokens=4, ignore_eos=True, cache_salt=salt)])
    assert [type(each) for each in seen] == [Chunk] * 3 + [Decode] * 3
    assert {each.shares_text for each in seen} == {salt is None}


def test_a_grammar_is_compiled_once_for_each_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = plain(random_target(VOCAB), stand_ins={"tokenizer": json_tokenizer})
    compiled, compile_one = [], Grammars._compile
    monkeypatch.setattr(Grammars, "_compile", lambda *args: (compiled.append(args[1]), compile_one(*args))[1])
    for salts, count in (((None, "a", "b"), 3), ((None, "a", "b"), 3), (("c", "c"), 4)):
        run(
            engine,
            [
                request(number, [5, 6], max_tokens=4, grammar=GRAMMARS["regex"], cache_salt=salt)
                for number, salt in enumerate(salts)
            ],
        )
        assert compiled == [GRAMMARS["regex"]] * count


def test_an_abort_cancels_no_compilation_of_another_salt() -> None:
    engine = plain(random_target(VOCAB), stand_ins={"tokenizer": json_tokenizer})
    assert engine._grammars is not None
    free = Event()
    for _ in range(_CHECKS):
        engine._grammars._checking.submit(free.wait)
    try:
        for salt in ("a", "b"):
            engine.add(request(salt, [5, 6], max_tokens=4, grammar=GRAMMARS["regex"], cache_salt=salt))
        engine.add(request("none", [5, 6], max_tokens=4, grammar=GRAMMARS["regex"]))
        engine.abort("a")
    finally:
        free.set()
    ended = run(engine, [])
    assert {name: finished.reason for name, finished in ended.items()} == {
        "a": FinishReason.ABORT,
        "b": FinishReason.LENGTH,
        "none": FinishReason.LENGTH,
    }
