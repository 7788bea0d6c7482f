"""Nothing is drafted that a request could not keep, and only what it keeps counts."""

from __future__ import annotations

from typing import Any

import pytest

from eagle_server.engine.engine import Engine
from eagle_server.plan import CyclePlan, CycleResult, Decode, RequestSampling
from eagle_server.request import SamplingParams
from tests.lossless.conftest import Drafting
from tests.lossless.drafters import CASES
from tests.lossless.scenes import departure
from tests.support.engines import plain, random_head, random_target, request, run, speculative, tokens_of

DRAFTING = [name for name, case in CASES.items() if case.numbers["nodes"] > 1]


def watched(engine: Engine) -> list[tuple[int, int]]:
    """A list that receives, for each decode, how many tokens it may get, and how many nodes were drafted for it."""
    seen: list[tuple[int, int]] = []
    original = engine.worker.run

    def run_cycle(plan: CyclePlan, *args: Any) -> CycleResult:
        result = original(plan, *args)
        seen.extend((each.tokens_left, out.drafted) for each, out in zip(plan.decodes, result.decodes, strict=True))
        assert all(len(out.tokens) <= each.tokens_left for each, out in zip(plan.decodes, result.decodes, strict=True))
        return result

    engine.worker.run = run_cycle  # type: ignore[method-assign]
    return seen


def test_a_request_that_gets_one_more_token_drafts_nothing() -> None:
    target = random_target()
    engine = speculative(target, random_head(target, "EAGLE3"), 3, 4)
    seen = watched(engine)
    requests = [request(n, range(1, 9), max_tokens=n, ignore_eos=True) for n in range(1, 9)]
    assert tokens_of(run(engine, requests)) == tokens_of(run(plain(target), requests))
    assert {left for left, _ in seen} == set(range(1, 8))
    assert all((drafted == 0) is (left == 1) for left, drafted in seen)
    assert max(drafted for left, drafted in seen if left == 2) <= 4 < max(drafted for _, drafted in seen)


def test_kept_tokens_end_with_the_first_end_and_with_the_last_that_is_wanted() -> None:
    sampling = RequestSampling(SamplingParams(max_tokens=9, seed=0), key=0)
    decode = Decode(0, 5, 7, sampling, tokens_left=3, ends=frozenset({50, 60}))
    assert [decode.kept(tokens) for tokens in ((), (1,), (1, 2, 3, 4), (50, 1), (1, 60, 50), (1, 2, 3, 50))] == [
        0, 1, 3, 1, 2, 3,
    ]  # fmt: skip
    assert Decode(0, 5, 7, sampling).kept(range(1000)) == 1000


@pytest.mark.parametrize("drafting", DRAFTING, indirect=True)
def test_short_texts_are_those_of_plain_decoding_with_any_drafter(drafting: Drafting) -> None:
    """All lengths in one batch, so that requests which may keep much draft beside others that may keep nothing."""
    requests = [
        request(n, range(2 + n, 12 + n), max_tokens=n, seed=n, temperature=0.8 * (n % 2), ignore_eos=True)
        for n in (1, 2, 3, 4, 5, 6, 9)
    ]
    engine = drafting.engine(max_running_requests=8)
    seen = watched(engine)
    texts, expected = tokens_of(run(engine, requests)), tokens_of(run(plain(drafting.pair.target), requests))
    for name, text in texts.items():
        assert text == expected[name], departure(drafting.pair.target, name, expected[name], text)
    assert any(drafted for _, drafted in seen)
    assert not any(drafted for left, drafted in seen if left == 1)
