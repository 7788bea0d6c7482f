"""Every shape that a batch may have, in turn, with captured functions: the texts are those of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from eagle_server.engine.engine import Engine
from eagle_server.plan import Decode, TreeShape
from eagle_server.worker.budget.budget import AdaptiveBudget, CycleBudget
from tests.support.engines import plain, random_head, random_target, request, run, speculative, tokens_of
from tests.support.flashinfer_emulation import Emulation
from tests.support.replay import FirstCallRecorder

STEPS, TOPK, NODES, MOST = 4, 4, 16, 24


def engine_with_graphs(target: Any, head: Any, **given: Any) -> Engine:
    return speculative(
        target,
        head,
        STEPS,
        TOPK,
        nodes=NODES,
        backend="flashinfer",
        graph_sizes=(1, 2, 8, MOST),
        max_running_requests=MOST,
        adaptive=True,
        stand_ins={"flashinfer": Emulation(), "recorder": FirstCallRecorder()},
        **given,
    )


class InTurn:
    """The budget of an engine, but each cycle has the next of its shapes."""

    def __init__(self, budget: AdaptiveBudget) -> None:
        self._budget, self._cycle = budget, 0
        self.seen = set[tuple[int, TreeShape]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._budget, name)

    def choose(self, decodes: Sequence[Decode], able: Sequence[bool]) -> CycleBudget:
        chosen = self._budget.choose(decodes, able)
        size, shapes = next((size, each) for size, each in self._budget.shapes.items() if size >= len(decodes))
        shape = shapes[self._cycle % len(shapes)]
        self._cycle += 1
        drafting = tuple(number for number, may in enumerate(able) if may)
        if chosen.is_lesson or not drafting:
            return chosen
        self.seen.add((size, shape))
        return CycleBudget(drafting, *shape)


@pytest.mark.parametrize("page_size", [1, 4])
def test_texts_are_those_of_plain_decoding_and_nothing_is_captured_while_serving(page_size: int) -> None:
    target = random_target()
    head = random_head(target, "EAGLE3")
    requests = [
        request(i, range(1, 6 + i % 7), ignore_eos=True, max_tokens=12 + 3 * i, temperature=0.8 * (i % 2), seed=i)
        for i in range(MOST)
    ]
    expected = tokens_of(run(plain(target), requests))
    engine = engine_with_graphs(target, head, page_size=page_size)
    graphs = engine.worker.verifier.graphs
    captured = set(graphs.keys)
    budget = engine.worker.drafting.budget
    assert isinstance(budget, AdaptiveBudget)
    engine.worker.drafting.budget = turns = InTurn(budget)
    for first in (0, MOST - 8, MOST - 2, MOST - 1):  # batches of each size
        assert tokens_of(run(engine, requests[first:])) == {n: t for n, t in expected.items() if int(n) >= first}
    assert set(graphs.keys) - captured == set()
    assert turns.seen == {(size, shape) for size, shapes in budget.shapes.items() for shape in shapes}
    assert {shape.topk for _, shape in turns.seen} == {1, 2, 4}
    assert engine.stats().accepted_tokens


def test_requests_that_do_not_draft_leave_the_others_a_captured_shape() -> None:
    """Nine requests have shapes that eight have not."""
    target = random_target()
    engine = engine_with_graphs(target, random_head(target, "EAGLE3"))
    graphs = engine.worker.verifier.graphs
    captured = set(graphs.keys)
    budget = engine.worker.drafting.budget
    assert isinstance(budget, AdaptiveBudget)
    assert set(budget.shapes[MOST]) - set(budget.shapes[8])
    engine.worker.drafting.budget = InTurn(budget)
    requests = [request(i, range(1, 9), ignore_eos=True, max_tokens=60) for i in range(9)]
    requests[4] = replace(requests[4], speculative=False)
    run(engine, requests)
    assert set(graphs.keys) - captured == set()
    assert engine.stats().drafted_tokens


def test_the_budget_itself_stays_within_what_was_captured() -> None:
    target = random_target()
    engine = engine_with_graphs(target, random_head(target, "EAGLE3"))
    graphs, asked = engine.worker.verifier.graphs, []
    captured = set(graphs.keys)
    for count in (1, MOST, 3, 9):
        asked = [request(f"{count} {i}", range(1, 9), ignore_eos=True, max_tokens=30) for i in range(count)]
        run(engine, asked)
    assert set(graphs.keys) - captured == set()
