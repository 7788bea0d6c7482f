"""The scheduler with a worker that counts upwards: the token at position p is p, so a text shows wrong commits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from eagle_server.cache.allocator import PageAllocator
from eagle_server.cache.manager import KVCacheManager
from eagle_server.cache.page_table import PageTable
from eagle_server.cache.radix import RadixCache
from eagle_server.plan import Chunk, CyclePlan, CycleResult, Decode, Failure, SequenceOutput
from eagle_server.request import FinishReason, TokenDelta
from eagle_server.scheduling import scheduler as scheduler_module
from eagle_server.scheduling.admission import SchedulerLimits
from eagle_server.scheduling.scheduler import SPARE_SLOTS, Scheduler
from tests.support.engines import admit_without_reserve, request
from tests.support.sampling import request_sampling

GREEDY = request_sampling(temperature=0.0)
LIMITS = SchedulerLimits(
    context_length=64,
    max_running_requests=8,
    chunked_prefill_size=16,
    num_lookahead_slots=4,
    steps=3,
    uses_features=True,
)


def scheduler(
    slots: int = 200,
    page: int = 1,
    *,
    radix: bool = False,
    reserve: bool = True,
    shared: bool = False,
    **limits: Any,
) -> Scheduler:
    """Without `reserve`, requests are admitted whenever they fit, so that preemptions occur."""
    allowed = replace(LIMITS, **limits)
    width = allowed.context_length + allowed.num_lookahead_slots
    table = PageTable(allowed.max_running_requests, width, page, shared=shared)
    kv = KVCacheManager(PageAllocator(slots // page, page), table, RadixCache(page) if radix else None)
    it = Scheduler(allowed, kv)
    if not reserve:
        admit_without_reserve(it)
    return it


def add(it: Scheduler, name: str, prompt: int | Sequence[int], *, stops: Sequence[int] = (), **settings: Any) -> None:
    """Queue a request. `prompt` is its tokens, or the length of a prompt 0, 1, 2, ..."""
    tokens = list(range(prompt)) if isinstance(prompt, int) else list(prompt)
    each = request(name, tokens, **settings)
    assert it.refusal(each) is None
    it.add(each, GREEDY, frozenset(stops))


def work(plan: CyclePlan, accepted: int = 0) -> CycleResult:
    """Run a plan: every decode accepts `accepted` of 3 drafted tokens; every last chunk draws one token."""

    def prefilled(chunk: Chunk) -> SequenceOutput:
        end = chunk.start + len(chunk.tokens)
        return SequenceOutput((end,)) if chunk.next_token is None else SequenceOutput()

    def decoded(decode: Decode) -> SequenceOutput:
        first = decode.seq_len + 1
        return SequenceOutput(tuple(range(first, first + accepted + 1)), drafted=3)

    return CycleResult(tuple(map(prefilled, plan.chunks)), tuple(map(decoded, plan.decodes)))


def cycle(it: Scheduler, accepted: int = 0) -> tuple[CyclePlan, list[TokenDelta]]:
    plan = it.schedule()
    deltas = it.commit(work(plan, accepted))
    it.kv.check()
    return plan, deltas


def finish(it: Scheduler, accepted: int = 0) -> dict[str, list[TokenDelta]]:
    deltas: dict[str, list[TokenDelta]] = {}
    for _ in range(500):
        if not it.has_work():
            return deltas
        for delta in cycle(it, accepted)[1]:
            deltas.setdefault(delta.request_id, []).append(delta)
    raise AssertionError("the scheduler does not come to an end")


def names(it: Scheduler) -> tuple[list[str], list[str]]:
    return [s.request.request_id for s in it.running], [s.request.request_id for s in it.waiting]


def lengths(plan: CyclePlan) -> list[tuple[int, int]]:
    return [(chunk.start, len(chunk.tokens)) for chunk in plan.chunks]


def test_a_prompt_is_prefilled_in_chunks_that_name_the_token_after_them() -> None:
    it = scheduler(chunked_prefill_size=4)
    add(it, "a", 10)
    plans = [cycle(it)[0] for _ in range(4)]
    assert [lengths(plan) for plan in plans] == [[(0, 4)], [(4, 4)], [(8, 2)], []]
    assert [chunk.next_token for plan in plans for chunk in plan.chunks] == [4, 8, None]
    assert [chunk.tokens for chunk in plans[1].chunks] == [(4, 5, 6, 7)]
    row = plans[0].chunks[0].req_pool_index
    assert plans[3].decodes == (Decode(row, 10, 10, GREEDY, all_tokens=[*range(12)], tokens_left=23),)


def test_decodes_run_in_every_cycle_while_prompts_share_the_chunk_budget() -> None:
    it = scheduler(chunked_prefill_size=8)
    add(it, "a", 3)
    cycle(it)
    add(it, "b", 6)
    add(it, "c", 6)
    add(it, "d", 3)
    plan, deltas = cycle(it)
    assert len(plan.decodes) == 1
    assert lengths(plan) == [(0, 5), (0, 3)], "half of the budget for b, the oldest; d is the shortest"
    assert [delta.request_id for delta in deltas] == ["a", "d"]
    plan, _ = cycle(it)
    assert len(plan.decodes) == 2
    assert lengths(plan) == [(5, 1), (0, 6)]


def test_requests_are_admitted_in_order_of_arrival_while_slots_and_kv_are_free() -> None:
    it = scheduler(slots=200, max_running_requests=3)
    for name in "abcd":
        add(it, name, 5)
    it.schedule()
    assert names(it) == (["a", "b", "c"], ["d"])


@pytest.mark.parametrize("page", [1, 4])
def test_admission_takes_pages_for_the_prompt_and_the_window(page: int) -> None:
    it = scheduler(slots=32, page=page)
    add(it, "a", 12, max_tokens=4)
    add(it, "b", 13, max_tokens=1)
    cycle(it)
    assert names(it) == (["a"], ["b"]), "13 and 4 slots are more than the 16 that are left"
    assert it.running[0].allocation is not None
    assert len(it.running[0].allocation.pages) == 16 // page


@pytest.mark.parametrize("accepted", [0, 2])
def test_the_youngest_is_preempted_and_every_text_is_complete(accepted: int) -> None:
    it = scheduler(slots=60, reserve=False)
    for name, prompt in (("a", 14), ("b", 16), ("c", 16)):
        add(it, name, prompt, max_tokens=20)
    cycle(it)
    assert names(it)[0] == ["a", "b", "c"]
    while not it.totals.preemptions:
        cycle(it, accepted)
    assert names(it) == (["a", "b"], ["c"])
    texts: dict[str, list[int]] = {}
    for name, deltas in finish(it, accepted).items():
        texts[name] = [token for delta in deltas for token in delta.token_ids]
        assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert texts["a"][-1] == 33
    assert texts["b"][-1] == 35
    assert texts["c"][-1] == 35
    assert all(text == list(range(text[0], text[-1] + 1)) for text in texts.values()), "a token twice, or none"


def test_a_preempted_request_is_first_in_the_queue_and_resumes_as_a_prompt_of_all_its_tokens() -> None:
    it = scheduler(slots=46, reserve=False, chunked_prefill_size=32, max_running_requests=2)
    add(it, "a", 16, max_tokens=8)
    add(it, "b", range(100, 114), max_tokens=12)
    add(it, "c", 3, max_tokens=1)
    cycle(it)
    while not it.totals.preemptions:
        cycle(it)
    assert names(it) == (["a"], ["b", "c"])
    text = list(it.waiting[0].tokens)
    assert len(text) > 15
    while names(it)[1][:1] == ["b"]:
        plan, _ = cycle(it)
    assert [chunk.tokens for chunk in plan.chunks][:1] == [tuple(text)]
    assert plan.chunks[0].next_token is None


def test_a_preempted_request_finds_its_kv_in_the_cache_up_to_draft_computed_tokens() -> None:
    """Draft KV is one cycle behind target KV, so the newest tokens are computed again."""
    it = scheduler(radix=True)
    add(it, "a", 8, max_tokens=9)
    cycle(it)
    sequence = it.running[0]
    cycle(it, accepted=2)
    assert (sequence.num_computed_tokens, sequence.draft_computed_tokens) == (11, 8)
    it._preempt(sequence)
    plan, _ = cycle(it)
    assert lengths(plan) == [(8, 4)]
    assert plan.chunks[0].tokens == (8, 9, 10, 11)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_prompt_that_is_answered_at_once_is_cached(max_tokens: int) -> None:
    """The drafter computes a chunk in the same cycle as the target. Only the last token's pair is not known yet."""
    it = scheduler(radix=True)
    add(it, "a", 40, max_tokens=max_tokens)
    finish(it)
    add(it, "b", 40, max_tokens=max_tokens)
    assert finish(it)["b"][0].cached_tokens == 39


def test_a_preempted_prefill_loses_no_chunk() -> None:
    it = scheduler(radix=True, chunked_prefill_size=8)
    add(it, "a", 40, max_tokens=1)
    assert [lengths(cycle(it)[0]) for _ in range(2)] == [[(0, 8)], [(8, 8)]]
    it._preempt(it.running[0])
    assert lengths(cycle(it)[0]) == [(16, 8)]


def test_without_a_draft_all_computed_tokens_are_cached() -> None:
    it = scheduler(radix=True, uses_features=False, num_lookahead_slots=1)
    add(it, "a", 8, max_tokens=3)
    finish(it)
    add(it, "b", 11, max_tokens=1)
    deltas = finish(it)
    assert deltas["b"][0].cached_tokens == 10


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding", "preempted"])
def test_a_request_is_aborted_in_any_state_and_its_kv_is_free_at_once(state: str) -> None:
    it = scheduler(slots=48, reserve=False, chunked_prefill_size=12)
    add(it, "a", 12, max_tokens=18)
    add(it, "b", 18, max_tokens=14)
    if state in ("prefilling", "decoding", "preempted"):
        cycle(it)
    if state in ("decoding", "preempted"):
        cycle(it)
        cycle(it)
    while state == "preempted" and not it.totals.preemptions:
        cycle(it)
    (sequence,) = [s for s in (*it.running, *it.waiting) if s.request.request_id == "b"]
    assert (sequence in it.waiting) == (state in ("waiting", "preempted"))
    held = 0
    if sequence.allocation is not None:
        assert sequence.prefilling == (state == "prefilling")
        held = len(sequence.allocation.pages)
    free = it.kv.allocator.free_pages
    delta = it.abort("b")
    assert delta is not None
    assert (delta.finish_reason, delta.token_ids) == (FinishReason.ABORT, [])
    assert it.kv.allocator.free_pages == free + held
    it.kv.check()
    assert it.abort("b") is None
    assert [deltas[-1].finish_reason for deltas in finish(it).values()] == [FinishReason.LENGTH]


def test_req_pool_indices_are_released_to_the_worker_before_another_request_gets_them() -> None:
    it = scheduler(max_running_requests=1)
    add(it, "a", 3, max_tokens=1)
    add(it, "b", 3, max_tokens=1)
    first, _ = cycle(it)
    second, _ = cycle(it)
    assert first.released == ()
    assert second.released == (first.chunks[0].req_pool_index,) == (second.chunks[0].req_pool_index,)


def test_refusals_say_what_is_too_long() -> None:
    it = scheduler(slots=40, page=4)
    assert it.refusal(request("a", [])) == "the prompt is empty"
    too_long = it.refusal(request("a", range(50), max_tokens=15))
    assert too_long == "50 prompt tokens and max_tokens 15 exceed the context length of 64"
    assert it.refusal(request("a", range(26), max_tokens=10)) is None
    too_big = it.refusal(request("a", range(27), max_tokens=10))
    assert too_big is not None
    assert "needs 44 KV slots and the pool has 40" in too_big


@pytest.mark.parametrize(("max_tokens", "expected"), [(1, [5]), (2, [5, 6]), (4, [5, 6, 7, 8]), (5, [5, 6, 7, 8, 9])])
def test_max_tokens_cuts_inside_an_accepted_path(max_tokens: int, expected: list[int]) -> None:
    it = scheduler()
    add(it, "a", 5, max_tokens=max_tokens)
    deltas = finish(it, accepted=3)["a"]
    assert [token for delta in deltas for token in delta.token_ids] == expected
    assert deltas[-1].finish_reason is FinishReason.LENGTH


def test_a_stop_token_ends_the_text_and_is_part_of_it() -> None:
    it = scheduler()
    add(it, "a", 5, stops=(7, 8), max_tokens=20)
    deltas = finish(it, accepted=3)["a"]
    assert [token for delta in deltas for token in delta.token_ids] == [5, 6, 7]
    assert deltas[-1].finish_reason is FinishReason.STOP


def test_tokens_past_a_cut_are_not_counted_as_accepted() -> None:
    it = scheduler()
    add(it, "a", 5, max_tokens=7)
    spec = finish(it, accepted=3)["a"][-1].spec
    assert spec is not None
    assert spec.histogram == [
        0,
        0,
        1,
        1,
    ]  # four tokens with three drafts, then two of four, both drafts
    assert (spec.drafted, spec.accepted, it.totals.accepted, it.totals.generated) == (6, 5, 5, 7)


def test_max_tokens_0_ends_after_the_prompt() -> None:
    it = scheduler()
    add(it, "a", 5, max_tokens=0)
    (delta,) = finish(it)["a"]
    assert (delta.token_ids, delta.finish_reason, delta.spec) == ([], FinishReason.LENGTH, None)


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.REFUSED])
@pytest.mark.parametrize("page", [1, 4])
def test_a_failed_request_adds_nothing_to_the_cache(page: int, reason: FinishReason) -> None:
    it = scheduler(page=page, radix=True)
    add(it, "a", 13, max_tokens=2)
    finish(it)
    assert it.kv.radix is not None
    cached = it.kv.radix.cached_pages
    assert cached > 0
    add(it, "b", [*range(13), *range(40, 55)], max_tokens=1)
    plan = it.schedule()
    assert plan.chunks[0].start > 0
    failure = Failure(reason, "broken")
    (delta,) = it.commit(CycleResult((SequenceOutput(failed=failure),), ()))
    it.kv.check()
    assert (delta.finish_reason, delta.error, delta.token_ids) == (reason, "broken", [])
    assert it.kv.radix.cached_pages == cached
    assert it.kv.allocator.free_pages == it.kv.allocator.num_pages - cached


def changes_of_the_page_table(it: Scheduler, accepted: int, cycles: int) -> int:
    """In how many cycles the device's copy of the page table is written, while all requests decode."""
    changed = 0
    for _ in range(cycles):
        cycle(it, accepted)
        changed += it.kv.table.refresh() is not None
    return changed


@pytest.mark.parametrize("requests", [1, 8])
def test_the_page_table_changes_in_few_cycles(requests: int) -> None:
    it = scheduler(slots=9000, shared=True, context_length=1000)
    for number in range(requests):
        add(it, str(number), 5 + number, max_tokens=900, ignore_eos=True)
    while any(sequence.prefilling for sequence in it.running) or it.waiting:
        cycle(it)
    changes_of_the_page_table(it, 3, 2)
    assert changes_of_the_page_table(it, 3, 160) <= 160 / (SPARE_SLOTS / 4 - 1)


def test_a_request_gets_no_slots_that_it_cannot_use() -> None:
    it = scheduler(slots=9000, shared=True, context_length=1000)
    add(it, "a", 5, max_tokens=20, ignore_eos=True)
    for _ in range(3):
        cycle(it)
    assert it.running[0].allocation is not None
    assert len(it.running[0].allocation.pages) == 5 + 20 + LIMITS.num_lookahead_slots


@pytest.mark.parametrize("slots", [60, 100, 150, 400])
def test_spare_slots_change_no_decision(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full pool serves as many requests, and preempts as few, as if nobody had any."""
    seen = []
    for spare in (0, SPARE_SLOTS):
        monkeypatch.setattr(scheduler_module, "SPARE_SLOTS", spare)
        it = scheduler(slots=slots, reserve=slots != 150)
        for number in range(12):
            add(it, str(number), 3 + number, max_tokens=40 - number, ignore_eos=True)
        decisions = []
        while it.has_work():
            cycle(it, 1)
            decisions.append((names(it), it.totals.preemptions, it.kv.available_pages))
        seen.append(decisions)
    assert seen[0] == seen[1]
