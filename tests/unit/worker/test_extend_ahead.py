"""Draft-extend of the next cycle runs while the host reads the results, and only where it is the next cycle's own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from eagle_server.engine.engine import Engine
from eagle_server.worker.batch import DecodeBatch
from eagle_server.worker.clock import StageClock
from eagle_server.worker.output_processing import OutputCopy
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
from tests.support.replay import FirstCallRecorder

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
    """A list that receives what happens: "extend", "read" for the results, "found" for a draft-extend done before."""
    seen: list[str] = []
    extend, outputs = engine.worker.drafter.extend, OutputCopy.outputs
    monkeypatch.setattr(engine.worker.drafter, "extend", lambda batch: (seen.append("extend"), extend(batch))[1])
    take = engine.worker.drafting._take_extended

    def found(batch: DecodeBatch, clock: StageClock) -> Any:
        state = take(batch, clock)
        seen.extend(["found"] * (state is not None))
        return state

    monkeypatch.setattr(engine.worker.drafting, "_take_extended", found)
    monkeypatch.setattr(OutputCopy, "outputs", lambda copy: (seen.append("read"), outputs(copy))[1])
    return seen


@pytest.mark.parametrize("topk", [1, 4])
def test_each_cycle_finds_its_draft_extend_done(topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = engine(topk)
    assert ahead.overlaps
    seen = events(ahead, monkeypatch)
    run(ahead, REQUESTS[:1])
    # The prompt's cycle, then one draft-extend of its own, then one ahead in each cycle, the last one for nobody.
    cycles = ahead.stats().cycles
    assert seen == ["read", "extend", "extend", "read", *["found", "extend", "read"] * (cycles - 2)]


@pytest.mark.parametrize("topk", [1, 4])
def test_no_text_changes_while_requests_come_end_and_are_preempted(topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for overlaps in (True, False):
        each = engine(topk, max_total_tokens=110, chunked_prefill_size=16)
        each.worker.drafting.ahead = overlaps
        admit_without_reserve(each.scheduler)
        seen = events(each, monkeypatch)
        texts.append(tokens_of(run(each, REQUESTS, joining=LATER)))
        assert each.stats().preemptions > 0
        assert (seen.count("found") > 10) is overlaps
        assert each.stats().kv_slots_free == each.stats().kv_slots_total
    assert texts[0] == texts[1]


def test_a_request_that_takes_the_row_of_another_gets_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    each = engine()
    alone = tokens_of(run(engine(), [request("b", range(9, 17), ignore_eos=True)]))
    each.add(request("a", range(1, 9), max_tokens=200, ignore_eos=True))
    for _ in range(3):
        each.step()
    assert each.worker.drafting._extended is not None
    each.abort("a")
    seen = events(each, monkeypatch)
    assert tokens_of(run(each, [request("b", range(9, 17), ignore_eos=True)]))["b"] == alone["b"]
    assert seen[:3] == ["read", "extend", "extend"]


def test_the_hosts_other_work_is_done_after_the_launches_and_before_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    for overlaps, order in ((True, ["found", "extend", "sent", "read"]), (False, ["sent", "extend", "read"])):
        each = engine()
        each.worker.drafting.ahead = overlaps
        seen = events(each, monkeypatch)
        each.add(REQUESTS[0])
        each.step(lambda: None)
        each.step(lambda: None)
        if overlaps:
            assert each.worker.drafting._extended is not None
        seen.clear()
        each.step(partial(seen.append, "sent"))
        assert seen == order
