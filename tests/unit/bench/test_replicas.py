"""The simulation of many replicas: against queueing theory, and against what can be counted by hand."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from eagle_tools.bench.replicas.__main__ import main
from eagle_tools.bench.replicas.conversations import BURSTY, POISSON, Dialogue, Habits, Turn, converse
from eagle_tools.bench.replicas.costs import DEMO_COSTS, ReplicaCosts, read_costs
from eagle_tools.bench.replicas.replica import Replica, SimulatedCache, TurnRequest
from eagle_tools.bench.replicas.routing import POLICIES, BoundedHashing, RoundRobin
from eagle_tools.bench.replicas.simulation import simulate
from eagle_tools.bench.servers import BenchError, running

CYCLE = 0.01  # seconds


def costs(**changes) -> ReplicaCosts:
    """One request at a time, a token per cycle of 10 ms, and prompts for free."""
    plain = ReplicaCosts("m", CYCLE, 0.0, (1,), (CYCLE,), (1.0,), 0.0, 10**9, 1, 512, 4096)
    return replace(plain, **changes)


def single_turns(answers, rate: float, seed: int) -> list[Dialogue]:
    """Poisson arrivals of conversations of one turn."""
    starts = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, len(answers)))
    return [Dialogue(s, i, 1, (Turn(1, int(a), 0.0),)) for i, (s, a) in enumerate(zip(starts, answers, strict=True))]


def pinned(number: int, prompt: int, answer: int, beginning: int = 0, size: int = 10) -> TurnRequest:
    return TurnRequest(number, Dialogue(0.0, beginning, size, ()), 0, prompt, 0.0, answer)


@pytest.mark.parametrize("utilisation", [0.3, 0.6])
@pytest.mark.parametrize("lengths", ["constant", "geometric"])
def test_a_replica_of_batch_one_waits_as_long_as_a_queue_with_one_server(utilisation, lengths):
    """Turn for turn by Lindley's recursion, and on average by Pollaczek and Khinchine.

    M/D/1 for answers of one length, M/M/1 in the limit of long geometric ones.
    """
    mean, count = 20, 30_000
    answers = np.full(count, mean) if lengths == "constant" else np.random.default_rng(1).geometric(1 / mean, count)
    service = answers * CYCLE
    rate = utilisation / service.mean()
    talks = single_turns(answers, rate, seed=2)
    outcome = simulate(costs(), talks, 1, RoundRobin(1))
    waits = outcome.ended - outcome.arrived - outcome.answer_tokens * CYCLE
    expected = rate * (service**2).mean() / (2 * (1 - utilisation))
    assert waits.mean() == pytest.approx(expected, rel=0.1)
    exact = [0.0]
    for seconds, (before, after) in zip(service, itertools.pairwise(talks), strict=False):
        exact.append(max(0.0, exact[-1] + seconds - (after.start - before.start)))
    assert waits == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_turn_ends_once_and_has_no_more_cached_tokens_than_its_prompt(policy):
    model = read_costs(DEMO_COSTS)
    tight = replace(model, kv_tokens=6000, max_running_requests=6)
    for arrivals in (POISSON, BURSTY):
        talks = converse(Habits(beginnings=20, think=1.0, arrivals=arrivals), 4.0, 60.0, model.context_length, seed=3)
        outcome = simulate(tight, talks, 4, POLICIES[policy](4))
        assert len(outcome.ended) == sum(len(talk.turns) for talk in talks)
        assert outcome.answer_tokens.sum() == sum(turn.answer_tokens for talk in talks for turn in talk.turns)
        assert (outcome.cached_tokens < outcome.prompt_tokens).all()
        assert (outcome.arrived < outcome.first_token).all()
        assert (outcome.first_token <= outcome.ended).all()
        assert outcome.tokens_per_cycle >= 1


def test_hits_of_round_robin_and_of_affinity_are_those_counted_by_hand():
    """One conversation of four turns over two replicas; a beginning of 100, 10 new tokens and 10 of each answer."""
    talk = [Dialogue(0.0, 0, 100, (Turn(10, 10, 1.0),) * 4)]
    alternating = simulate(costs(), talk, 2, POLICIES["round-robin"](2))
    assert alternating.prompt_tokens.tolist() == [110, 130, 150, 170]
    # the KV of an answer's last token is never computed: a turn that ended at 120 tokens leaves 119
    assert alternating.cached_tokens.tolist() == [0, 0, 119, 139]
    near = simulate(costs(), talk, 2, POLICIES["cache-aware"](2))
    assert near.cached_tokens.tolist() == [0, 119, 139, 159]


def test_a_shared_beginning_is_computed_once_per_replica():
    talks = [Dialogue(10.0 * i, 7, 100, (Turn(10, 10, 0.0),)) for i in range(4)]
    outcome = simulate(costs(), talks, 2, POLICIES["round-robin"](2))
    assert outcome.cached_tokens.tolist() == [0, 0, 100, 100]


def test_a_prompt_delays_what_decodes_by_its_own_cost():
    """A second request of 200 uncached tokens, in chunks of 100, arrives while the first one decodes."""
    model = costs(prefill_token=0.001, prefill_cycle=0.0, max_running_requests=2, chunked_prefill_size=100)
    talks = [Dialogue(0.0, 0, 1, (Turn(1, 11, 0.0),)), Dialogue(0.0555, 1, 100, (Turn(100, 3, 0.0),))]
    outcome = simulate(model, talks, 1, RoundRobin(1))
    # 2 ms of prompt, six cycles until 62 ms, two of 110 ms with prompts until 282 ms, then two for the last tokens
    order = outcome.arrived.argsort()
    assert outcome.first_token[order].tolist() == pytest.approx([0.002, 0.282])
    assert outcome.ended.tolist() == pytest.approx([0.302, 0.302])


def test_the_least_recently_used_history_goes_first_and_a_beginning_after_its_last_history():
    cache = SimulatedCache(100)
    for number in (1, 2):
        request = pinned(number, 20, 10)
        assert cache.admit(request) == (0 if number == 1 else 10)
        cache.release(request)
        cache.check()
    # 10 of the beginning and two histories of 19; 52 are free
    late = pinned(3, 60, 10, beginning=1)
    assert cache.admit(late) == 0  # 70: 18 tokens of the first history go
    cache.check()
    assert cache.admit(pinned(4, 40, 30)) is None  # 70 are pinned
    cache.release(late)
    again = pinned(1, 30, 10)
    assert cache.admit(again) == 11
    cache.check()
    cache.release(again)
    whole = pinned(9, 90, 10, beginning=5)
    assert cache.admit(whole) == 0
    cache.check()
    assert cache.free == 0


def test_a_larger_batch_takes_longer_cycles_with_fewer_tokens():
    model = costs(batches=(1, 4), cycle_seconds=(0.01, 0.04), cycle_tokens=(3.0, 1.5), max_running_requests=8)
    assert model.seconds_by_batch[:3] == [0, 0.01, pytest.approx(0.02)]
    assert model.seconds_by_batch[8] == pytest.approx(0.08)
    assert model.tokens_by_batch[8] == 1.0  # never below one
    alone = simulate(model, single_turns([31], 1.0, 0), 1, RoundRobin(1))
    assert alone.ended - alone.first_token == pytest.approx(0.1)
    assert alone.tokens_per_cycle == pytest.approx(3.0)


def test_no_replica_exceeds_the_bound_of_bounded_hashing():
    routing, loads = BoundedHashing(10), np.zeros(10, np.int64)
    chosen = []
    for number in range(200):
        place = routing.choose(pinned(number, 20, 10), loads)
        loads[place] += 1
        chosen.append(place)
        assert loads[place] <= -(-1.25 * loads.sum() // 10)
    assert loads.min() > 0
    idle = np.zeros(10, np.int64)
    assert [routing.choose(pinned(number, 20, 10), idle) for number in range(5)] == chosen[:5]


def test_affinity_yields_when_one_replica_has_far_more_load():
    near, bound = POLICIES["cache-aware"](2), POLICIES["cache-aware-tight"](2)
    first, second = pinned(1, 20, 10), pinned(2, 20, 10)
    for routing in (near, bound):
        place = routing.choose(first, np.zeros(2, np.int64))
        loads = np.zeros(2, np.int64)
        loads[place] = 5
        assert (routing.choose(second, loads) == place) is (routing is near)


def test_arrivals_have_the_rate_asked_for_and_bursts_come_together():
    spread = {}
    for arrivals in (POISSON, BURSTY):
        habits = Habits(arrivals=arrivals, turns=1.0)
        starts = np.array([talk.start for talk in converse(habits, 10.0, 4000.0, 4096, seed=5)])
        assert (np.diff(starts) >= 0).all()
        assert len(starts) == pytest.approx(40_000, rel=0.1)
        counts = np.histogram(starts, 400)[0]
        spread[arrivals] = counts.var() / counts.mean()
    assert spread[POISSON] == pytest.approx(1, abs=0.3)
    assert spread[BURSTY] > 5


def test_conversations_fit_the_context():
    for talk in converse(Habits(turns=20.0), 5.0, 60.0, 600, seed=1):
        assert talk.beginning_tokens + sum(turn.new_tokens + turn.answer_tokens for turn in talk.turns) <= 600


def test_a_replica_is_idle_until_a_request_comes_and_after_it():
    server = Replica(costs())
    assert server.end == float("inf")
    server.add(pinned(0, 20, 2), 5.0)
    assert server.end == pytest.approx(5.01)
    assert server.end_run() == []
    assert [request.ended for request in server.end_run()] == [pytest.approx(5.02)]
    assert server.end == float("inf")


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"batches": [2, 1]}, "increase"), ({"cycle_tokens": [0.5]}, "at least one"), ({"kv_tokens": 0}, "limits")],
)
def test_wrong_costs_are_refused_in_one_line(tmp_path, change, reason, capsys):
    right = {name: value for name, value in vars(costs()).items() if not name.endswith("_by_batch")}
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"costs": right | change}))
    with pytest.raises(BenchError):
        read_costs(file)
    assert main(["--costs", str(file), "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench: ") and error.count("\n") == 1


def test_the_command_writes_a_picture_and_every_number(tmp_path, capsys):
    flags = ["--replicas", "1", "4", "--seconds", "60", "--load", "1.2", "--out", str(tmp_path), "--arrivals", BURSTY]
    assert main(flags) == 0
    document = json.loads((tmp_path / "scaling.json").read_text())
    pairs = [(point["replicas"], point["policy"]) for point in document["points"]]
    assert pairs == list(itertools.product((1, 4), POLICIES))
    assert (tmp_path / "scaling.png").stat().st_size > 10_000
    assert "hit rate" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.deep
def test_the_simulation_agrees_with_the_demo_that_it_measured(tmp_path):
    """Measure, then hold conversations and simulate them. Times have wide bounds: others may use the machine."""
    with running("demo", ["--max-running-requests", "8"]) as server:
        url = f"http://127.0.0.1:{server.port}"
        assert main(["--measure", url, "--batches", "1", "2", "4", "8", "--replicas", "1", "--out", str(tmp_path)]) == 0
        flags = ["--costs", str(tmp_path / "costs.json"), "--seconds", "15", "--load", "1", "--think", "1"]
        assert main([*flags, "--replay", url, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "replay.json").read_text())
    measured, simulated = found["measured"], found["simulated"]
    assert measured["turns"] == simulated["turns"] >= 8
    assert simulated["hit rate"] == pytest.approx(measured["hit rate"], abs=0.1)
    assert simulated["tokens/s"] == pytest.approx(measured["tokens/s"], rel=0.5)
    assert simulated["tokens/cycle"] == pytest.approx(measured["tokens/cycle"], rel=0.5)
    for name in ("TTFT p50", "latency p50"):
        assert measured[name] / 10 < simulated[name] < measured[name] * 10
