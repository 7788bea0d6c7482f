"""A thousand random requests with aborts and preemptions: no page is lost, no stale KV is read, and no text changes."""

from __future__ import annotations

import random

import pytest

from eagle_server.engine.engine import Engine
from eagle_server.request import FinishReason, Request
from tests.support.engines import CONTEXT, Finished, plain, random_head, random_target, request, run, speculative
from tests.support.scoring import NEAR_TIE, in_float64, slack

REQUESTS, VOCAB, POOL = 1000, 24, 288


def random_requests(rng: random.Random) -> list[Request]:
    """Prompts begin in one of a few ways, so that they hit the cache; now and then one can never be served."""
    beginnings = [[rng.randrange(1, VOCAB) for _ in range(40)] for _ in range(4)]
    requests = []
    for i in range(REQUESTS):
        prompt = rng.choice(beginnings)[: rng.randrange(41)] + [
            rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 30))
        ]
        settings = {
            "seed": i,
            "max_tokens": rng.choice((0, 1, 2, 5, 12, 30)),
            "temperature": rng.choice((0.0, 0.7, 1.0)),
            "top_k": rng.choice((0, 0, 6)),
            "top_p": rng.choice((1.0, 0.9)),
            "min_tokens": rng.choice((0, 0, 4)),
            "ignore_eos": rng.random() < 0.2,
        }
        if rng.random() < 0.02:
            settings["max_tokens"] = CONTEXT
        requests.append(request(i, prompt, **settings))
    return requests


def disturbed(engine: Engine, requests: list[Request], rng: random.Random) -> dict[str, Finished]:
    """Requests arrive in bursts; one in eight is aborted, wherever it is by then."""
    arrivals: dict[int, list[Request]] = {}
    cycle = 0
    for each in requests:
        cycle += rng.choice((0, 0, 1, 2))
        arrivals.setdefault(cycle, []).append(each)
    aborts: dict[int, list[str]] = {}
    for at, arriving in arrivals.items():
        for each in arriving:
            if rng.random() < 1 / 8:
                aborts.setdefault(at + rng.randrange(8), []).append(each.request_id)

    def abort(cycle: int) -> None:
        for name in aborts.pop(cycle, ()):
            engine.abort(name)
            engine.check()

    return run(engine, (), joining=arrivals, each_cycle=abort)


@pytest.mark.parametrize(("kind", "page"), [("EAGLE", 1), ("EAGLE3", 16)])
def test_a_thousand_requests_with_aborts_and_preemptions_leave_nothing_behind(kind: str, page: int) -> None:
    rng = random.Random(page)
    target = random_target(VOCAB, hidden=16, layers=3, seed=page)
    requests = random_requests(rng)
    expected = run(plain(target, max_running=64), requests)
    head = random_head(target, kind)
    engine = speculative(target, head, page_size=page, max_total_tokens=POOL, max_running=12, chunk_tokens=48)

    outcome = disturbed(engine, requests, rng)

    reasons = [outcome[each.request_id].reason for each in requests]
    assert len(outcome) == REQUESTS
    assert set(reasons) == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.REFUSED}
    departed = [each for each in requests if not is_right(outcome[each.request_id], expected[each.request_id])]
    exact = in_float64(target)
    assert all(slack(exact, each, expected[each.request_id].tokens) < NEAR_TIE for each in departed)
    assert len(departed) <= REQUESTS / 200

    stats, kv = engine.stats(), engine.scheduler.kv
    assert stats.preemptions > 20
    assert reasons.count(FinishReason.ABORT) > 20
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert sum(finished.cached_tokens > 0 for finished in outcome.values()) > 100
    assert (stats.running, stats.waiting) == (0, 0)
    assert not kv.leases
    kv.clear()
    kv.check()
    assert kv.allocator.free_pages == kv.allocator.num_pages
    assert kv.table.free_rows == 12


def is_right(finished: Finished, expected: Finished) -> bool:
    """An aborted text is the beginning of the whole one; a refused one is empty."""
    if finished.reason in (FinishReason.ABORT, FinishReason.REFUSED):
        return finished.tokens == expected.tokens[: len(finished.tokens)]
    return finished.tokens == expected.tokens and finished.reason is expected.reason
