"""Random requests with aborts, preemptions and failures: no page is lost, no reference stays, and no text changes."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from typing import Any

import pytest

from eagle_server.engine.engine import Engine
from eagle_server.plan import CyclePlan, CycleResult
from eagle_server.request import FinishReason, Request
from eagle_server.speculation.tree import Tree
from eagle_server.worker.batch.batch import DecodeBatch
from eagle_server.worker.drafters.ngram.drafter import NgramTries
from eagle_server.worker.verifier import Prefilled, Verified
from tests.lossless.conftest import Drafting
from tests.lossless.drafters import CASES
from tests.lossless.pairs import weights_of
from tests.support.engines import (
    CONTEXT,
    Finished,
    admit_without_reserve,
    plain,
    random_head,
    random_target,
    request,
    run,
    speculative,
)
from tests.support.scoring import NEAR_TIE, in_float64, slack

pytestmark = pytest.mark.deep

VOCAB, ROWS = 24, 12


def random_requests(rng: random.Random, count: int) -> list[Request]:
    """Prompts share a few beginnings, so that they hit the cache. A few requests can never be served."""
    beginnings = [[rng.randrange(1, VOCAB) for _ in range(40)] for _ in range(4)]
    requests = []
    for i in range(count):
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
            "stop_token_ids": () if i % 8 else tuple(range(0, VOCAB, 3)),
        }
        if rng.random() < 0.02:
            settings["max_tokens"] = CONTEXT
        requests.append(request(i, prompt, **settings))
    return requests


def disturbed(engine: Engine, requests: list[Request], rng: random.Random) -> dict[str, Finished]:
    """Run requests that arrive in bursts. One in eight is aborted, in any state."""
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


def fail_now_and_then(engine: Engine, every: int) -> None:
    """Once per `every` cycles, the target's logits of the youngest decoding request become NaN."""
    verifier, cycles = engine.worker.verifier, 0
    verify, mixed = verifier.verify, verifier.mixed

    def broken(verified: Verified, batch: DecodeBatch, tree: Tree) -> Verified:
        nonlocal cycles
        cycles += 1
        if cycles % every:
            return verified
        logits = verified.logits.clone()
        last, size = len(batch.decodes), tree.size
        logits[(last - 1) * size : last * size] = float("nan")
        return replace(verified, logits=logits)

    def failing_mixed(batch: DecodeBatch, tree: Tree, *prompts: Any) -> tuple[Verified, Prefilled]:
        verified, prefilled = mixed(batch, tree, *prompts)
        return broken(verified, batch, tree), prefilled

    verifier.verify = lambda batch, tree: broken(verify(batch, tree), batch, tree)  # type: ignore[method-assign]
    verifier.mixed = failing_mixed  # type: ignore[method-assign]


def texts_seen(engine: Engine) -> dict[int, list[int]]:
    """A dict that receives the token list of every request that runs from now on, by id()."""
    worker, original, seen = engine.worker, engine.worker.run, dict[int, list[int]]()

    def watched(plan: CyclePlan, *args: Any) -> CycleResult:
        seen.update((id(each.tokens), each.tokens) for each in engine.scheduler.running)
        return original(plan, *args)

    worker.run = watched  # type: ignore[method-assign]
    return seen


def leaked_texts(engine: Engine, seen: dict[int, list[int]]) -> int:
    """How many references to the texts remain, one cycle after their last request has ended."""
    texts = list(seen.values())
    run(engine, [request("one more cycle", [1, 2, 3], max_tokens=2)])
    seen.clear()
    gc.collect()
    lists = {id(text) for text in texts}
    holders = [holder for holder in gc.get_referrers(*texts) if holder is not texts]
    return sum(id(thing) in lists for holder in holders for thing in gc.get_referents(holder))


def check_everything_is_free(engine: Engine) -> None:
    stats, kv = engine.stats(), engine.scheduler.kv
    assert (stats.running, stats.waiting) == (0, 0)
    assert not kv.allocations
    kv.clear()
    kv.check()
    assert kv.allocator.free_pages == kv.allocator.num_pages
    assert kv.table.free_rows == ROWS


@pytest.mark.deep
def test_hundreds_of_requests_with_aborts_and_preemptions_leave_nothing_behind() -> None:
    rng, target = random.Random(16), random_target(VOCAB, hidden=16, layers=3, seed=16)
    requests = random_requests(rng, 500)
    expected = run(plain(target, max_running_requests=64), requests)
    head = random_head(target, "EAGLE3")
    engine = speculative(
        target, head, page_size=16, max_total_tokens=288, max_running_requests=ROWS, chunked_prefill_size=48
    )

    admit_without_reserve(engine.scheduler)
    outcome = disturbed(engine, requests, rng)

    reasons = [outcome[each.request_id].reason for each in requests]
    assert len(outcome) == len(requests)
    assert set(reasons) == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.REFUSED}
    departed = [each for each in requests if not is_right(outcome[each.request_id], expected[each.request_id])]
    exact = in_float64(target)
    assert all(slack(exact, each, expected[each.request_id].tokens) < NEAR_TIE for each in departed)
    assert len(departed) <= len(requests) / 200

    stats = engine.stats()
    assert stats.preemptions > 10
    assert reasons.count(FinishReason.ABORT) > 20
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert sum(finished.cached_tokens > 0 for finished in outcome.values()) > 50
    check_everything_is_free(engine)


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, dict[str, Finished]]:
    """Per target, the outputs of plain decoding for the requests of the next test. The first drafter fills it."""
    return {}


@pytest.mark.parametrize("drafting", list(CASES), indirect=True)
def test_no_state_of_a_request_outlives_it(drafting: Drafting, undisturbed: dict[str, dict[str, Finished]]) -> None:
    """Pages, request slots and the drafter's state are freed, however a request ends. A failure affects no others."""
    rng = random.Random(1)
    requests = [*random_requests(rng, 36), request("never served", [1], max_tokens=CONTEXT)]
    growing = [
        request(f"growing {i}", [5, i], seed=i, max_tokens=40, temperature=1.0, ignore_eos=True) for i in range(6)
    ]
    target = weights_of(drafting.pair)
    if target not in undisturbed:
        undisturbed[target] = run(plain(drafting.pair.target, max_running_requests=60), [*requests, *growing])
    expected = undisturbed[target]
    window = drafting.engine().scheduler.limits.num_lookahead_slots
    engine = drafting.engine(max_total_tokens=110 + 2 * window, max_running_requests=ROWS, chunked_prefill_size=48)
    fail_now_and_then(engine, every=20)
    seen = texts_seen(engine)
    admit_without_reserve(engine.scheduler)
    for each in growing:  # they outgrow the pool, so that one is preempted
        engine.add(each)

    outcome = disturbed(engine, requests, rng)

    assert len(outcome) == len(expected)
    assert {finished.reason for finished in outcome.values()} == set(FinishReason)
    assert engine.stats().preemptions > 0
    assert (0 < engine.stats().accepted_tokens < engine.stats().drafted_tokens) == drafting.drafts
    both = [*requests, *growing]
    departed = [each for each in both if not is_right(outcome[each.request_id], expected[each.request_id])]
    exact = in_float64(drafting.pair.target) if departed else None
    assert all(slack(exact, each, expected[each.request_id].tokens) < NEAR_TIE for each in departed)
    assert len(departed) <= 1
    assert len(seen) > 20
    assert leaked_texts(engine, seen) == 0
    check_everything_is_free(engine)


@pytest.mark.parametrize("drafting", ["NGRAM"], indirect=True)
def test_a_drafter_that_keeps_its_state_is_caught(drafting: Drafting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NgramTries, "forget", lambda *_: None)
    engine = drafting.engine(max_running_requests=ROWS)
    seen = texts_seen(engine)
    run(engine, [request(i, [1, 2, 1, 2, i]) for i in range(3)])
    assert leaked_texts(engine, seen) > 0


def is_right(finished: Finished, expected: Finished) -> bool:
    """Whether the text is as expected. An aborted or failed text is a prefix of it; a refused text is empty."""
    if finished.reason in (FinishReason.ABORT, FinishReason.REFUSED, FinishReason.ERROR):
        return finished.tokens == expected.tokens[: len(finished.tokens)]
    return finished.tokens == expected.tokens and finished.reason is expected.reason
