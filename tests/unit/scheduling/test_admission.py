"""Which requests start when: shared prefixes, the reserve for outputs, fair chunks, and what admission costs."""

from __future__ import annotations

import random

import pytest

from eagle_server.cache.radix import RadixCache
from eagle_server.plan import CycleResult, Failure, SequenceOutput
from eagle_server.request import FinishReason
from eagle_server.scheduling import admission
from eagle_server.scheduling.admission import OutputGrowth, peak_growth
from eagle_server.scheduling.scheduler import Scheduler
from eagle_server.scheduling.sequence import Sequence
from tests.unit.scheduling.test_scheduler import add, cycle, finish, lengths, names, scheduler, work


def long_scheduler(slots: int = 4000, page: int = 1, **settings: object) -> Scheduler:
    return scheduler(slots, page, **{"context_length": 2000, "chunked_prefill_size": 100, "radix": True, **settings})


def prefilled(it: Scheduler) -> int:
    """Run to the end. Returns how many prompt tokens were computed."""
    computed = 0
    for _ in range(5000):
        if not it.has_work():
            return computed
        cycle(it)
        computed += it.cycle.computed
    raise AssertionError("the scheduler does not come to an end")


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("uses_features", [True, False])
def test_equal_prompts_that_arrive_together_are_prefilled_once(page: int, uses_features: bool) -> None:
    it = long_scheduler(page=page, uses_features=uses_features)
    for choice in range(8):
        add(it, f"{choice}", 300, max_tokens=4)
    computed = [0] * 8
    while it.has_work():
        plan, _ = cycle(it)
        for chunk in plan.chunks:
            computed[chunk.req_pool_index] += len(chunk.tokens)
    assert computed[0] == 300
    assert all(0 < each <= page for each in computed[1:]), "each computes the last token, whose logits it needs"


def test_equal_prompts_with_different_salts_neither_wait_for_each_other_nor_share() -> None:
    it = long_scheduler()
    for name, salt in {"a": "x", "b": "y", "c": None, "d": "x"}.items():
        add(it, name, 300, max_tokens=4, cache_salt=salt)
    cycle(it)
    assert names(it) == (["a", "b", "c"], ["d"]), "only the request with the same salt waits for the first one's KV"
    cached = {name: deltas[-1].cached_tokens for name, deltas in finish(it).items()}
    assert cached == {"a": 0, "b": 0, "c": 0, "d": 299}


def test_prompts_with_a_common_prefix_wait_for_it_and_no_longer() -> None:
    it = long_scheduler()
    add(it, "a", 500)
    add(it, "b", [*range(250), *range(1000, 1100)])
    held = 0
    while names(it)[1]:
        cycle(it)
        held += bool(names(it)[1])
    assert held == 3, "two chunks of 100 and one that reaches 250; then it starts beside the rest of the first prompt"
    (b,) = (each for each in it.running if each.request.request_id == "b")
    assert b.cached_tokens == 249
    assert it.running[0].prefilling


def test_a_short_common_prefix_is_not_worth_waiting_for() -> None:
    it = long_scheduler()
    add(it, "a", 60)
    add(it, "b", [*range(20), *range(1000, 1040)])
    assert len(cycle(it)[0].chunks) == 2


@pytest.mark.parametrize("end", ["abort", "preempt", "fail"])
def test_who_waits_for_a_request_that_leaves_goes_on(end: str) -> None:
    it = long_scheduler()
    add(it, "a", 250, max_tokens=2)
    add(it, "b", 250, max_tokens=2)
    cycle(it)
    assert names(it) == (["a"], ["b"])
    if end == "abort":
        it.abort("a")
    elif end == "preempt":
        it._preempt(it.running[0])
    else:
        cycle(it)
        it.schedule()
        it.commit(CycleResult((SequenceOutput(failed=Failure(FinishReason.ERROR, "broken")),), ()))
        assert it.kv.radix is not None
        assert it.kv.radix.cached_pages == 0, "nothing of a failed prompt stays"
    deltas = finish(it)
    assert deltas["b"][-1].finish_reason is FinishReason.LENGTH
    assert deltas["b"][-1].cached_tokens == {"abort": 100, "preempt": 249, "fail": 0}[end]


def test_requests_with_prompt_logprobs_share_nothing_and_wait_for_nobody() -> None:
    it = long_scheduler()
    add(it, "a", 250, prompt_logprobs=True)
    add(it, "b", 250)
    add(it, "c", 250, prompt_logprobs=True)
    cycle(it)
    assert names(it) == (["a", "b", "c"], [])
    assert all(deltas[-1].cached_tokens == 0 for deltas in finish(it).values())


def test_younger_requests_pass_one_that_waits_for_a_shared_prefix() -> None:
    it = long_scheduler()
    add(it, "a", 250)
    add(it, "b", 250)
    add(it, "c", range(1000, 1010))
    cycle(it)
    assert names(it) == (["a", "c"], ["b"])


def test_cached_tokens_are_those_of_others_not_those_that_it_computed_before_a_preemption() -> None:
    it = long_scheduler()
    add(it, "a", 250, max_tokens=2)
    cycle(it)
    it._preempt(it.running[0])
    assert finish(it)["a"][-1].cached_tokens == 0


def test_a_short_prompt_is_prefilled_beside_a_long_one_at_once() -> None:
    it = long_scheduler()
    add(it, "long", 1900, max_tokens=1)
    cycle(it)
    add(it, "short", range(2000, 2010), max_tokens=1)
    plan, deltas = cycle(it)
    assert lengths(plan) == [(100, 90), (0, 10)]
    assert [delta.request_id for delta in deltas] == ["short"]


def test_a_long_prompt_has_half_of_every_cycle_while_short_ones_keep_coming() -> None:
    it = long_scheduler(slots=20_000)
    add(it, "long", 1900, max_tokens=1)
    for number in range(38):
        add(it, f"{number}", [number, *range(3000, 3200)], max_tokens=1)
        _, deltas = cycle(it)
    assert "long" in [delta.request_id for delta in deltas], "after 1900 / 50 cycles"


def test_prompts_of_about_the_same_length_are_prefilled_in_order() -> None:
    it = long_scheduler(radix=False)
    for name, length in (("a", 50), ("b", 49), ("c", 48), ("d", 47)):
        add(it, name, length)
    plan, _ = cycle(it)
    assert lengths(plan) == [(0, 50), (0, 49), (0, 1)]


def test_a_request_that_lacks_kv_is_passed_by_as_many_tokens_as_it_has() -> None:
    it = scheduler(slots=100)
    add(it, "running", 20, max_tokens=12)
    cycle(it)
    add(it, "large", 50, max_tokens=10)
    for number in range(20):
        add(it, f"{number}", 2, max_tokens=2)
    assert names(it)[1][0] == "large"
    it.kv.allocator.allocate(40)  # so that "large" does not fit and the small ones do
    passed: set[str] = set()
    for _ in range(200):
        it.schedule()
        passed |= {name for name in names(it)[0] if name != "running"}
        it.commit(work(it._planned[0]))
        if names(it)[0] == []:
            break
    assert names(it)[1][0] == "large"
    assert len(passed) == 60 // 4


def outputs_longer_than_prompts(it: Scheduler, seed: int) -> tuple[float, float]:
    """(preemptions per request, computed over prompt tokens) of 60 requests in a pool that holds nine at their ends."""
    rng, prompts = random.Random(seed), 0
    for number in range(60):
        prompt = [rng.randrange(1000) for _ in range(rng.randrange(10, 30))]
        prompts += len(prompt)
        add(it, f"{number}", prompt, max_tokens=rng.randrange(120, 200))
    return prefilled(it) / prompts, it.totals.preemptions / 60


def test_outputs_far_longer_than_prompts_cause_few_preemptions() -> None:
    settings = {"radix": True, "max_running_requests": 64, "context_length": 300}
    computed, preemptions = outputs_longer_than_prompts(scheduler(1600, **settings), 0)
    without = outputs_longer_than_prompts(scheduler(1600, reserve=False, **settings), 0)
    assert preemptions < without[1] / 5
    assert computed - 1 < (without[0] - 1) / 2, "tokens computed again"


def test_a_request_is_not_admitted_in_the_cycle_that_preempts() -> None:
    it = scheduler(slots=60, reserve=False)
    for name, prompt in (("a", 14), ("b", 16), ("c", 16)):
        add(it, name, prompt, max_tokens=20)
    while not it.totals.preemptions:
        assert not it.cycle.preemptions
        cycle(it)
    assert "c" in names(it)[1]


def test_a_large_max_tokens_that_nobody_uses_stops_reserving_kv() -> None:
    growth = OutputGrowth()
    before = growth.reserve(0, 1000)
    for _ in range(50):
        growth.ended(20, 1000)
    assert growth.reserve(0, 1000) < before / 10


def test_preemptions_raise_the_reserve_and_requests_that_end_lower_it() -> None:
    growth = OutputGrowth()
    for _ in range(1000):
        growth.ended(100, 100)
    assert growth.reserve(0, 100) == 50
    for _ in range(50):
        growth.preempted()
    assert growth.reserve(0, 100) == 100
    assert growth.reserve(90, 100) == 10


def test_the_peak_is_what_a_step_by_step_growth_needs() -> None:
    rng = random.Random(0)
    for _ in range(200):
        requests = [(rng.randrange(12), rng.randrange(8)) for _ in range(rng.randrange(1, 8))]
        used = peak = 0
        for step in range(1, 13):
            used -= sum(pages + added for added, pages in requests if added == step - 1)
            used += sum(1 + (0 if added >= step else -1) for added, _ in requests)
            peak = max(peak, used)
        assert peak_growth(requests) == peak


def test_a_waiting_prompt_is_not_looked_up_again_until_something_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    it = scheduler(slots=80, radix=True, chunked_prefill_size=32)
    add(it, "a", 20, max_tokens=40)
    cycle(it)
    add(it, "b", range(100, 150), max_tokens=10)
    looked: list[int] = []
    match = RadixCache.match
    monkeypatch.setattr(RadixCache, "match", lambda it, keys, salt: looked.append(len(keys)) or match(it, keys, salt))
    monkeypatch.setattr(admission, "bigrams", lambda tokens: pytest.fail("keys are computed once"))
    for _ in range(20):
        cycle(it)
    assert names(it) == (["a"], ["b"])
    assert looked == [49]
    it.abort("a")
    cycle(it)
    assert names(it) == (["b"], [])
    assert looked == [49, 49]


def test_no_step_searches_a_list_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search in a list compares requests. 256 of them prefill, decode, are preempted and aborted, and end."""
    compared: list[int] = []
    monkeypatch.setattr(Sequence, "__eq__", lambda left, right: compared.append(1) or left is right)
    it = scheduler(2000, reserve=False, radix=True, max_running_requests=256, chunked_prefill_size=2000)
    for number in range(300):
        add(it, f"{number}", [number, 1, 2], max_tokens=20)
    cycle(it)
    assert len(it.running) > 200
    while it.has_work():
        cycle(it)
        it.abort(f"{it.totals.cycles}")
    assert it.totals.preemptions > 0
    assert not compared
