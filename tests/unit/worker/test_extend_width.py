"""Where shapes are captured, draft-extend has as few rows as a captured width allows after the last cycle's trees."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from eagle_server.attention.flashinfer import backend as flashinfer
from eagle_server.engine.engine import Engine
from eagle_server.plan import TreeShape
from eagle_server.speculation.tree_config import extend_widths
from eagle_server.worker.batch.batch import DecodeBatch
from eagle_server.worker.budget.budget import CycleBudget
from eagle_server.worker.cycle import Cycle
from tests.support.engines import CONTEXT, plain, random_head, random_target, request, run, speculative, tokens_of
from tests.support.flashinfer_emulation import Emulation
from tests.support.replay import FirstCallRecorder

SIZES, STEPS = (1, 2, 4), 6
NARROW, WIDE = extend_widths(STEPS)
REQUESTS = [
    request(i, range(1, 6 + 3 * i), ignore_eos=True, max_tokens=30 + 5 * i, temperature=0.8 * (i % 2), seed=i)
    for i in range(4)
]
LATER = {5: [request("joins", range(2, 30), max_tokens=20, ignore_eos=True)]}


def engine(**settings: Any) -> Engine:
    """An engine of up to 4 requests with trees of up to 6 levels, whose device is emulated."""
    target = random_target()
    stand_ins = {"flashinfer": Emulation(), "recorder": FirstCallRecorder()}
    shape = {"backend": "flashinfer", "graph_sizes": SIZES, "max_running_requests": 4, "stand_ins": stand_ins}
    return speculative(target, random_head(target, "EAGLE3"), STEPS, 2, nodes=8, **{**shape, **settings})


def extends(engine: Engine) -> set[tuple[int, int]]:
    """Batch size and rows per request of the captured draft-extends."""
    return {key[1][1:3] for key in engine.worker.verifier.graphs.keys if key[0] == "extend"}  # type: ignore[index]


@pytest.mark.parametrize(
    ("steps", "widths"), [(0, (1,)), (1, (2,)), (2, (2, 3)), (3, (2, 4)), (5, (3, 6)), (6, (4, 7)), (8, (5, 9))]
)
def test_two_widths_are_captured_where_the_narrow_one_saves_rows(steps: int, widths: tuple[int, ...]) -> None:
    assert extend_widths(steps) == widths


@pytest.mark.parametrize("adaptive", [False, True], ids=["fixed", "adaptive"])
def test_each_batch_size_has_each_width(*, adaptive: bool) -> None:
    assert extends(engine(adaptive=adaptive)) == set(product(SIZES, (NARROW, WIDE)))


class Alternates:
    """Chains of 2 in every second cycle, else the deepest trees that were captured."""

    def __init__(self, budget: Any) -> None:
        self._budget, self._cycles = budget, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._budget, name)

    def choose(self, decodes: Any, able: Any) -> CycleBudget:
        chosen: CycleBudget = self._budget.choose(decodes, able)
        drafting = tuple(number for number, may in enumerate(able) if may)
        if chosen.is_lesson or not drafting:
            return chosen
        self._cycles += 1
        size = next(size for size in SIZES if size >= len(decodes))
        shapes = self._budget.shapes[size]
        shape = max(shapes) if self._cycles % 2 else TreeShape(2, 3, 1)
        assert shape in shapes
        return CycleBudget(drafting, *shape)


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_cycle_after_short_trees_extends_few_rows_and_the_text_is_the_same(
    monkeypatch: pytest.MonkeyPatch, *, overlaps: bool
) -> None:
    each = engine(adaptive=True)
    each.worker.overlaps = overlaps
    captured = set(each.worker.verifier.graphs.keys)
    each.worker.drafting.budget = Alternates(each.worker.drafting.budget)  # type: ignore[assignment]
    extend, after, ahead = each.worker.drafter.extend, DecodeBatch.after, list[tuple[int, int]]()
    seen = set[int]()

    def extended(batch: DecodeBatch) -> Any:
        seen.add(batch.extend_width)
        assert batch.extend_width == min(width for width in (NARROW, WIDE) if width >= max(batch.extend_lens_host))
        assert bool((batch.extend_lens <= batch.extend_width).all())
        return extend(batch)

    def followed(batch: DecodeBatch, accepted: Any) -> DecodeBatch:
        found = after(batch, accepted)
        if batch.steps:
            ahead.append((batch.steps, found.extend_width))
        return found

    monkeypatch.setattr(each.worker.drafter, "extend", extended if not overlaps else extend)
    monkeypatch.setattr(DecodeBatch, "after", followed)
    outcome = run(each, REQUESTS, joining=LATER)
    assert tokens_of(outcome) == tokens_of(run(plain(each.worker.verifier.target), REQUESTS, joining=LATER))
    assert set(each.worker.verifier.graphs.keys) == captured, "nothing is captured while serving"
    if overlaps:
        assert set(ahead) == {(2, NARROW), (STEPS, WIDE)}
    else:
        assert NARROW in seen
    assert each.stats().accepted_tokens


def test_the_cost_model_learns_from_the_rows_that_were_computed() -> None:
    each = engine()
    rows = list[int]()

    def observe(cycle: Cycle) -> None:
        rows.append(cycle.extended)

    each.worker.observers.append(observe)
    run(each, REQUESTS[:1])
    assert rows[0] == NARROW, "the first cycle extends one row"
    assert set(rows[1:]) == {WIDE}, "what runs ahead is as wide as the trees of six levels need"


@pytest.mark.parametrize("longest", [CONTEXT, 2 * CONTEXT], ids=["cascade for long texts", "masks alone"])
def test_chains_are_captured_once_for_all_lengths(monkeypatch: pytest.MonkeyPatch, longest: int) -> None:
    monkeypatch.setattr(flashinfer, "CASCADE_FROM", longest)
    each = engine(adaptive=True)
    keys = [key for key in each.worker.verifier.graphs.keys if key[0] == "propose"]
    shapes = [key[2] for key in keys if key[2][2] == 1]
    sizes = [key[1][0][1] for key in keys if key[2][2] == 1]  # type: ignore[index]
    chains = list(zip(sizes, shapes, strict=True))
    assert len(chains) == len(set(chains))
    trees = [key for key in keys if key[2][2] > 1]
    assert (len({key[2] for key in trees}) * len(SIZES) < len(trees)) is (longest == CONTEXT) or not trees
