"""The statistics of the cycles add up to the statistics of the requests."""

from __future__ import annotations

from eagle_server.engine.engine import Engine
from eagle_server.request import CycleStats, Request, TokenDelta
from tests.support.engines import admit_without_reserve, plain, random_head, random_target, request, speculative

STAGES = {"budget", "read", "extend", "propose", "build_tree", "verify", "accept", "keep", "prefill", "emit"}


def drive(engine: Engine, requests: list[Request]) -> tuple[list[CycleStats], list[TokenDelta]]:
    for each in requests:
        engine.add(each)
    cycles: list[CycleStats] = []
    deltas: list[TokenDelta] = []
    while engine.has_work():
        deltas += engine.step()
        cycle = engine.take_cycle()
        assert cycle is not None
        assert engine.take_cycle() is None
        cycles.append(cycle)
    return cycles, deltas


def requests() -> list[Request]:
    """Six requests that cause preemptions in a pool of 160 slots. Half of them share a prefix."""
    prompts = [[*range(1, 21 + (number % 2)), 30 + number] for number in range(6)]
    return [request(number, prompt, max_tokens=40, ignore_eos=True) for number, prompt in enumerate(prompts)]


def test_cycles_add_up_to_the_requests_under_preemption() -> None:
    target = random_target()
    engine = speculative(
        target, random_head(target, "EAGLE"), max_total_tokens=160, max_running_requests=6, chunked_prefill_size=16
    )
    admit_without_reserve(engine.scheduler)
    asked = requests()
    cycles, deltas = drive(engine, asked)
    ends = [delta for delta in deltas if delta.finish_reason is not None]
    stats = engine.stats()

    assert sum(cycle.preemptions for cycle in cycles) == stats.preemptions > 0
    assert sum(cycle.prompt_tokens for cycle in cycles) == sum(len(each.prompt_token_ids) for each in asked)
    assert sum(cycle.cache_queries for cycle in cycles) == sum(len(each.prompt_token_ids) for each in asked)
    assert sum(cycle.cache_hits for cycle in cycles) == sum(delta.cached_tokens for delta in ends) > 0
    verified = [pair for cycle in cycles for pair in cycle.verified]
    assert sum(drafted for drafted, _ in verified) == sum(delta.spec.drafted for delta in ends if delta.spec)
    assert sum(accepted for _, accepted in verified) == sum(delta.spec.accepted for delta in ends if delta.spec) > 0
    assert sum(drafted > 0 for drafted, _ in verified) == sum(delta.spec.cycles for delta in ends if delta.spec)
    computed = sum(cycle.computed for cycle in cycles)
    assert computed > sum(cycle.prompt_tokens - cycle.cache_hits for cycle in cycles)  # more after preemptions
    assert set().union(*(cycle.stage_seconds for cycle in cycles)) == STAGES
    assert all(0 < sum(cycle.stage_seconds.values()) <= cycle.seconds for cycle in cycles)


def test_a_request_has_its_timing_at_its_end() -> None:
    engine = plain(random_target(), max_running_requests=1)
    _, deltas = drive(engine, [request(0, range(1, 9)), request(1, range(1, 9))])
    first, second = (delta.timing for delta in deltas if delta.finish_reason is not None)
    assert first is not None
    assert second is not None
    assert second.queue >= first.prefill + first.decode
    assert min(first.queue, first.prefill, first.decode, second.prefill, second.decode) > 0
    assert all(delta.timing is None for delta in deltas if delta.finish_reason is None)


def test_plain_cycles_verify_no_drafts_and_query_no_disabled_prefix_cache() -> None:
    engine = plain(random_target(), disable_radix_cache=True)
    cycles, _ = drive(engine, [request(0, range(1, 9), max_tokens=5, ignore_eos=True)])
    assert [cycle.verified for cycle in cycles] == [[], *[[(0, 0)]] * 4]
    assert [cycle.computed for cycle in cycles] == [8, 0, 0, 0, 0]
    assert sum(cycle.cache_queries for cycle in cycles) == 0


def test_an_abort_before_the_prompt_is_computed_has_no_timing() -> None:
    engine = plain(random_target())
    engine.add(request(0, range(1, 9)))
    engine.abort("0")
    [delta] = engine.step()
    assert delta.timing is None
    assert engine.take_cycle() is None
