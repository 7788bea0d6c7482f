"""No text depends on the budget: who drafts, how deep and wide, what is verified, drawn at random in every cycle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from eagle_server.engine.engine import Engine
from eagle_server.plan import TreeShape
from tests.lossless.conftest import Drafting
from tests.lossless.drafters import CASES
from tests.lossless.pairs import Pair
from tests.lossless.scenes import REQUESTS, SCENES, as_on_a_gpu, check, play
from tests.lossless.test_kv import TOLERANCE, worst_cached_slot
from tests.support.budgets import RandomBudget, budgeted
from tests.support.engines import run, speculative, tree_size

DRAFTING = {name: case for name, case in CASES.items() if case.numbers["nodes"] > 1}
QUICK = {
    ("EAGLE3", "batch"),
    ("EAGLE3 static tree", "prefix_hit"),
    ("STANDALONE", "batch"),
    ("REDRAFTER", "preempted"),
    ("EAGLE3+NGRAM", "batch"),
    ("NEXTN", "alone"),
    ("MEDUSA", "batch"),
    ("MEDUSA+NGRAM", "alone"),
}


def played() -> Iterator[Any]:
    """(drafter, scene): every drafter in the batch, where some requests draft and some do not, and in one more scene.

    `test_every_drafter` has all pairs.
    """
    others = [scene for scene in SCENES if scene != "batch"]
    for number, name in enumerate(DRAFTING):
        for scene in SCENES:
            if (name, scene) in QUICK:
                yield pytest.param(name, scene)
            elif scene in ("batch", others[number % len(others)]):
                yield pytest.param(name, scene, marks=pytest.mark.deep)


@pytest.mark.parametrize(("drafting", "scene"), list(played()), indirect=["drafting"])
def test_texts_do_not_depend_on_random_budgets(drafting: Drafting, scene: str) -> None:
    """The free slots are poisoned, so that a drafter that reads a position it never computed would show."""
    budgets: list[RandomBudget] = []
    numbers = drafting.case.numbers

    def build(**settings: Any) -> Engine:
        engine = drafting.engine(**settings, adaptive=True)
        budgets.append(budgeted(engine, numbers["model_steps"], numbers["nodes"], seed=len(budgets)))
        return engine

    outcome, engines = play(scene, build)
    check(drafting.pair.target, outcome, drafting.texts, engines)
    drawn = [each for budget in budgets for each in budget.drawn]
    assert any(not budget.drafting for _, budget in drawn), "a cycle without drafts"
    assert any(len(budget.drafting) == able for able, budget in drawn), "a cycle in which all draft"
    widest = engines[0].worker.drafter.widest
    assert {budget.topk for _, budget in drawn if budget.drafting} >= {0, *range(1, widest + 1)}, "every width"
    if scene == "batch":
        assert any(0 < len(budget.drafting) < able for able, budget in drawn), "a cycle in which some draft"


@pytest.mark.parametrize("drafting", ["EAGLE3"], indirect=True)
def test_texts_do_not_depend_on_random_budgets_with_captured_graphs(drafting: Drafting) -> None:
    engine = drafting.engine(**as_on_a_gpu(), adaptive=True)
    numbers = drafting.case.numbers
    budgeted(engine, numbers["model_steps"], numbers["nodes"])
    check(drafting.pair.target, run(engine, REQUESTS), drafting.texts, [engine])


@pytest.mark.parametrize(
    "drafting", [name for name in DRAFTING if name in ("EAGLE3", "NGRAM", "DFLASH")], indirect=True
)
def test_an_adaptive_engine_gives_the_plain_text(drafting: Drafting) -> None:
    engine = drafting.engine(adaptive=True)
    outcome = run(engine, REQUESTS[:4], joining={3: REQUESTS[4:]})
    for name, finished in outcome.items():
        assert finished.tokens == drafting.texts[name]
    budget: Any = engine.worker.drafting.budget
    assert budget.costs.step.is_known == (engine.worker.drafter.forwards(TreeShape(2, 3))[0] > 0)


@pytest.mark.parametrize("pair", ["EAGLE3"], indirect=True)
def test_every_cached_slot_holds_the_kv_of_its_tokens_after_cycles_without_drafts(pair: Pair) -> None:
    engine = speculative(pair.target, pair.head, 3, 4, page_size=4, chunked_prefill_size=24, adaptive=True)
    budgeted(engine, 3, tree_size(3, 4))
    run(engine, REQUESTS[:4], joining={3: REQUESTS[4:]})
    target_error, draft_error, slots = worst_cached_slot(pair, engine)
    assert slots > 100
    assert target_error < TOLERANCE
    assert draft_error < TOLERANCE
