"""Compiled grammars are shared within a salt only."""

from __future__ import annotations

from threading import Event

import pytest

from eagle_server.engine.grammars.grammars import _CHECKS, Grammars
from eagle_server.request import FinishReason
from tests.support.engines import plain, random_target, request, run
from tests.support.grammars import GRAMMARS, VOCAB, json_tokenizer


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
        engine._grammars._checking.submit("", free.wait)
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
