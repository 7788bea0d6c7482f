"""The next plain cycle's verify forward runs while the host reads the results, and its rows are used by who goes on."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from eagle_server.engine.engine import Engine
from eagle_server.request import FinishReason
from eagle_server.worker.cycle import Cycle
from tests.support.engines import (
    admit_without_reserve,
    plain,
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
    request(2, range(5, 9), max_tokens=50, seed=2, temperature=1.0, top_k=5, top_p=0.9, ignore_eos=True),
]
LATER = {4: [request(3, range(2, 30), max_tokens=20, ignore_eos=True)], 9: [request(4, range(7, 12), ignore_eos=True)]}
SETTINGS: dict[str, Any] = {"backend": "flashinfer", "graph_sizes": (1, 2, 4), "max_running_requests": 4}


def engine(**settings: Any) -> Engine:
    """A plain engine whose device is emulated: captured functions, FlashInfer, poisoned free slots."""
    stand_ins = {"flashinfer": Emulation(), "recorder": FirstCallRecorder()}
    return plain(random_target(), stand_ins=stand_ins, **SETTINGS, **settings)


def forwards(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that receives what happens: "verify" and "read" for the results, "found" for a forward done before."""
    seen: list[str] = []
    verify, take, outputs = engine.worker.verifier.verify, engine.worker._take_verified, Cycle.outputs

    def found(*args: Any) -> Any:
        verified = take(*args)
        seen.extend(["found"] * (verified is not None))
        return verified

    monkeypatch.setattr(engine.worker, "_take_verified", found)
    monkeypatch.setattr(
        engine.worker.verifier, "verify", lambda batch, tree: (seen.append("verify"), verify(batch, tree))[1]
    )
    monkeypatch.setattr(Cycle, "outputs", lambda copy: (seen.append("read"), outputs(copy))[1])
    return seen


def test_each_plain_cycle_finds_its_forward_done(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = engine()
    assert ahead.overlaps
    seen = forwards(ahead, monkeypatch)
    run(ahead, REQUESTS[:1])
    # The prompt's cycle, then one forward of its own, then one ahead in each cycle, but for the request's last token.
    between = ["found", "verify", "read"] * (ahead.stats().cycles - 3)
    assert seen == ["read", "verify", "verify", "read", *between, "found", "read"]


def test_who_goes_on_uses_its_rows_when_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = engine()
    seen = forwards(ahead, monkeypatch)
    run(ahead, REQUESTS)
    assert seen.count("verify") == ahead.stats().cycles - 1, "one of its own, and one ahead in each but the last cycle"


@pytest.mark.parametrize("page_size", [1, 16])
def test_no_text_changes_while_requests_come_end_and_are_preempted(
    page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for overlaps in (True, False):
        each = engine(max_total_tokens=112, chunked_prefill_size=16, page_size=page_size)
        each.worker.overlaps = overlaps
        admit_without_reserve(each.scheduler)
        seen = forwards(each, monkeypatch)
        texts.append(tokens_of(run(each, REQUESTS, joining=LATER)))
        assert each.stats().preemptions > 0
        assert (seen.count("found") > 10) is overlaps
        assert each.stats().kv_slots_free == each.stats().kv_slots_total
    assert texts[0] == texts[1]


def test_a_request_that_joins_is_part_of_what_runs_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    each = engine(chunked_prefill_size=8)
    seen = forwards(each, monkeypatch)
    each.add(REQUESTS[0])
    for _ in range(3):
        each.step()
    each.add(request("joins", range(3, 20), ignore_eos=True))
    for requests in (1, 1, 2, 2):
        seen.clear()
        each.step()
        assert seen == ["found", "verify", "read"], "three chunks, then a batch with the new one"
        computed = each.worker._verified._computed
        assert computed is not None and len(computed.numbers) == requests


def test_text_is_that_of_an_engine_without_graphs() -> None:
    assert tokens_of(run(engine(), REQUESTS, joining=LATER)) == tokens_of(
        run(plain(random_target(), max_running_requests=4), REQUESTS, joining=LATER)
    )


@pytest.mark.parametrize("length", [8, 9, 10, 11])  # also so that it continues where the other one would have
def test_a_request_that_takes_the_row_of_another_gets_its_own(length: int) -> None:
    prompt = range(9, 9 + length)
    alone = tokens_of(run(engine(), [request("b", prompt, ignore_eos=True)]))
    each = engine()
    each.add(request("a", range(1, 9), max_tokens=200, ignore_eos=True))
    for _ in range(3):
        each.step()
    each.abort("a")
    assert tokens_of(run(each, [request("b", prompt, ignore_eos=True)]))["b"] == alone["b"]


@pytest.mark.parametrize("reads", [{"logprobs": 2}, {"frequency_penalty": 0.5}, {"logit_bias": ((3, 1.0),)}])
def test_logits_that_the_host_reads_are_not_overwritten(reads: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [REQUESTS[0], request(1, range(3, 20), max_tokens=40, ignore_eos=True, **reads)]
    joining = {
        3: [request(2, range(4, 20), max_tokens=12, ignore_eos=True, **reads)],
        5: [request(3, range(6, 20), max_tokens=1, ignore_eos=True, **reads)],
        7: [request(4, range(8, 20), max_tokens=9, ignore_eos=True)],
    }
    outcomes = []
    for overlaps in (True, False):
        each = engine()
        each.worker.overlaps = overlaps
        seen = forwards(each, monkeypatch)
        outcomes.append(run(each, requests, joining=joining))
        assert seen.count("verify") < each.stats().cycles, "none is for nobody"
    assert tokens_of(outcomes[0]) == tokens_of(outcomes[1])
    for name in ("1", "2", "3"):
        scores = [[each.logprob for each in outcome[name].logprobs] for outcome in outcomes]
        # Prompts may be rows of a verify forward or not, which rounds otherwise.
        assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_broken_logits_are_named_though_they_are_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    each = engine()
    verify, cycle = each.worker.verifier.verify, []

    def broken(*args: Any) -> Any:
        verified = verify(*args)
        cycle.append(0)
        if len(cycle) == 5:
            verified.logits.fill_(float("nan"))
        return verified

    monkeypatch.setattr(each.worker.verifier, "verify", broken)
    ended = run(each, REQUESTS[:1])["0"]
    assert ended.reason is FinishReason.ERROR
    assert ended.error is not None and "not finite" in ended.error
    assert len(ended.tokens) == 5


class Sometimes:
    """A budget that drafts in three cycles of seven."""

    def __init__(self, budget: Any) -> None:
        self.budget, self.cycles = budget, 0

    def choose(self, decodes: Any, able: Any) -> Any:
        self.cycles += 1
        return self.budget.choose(decodes, able if self.cycles % 7 < 3 else [False] * len(able))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.budget, name)


def test_plain_cycles_of_an_engine_that_drafts_run_ahead_too(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for overlaps in (True, False):
        target = random_target()
        stand_ins = {"flashinfer": Emulation(), "recorder": FirstCallRecorder()}
        each = speculative(target, random_head(target, "EAGLE3"), 3, 4, stand_ins=stand_ins, **SETTINGS)
        each.worker.overlaps = overlaps
        monkeypatch.setattr(each.worker.drafting, "budget", Sometimes(each.worker.drafting.budget))
        seen = forwards(each, monkeypatch)
        texts.append(tokens_of(run(each, REQUESTS, joining=LATER)))
        spare = seen.count("verify") - each.stats().cycles
        assert (spare > 0) is overlaps, "where drafting begins again, a forward is for nobody"
        assert ("unused" in each.stats().stage_seconds) is overlaps, "its time is not taken for another stage's"
    assert texts[0] == texts[1]


def test_the_hosts_other_work_is_done_after_the_launches_and_before_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    each = engine()
    seen = forwards(each, monkeypatch)
    each.add(REQUESTS[0])
    each.step()
    each.step()
    seen.clear()
    each.step(partial(seen.append, "sent"))
    assert seen == ["found", "verify", "sent", "read"]
