"""The next cycle's drafts are made while the host reads the results, and taken only where they are that cycle's own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from eagle_server.engine.engine import Engine
from eagle_server.plan import TreeShape
from eagle_server.worker.batch.batch import DecodeBatch
from eagle_server.worker.clock import StageClock
from eagle_server.worker.cycle import Cycle
from tests.support.engines import (
    admit_without_reserve,
    random_head,
    random_target,
    request,
    run,
    speculative,
    tokens_of,
)
from tests.support.flashinfer_emulation import Emulation
from tests.support.replay import FirstCallRecorder, own

REQUESTS = [
    request(0, range(1, 9), max_tokens=40, ignore_eos=True),
    request(1, range(3, 20), max_tokens=33, seed=1, temperature=0.8, ignore_eos=True),
    request(2, range(5, 9), max_tokens=50, seed=2, temperature=1.0, top_k=5, ignore_eos=True),
]
LATER = {4: [request(3, range(2, 30), max_tokens=20, ignore_eos=True)], 9: [request(4, range(7, 12), ignore_eos=True)]}


def engine(topk: int = 4, **settings: Any) -> Engine:
    """An engine whose device is emulated: captured functions, FlashInfer, poisoned free slots."""
    stand_ins = {"flashinfer": Emulation(), "recorder": FirstCallRecorder()}
    shape = {"backend": "flashinfer", "graph_sizes": (1, 2, 4), "max_running_requests": 4, "stand_ins": stand_ins}
    target = random_target()
    return speculative(target, random_head(target, "EAGLE3"), 3, topk, **shape, **settings)


def events(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that receives what happens: "extend", "propose", "read" for the results.

    "found" and "taken" are for a draft-extend and trees that were made before.
    """
    seen: list[str] = []
    drafter, drafting, outputs = engine.worker.drafter, engine.worker.drafting, Cycle.outputs

    def noted(owner: object, name: str, event: str) -> None:
        method = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            if owner is drafter:
                seen.append(event)
            result = method(*arguments)
            if owner is drafting and result is not None:
                seen.append(event)
            return result

        monkeypatch.setattr(owner, name, call)

    for name in ("extend", "propose"):
        noted(drafter, name, name)
    noted(drafting, "_take_extended", "found")
    noted(drafting, "_take_proposed", "taken")
    monkeypatch.setattr(Cycle, "outputs", lambda copy: (seen.append("read"), outputs(copy))[1])
    return seen


@pytest.mark.parametrize("topk", [1, 4])
def test_each_cycle_finds_its_trees_done(topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = engine(topk)
    assert ahead.overlaps
    seen = events(ahead, monkeypatch)
    run(ahead, REQUESTS[:1])
    # The prompt's cycle, then drafts of its own, then those of the next one ahead in each cycle but the last.
    drafts, taken = ["extend", "propose"], ["found", "taken"]
    between = [*taken, *drafts, "read"] * (ahead.stats().cycles - 3)
    assert seen == ["read", *drafts, *drafts, "read", *between, *taken, "read"]


def test_trees_of_another_shape_are_drafted_again_from_the_same_state(monkeypatch: pytest.MonkeyPatch) -> None:
    each = engine()
    each.add(REQUESTS[0])
    each.step()
    each.step()
    each.worker.drafting._proposed_shape = TreeShape(1, 2)
    seen = events(each, monkeypatch)
    each.step()
    assert seen == ["found", "propose", "extend", "propose", "read"]


@pytest.mark.parametrize("topk", [1, 4])
def test_no_text_changes_while_requests_come_end_and_are_preempted(topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for overlaps in (True, False):
        each = engine(topk, max_total_tokens=110, chunked_prefill_size=16)
        each.worker.overlaps = overlaps
        admit_without_reserve(each.scheduler)
        seen = events(each, monkeypatch)
        texts.append(tokens_of(run(each, REQUESTS, joining=LATER)))
        assert each.stats().preemptions > 0
        assert (seen.count("found") > 10) is overlaps
        assert each.stats().kv_slots_free == each.stats().kv_slots_total
    assert texts[0] == texts[1]


def test_who_goes_on_uses_what_was_computed_when_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    each = engine()
    seen = events(each, monkeypatch)
    run(each, REQUESTS)
    for name in ("extend", "propose"):
        assert seen.count(name) == each.stats().cycles - 1, "one of its own, and one ahead in each but the last cycle"


def test_a_request_that_joins_is_part_of_what_runs_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    each = engine(chunked_prefill_size=8)
    seen = events(each, monkeypatch)
    each.add(REQUESTS[0])
    for _ in range(3):
        each.step()
    each.add(request("joins", range(3, 20), ignore_eos=True))
    for requests in (1, 1, 2, 2):
        seen.clear()
        each.step()
        assert seen == ["found", "taken", "extend", "propose", "read"], "three chunks, then a batch with the new one"
        computed = each.worker.drafting.proposed._computed
        assert computed is not None and len(computed.numbers) == requests


def test_what_was_computed_ahead_is_what_the_cycle_would_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts cannot show this: they do not depend on drafts."""
    each = engine(max_total_tokens=110, chunked_prefill_size=16)
    admit_without_reserve(each.scheduler)
    drafting, budget, cycles, found = each.worker.drafting, each.worker.drafting.budget, [0], [0]
    take = drafting._take_extended

    class Sometimes:
        """A budget that drafts in some cycles only, and then for some requests only."""

        def choose(self, decodes: Any, able: Any) -> Any:
            cycles[0] += 1
            some = [may and (cycles[0] * 5 + n) % 7 > 1 for n, may in enumerate(able)]
            return budget.choose(decodes, some)

        def __getattr__(self, name: str) -> Any:
            return getattr(budget, name)

    def compared(batch: DecodeBatch, clock: StageClock) -> Any:
        state = take(batch, clock)
        if state is not None:
            found[0] += 1
            state, count = own(state), len(batch.decodes)  # a copy: captured functions write the same tensors
            expected = drafting.drafter.extend(batch)
            rows = count * state.topk_index.shape[1]
            assert state.topk_index[:count].equal(expected.topk_index[:count])
            torch.testing.assert_close(state.topk_logp[:count], expected.topk_logp[:count])
            hidden, others = state.hidden_states, expected.hidden_states
            torch.testing.assert_close(hidden[:rows], others[:rows], rtol=1e-4, atol=1e-5)
        return state

    def compared_trees(batch: DecodeBatch, cycle: Cycle) -> Any:
        tree = take_trees(batch, cycle)
        if tree is not None:
            trees[0] += 1
            tree, count = own(tree), len(batch.decodes)
            expected = drafting.drafter.propose(drafting.drafter.extend(batch), batch)
            for name in ("tokens", "parents", "depths", "mask", "positions"):
                assert getattr(tree, name)[:count].equal(getattr(expected, name)[:count]), name
            torch.testing.assert_close(tree.scores[:count], expected.scores[:count])
        return tree

    trees, take_trees = [0], drafting._take_proposed
    monkeypatch.setattr(drafting, "budget", Sometimes())
    monkeypatch.setattr(drafting, "_take_extended", compared)
    monkeypatch.setattr(drafting, "_take_proposed", compared_trees)
    run(each, REQUESTS, joining=LATER)
    assert each.stats().preemptions > 0
    assert found[0] > 10 and trees[0] > 10


@pytest.mark.parametrize("length", [8, 9, 10, 11])  # also so that it continues where the other one would have
def test_a_request_that_takes_the_row_of_another_gets_its_own(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    each, prompt = engine(), range(9, 9 + length)
    alone = tokens_of(run(engine(), [request("b", prompt, ignore_eos=True)]))
    each.add(request("a", range(1, 9), max_tokens=200, ignore_eos=True))
    for _ in range(3):
        each.step()
    assert each.worker.drafting.extended._computed is not None
    each.abort("a")
    seen = events(each, monkeypatch)
    assert tokens_of(run(each, [request("b", prompt, ignore_eos=True)]))["b"] == alone["b"]
    assert seen[:3] == ["read", "extend", "propose"]


def test_the_hosts_other_work_is_done_after_the_launches_and_before_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, own = ["found", "taken", "extend", "propose", "sent", "read"], ["sent", "extend", "propose", "read"]
    for overlaps, order in ((True, ahead), (False, own)):
        each = engine()
        each.worker.overlaps = overlaps
        seen = events(each, monkeypatch)
        each.add(REQUESTS[0])
        each.step(lambda: None)
        each.step(lambda: None)
        if overlaps:
            assert each.worker.drafting.extended._computed is not None
        seen.clear()
        each.step(partial(seen.append, "sent"))
        assert seen == order
