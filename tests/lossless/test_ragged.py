"""Trees of different sizes in one batch: padding is not computed, and texts stay those of plain decoding."""

from __future__ import annotations

from typing import Any

import pytest

from eagle_server.engine.engine import Engine
from eagle_server.speculation.typical import Typical
from tests.lossless.conftest import Drafting
from tests.lossless.drafters import CASES
from tests.lossless.pairs import Pair
from tests.lossless.scenes import REQUESTS, SCENES, as_on_a_gpu, check, play
from tests.lossless.test_kv import TOLERANCE, worst_cached_slot
from tests.support.engines import plain, request, run, speculative, tokens_of
from tests.support.thinning import ThinningDrafter, VerifiedRows, thinned

QUICK = {("EAGLE3", "batch"), ("EAGLE3+NGRAM", "preempted"), ("EAGLE3 chain", "batch"), ("MEDUSA unsorted", "alone")}
THINNED = [
    pytest.param(name, scene, marks=() if (name, scene) in QUICK else (pytest.mark.deep,))
    for name, case in CASES.items()
    if case.numbers["nodes"] > 1
    for scene in SCENES
]


def nodes_of(engine: Engine) -> ThinningDrafter:
    drafter = engine.worker.drafter
    assert isinstance(drafter, ThinningDrafter)
    return drafter


@pytest.mark.parametrize(("drafting", "scene"), THINNED, indirect=["drafting"])
def test_texts_do_not_depend_on_which_nodes_are_kept_and_only_these_are_computed(
    drafting: Drafting, scene: str
) -> None:
    """The free slots are poisoned, so that a read of a dropped node's KV would show."""
    counted: list[VerifiedRows] = []

    def build(**settings: Any) -> Engine:
        engine = thinned(drafting.engine(**settings), seed=len(counted))
        counted.append(VerifiedRows(engine))
        return engine

    outcome, engines = play(scene, build)
    check(drafting.pair.target, outcome, drafting.texts, engines)
    for engine, rows in zip(engines, counted, strict=True):
        assert rows.rows == rows.logit_rows == nodes_of(engine).nodes
        assert engine.stats().drafted_tokens <= sum(rows.rows)
    assert scene != "batch" or any(rows.mixed for rows in counted), "prompts joined"
    sizes = [size for engine in engines for size in nodes_of(engine).sizes]
    assert any(largest == 1 for largest, _ in sizes), "a cycle with roots only"
    assert any(1 < largest < whole for largest, whole in sizes), "a cycle with smaller trees"
    assert any(1 < largest == whole for largest, whole in sizes), "a cycle with a whole tree"


@pytest.mark.parametrize("drafting", ["EAGLE3"], indirect=True)
def test_a_captured_cycle_computes_padding_and_gives_the_same_texts(drafting: Drafting) -> None:
    engine = thinned(drafting.engine(**as_on_a_gpu()))
    rows = VerifiedRows(engine)
    outcome = run(engine, REQUESTS)
    check(drafting.pair.target, outcome, drafting.texts, [engine])
    assert set(rows.rows) <= {size * drafting.case.numbers["nodes"] for size in (1, 2, 4, 8)}


@pytest.mark.parametrize("pair", ["EAGLE3"], indirect=True)
@pytest.mark.parametrize("topk", [1, 4])
def test_every_cached_slot_holds_the_kv_of_its_tokens(pair: Pair, topk: int) -> None:
    engine = thinned(speculative(pair.target, pair.head, 3, topk, page_size=4, chunked_prefill_size=24))
    run(engine, REQUESTS[:4], joining={3: REQUESTS[4:]})
    assert 0 < engine.stats().accepted_tokens < engine.stats().drafted_tokens
    engine.worker.drafting.drafter = nodes_of(engine).drafter
    target_error, draft_error, slots = worst_cached_slot(pair, engine)
    assert slots > 100
    assert target_error < TOLERANCE
    assert draft_error < TOLERANCE


@pytest.mark.parametrize("pair", ["EAGLE3"], indirect=True)
def test_typical_acceptance_takes_ragged_trees(pair: Pair) -> None:
    """Greedy requests stay lossless beside a request that is not."""
    requests = [request(i, list(range(i + 5)), ignore_eos=True, temperature=0.9 * (i % 2)) for i in range(6)]
    engine = thinned(speculative(pair.target, pair.head, 3, 4, acceptance=Typical(0.09, 0.3)))
    outcome, expected = run(engine, requests), tokens_of(run(plain(pair.target), requests))
    assert {name: outcome[name].tokens for name in "024"} == {name: expected[name] for name in "024"}
    sampled = [outcome[name].spec for name in "135"]
    assert sum(spec.accepted for spec in sampled if spec is not None) > 0
