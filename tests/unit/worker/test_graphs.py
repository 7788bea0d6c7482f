"""Captured functions: inputs are copied in, the first call's Python values stay, outputs are the same tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor

from eagle_server.ops import captured
from eagle_server.ops.captured import TensorReader, builder, in_place
from eagle_server.worker.budget.estimates import AcceptanceEstimates
from eagle_server.worker.graphs import Graphs, bucket_sizes
from tests.support.engines import random_head, random_target, request, run, speculative
from tests.support.flashinfer_emulation import Emulation
from tests.support.replay import FirstCallRecorder


def test_without_a_recorder_a_function_is_simply_called() -> None:
    graphs = Graphs()
    assert [graphs.run(("sum",), lambda x, n=n: x + n, torch.ones(2)).tolist() for n in (1, 2)] == [[2, 2], [3, 3]]
    assert graphs.keys == ()


def test_a_replay_computes_with_new_inputs_but_with_the_first_calls_host_values() -> None:
    graphs = Graphs(FirstCallRecorder())
    outputs = [graphs.run(("product", 1), lambda x, n=n: x * n, torch.tensor([n])).clone() for n in (2, 3, 5)]
    assert [out.tolist() for out in outputs] == [[4], [6], [10]]
    assert graphs.keys == (("product", 1),)


def test_keys_have_graphs_of_their_own_and_none_is_never_captured() -> None:
    graphs = Graphs(FirstCallRecorder())

    def double(x: Tensor) -> Tensor:
        return x * 2

    first = graphs.run(("double", 1), double, torch.ones(1))
    assert graphs.run(("double", 3), double, torch.ones(3)).tolist() == [2, 2, 2]
    again = graphs.run(("double", 1), double, torch.full((1,), 7.0))
    assert first is again
    assert first.tolist() == [14]
    assert graphs.run(None, double, torch.ones(5)).shape == (5,)
    assert graphs.keys == (("double", 1), ("double", 3))


def test_bucket_sizes_reach_the_largest_batch() -> None:
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(3) == (1, 2, 3)
    assert bucket_sizes(48) == (1, 2, 4, 8, 16, 24, 32, 40, 48)
    assert bucket_sizes(0) == ()


def test_a_replay_leaves_the_outputs_of_functions_with_other_names() -> None:
    """In one pool the outputs of later captures lie in memory that earlier captures use while they run."""
    graphs = Graphs(FirstCallRecorder())

    def double(x: Tensor) -> Tensor:
        return x * 2

    graphs.run(("verify", 4), double, torch.ones(4))
    proposed = graphs.run(("propose", 2), double, torch.ones(2))
    same = graphs.run(("verify", 2), double, torch.ones(2))
    graphs.run(("verify", 4), double, torch.ones(4))
    assert proposed.tolist() == [2, 2]
    assert same.isnan().all()


@pytest.mark.parametrize("drafts", ["EAGLE3", "EAGLE3+NGRAM"])
def test_what_a_cycle_learns_from_outlives_its_verification(drafts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only some requests draft, their drafts are computed for a smaller batch than the verification."""
    lessons: list[Any] = []
    observe = AcceptanceEstimates.observe
    monkeypatch.setattr(AcceptanceEstimates, "observe", lambda *args: (lessons.append(args[1]), observe(*args))[1])
    target = random_target()
    engine = speculative(
        target,
        random_head(target, "EAGLE3"),
        3,
        4,
        backend="flashinfer",
        graph_sizes=(1, 2, 4, 8),
        max_running_requests=8,
        stand_ins={"flashinfer": Emulation(), "recorder": FirstCallRecorder()},
        estimating=True,
        ngram_steps=3 if drafts == "EAGLE3+NGRAM" else 0,
    )
    asked = [request(i, range(1, 9 + i), ignore_eos=True) for i in range(6)]
    run(engine, [structs.replace(each, speculative=i < 3) for i, each in enumerate(asked)])
    assert lessons and all(np.isfinite(guesses).all() for guesses in lessons)


@dataclass(frozen=True)
class Pair:
    left: torch.Tensor
    right: torch.Tensor | None
    table: torch.Tensor = in_place()
    steps: int = 1

    @cached_property
    def total(self) -> torch.Tensor:
        return self.left.sum() + self.table.sum()


def test_dataclasses_are_captured_with_their_tensors_copied_and_what_is_in_place_left() -> None:
    graphs, table = Graphs(FirstCallRecorder()), torch.ones(1)
    pairs = [Pair(torch.full((2,), value), None, table) for value in (1.0, 5.0)]
    found = [
        graphs.run(("total",), lambda pair, more: pair.total + more[0], each, (torch.ones(1),)).clone()
        for each in pairs
    ]
    assert [each.tolist() for each in found] == [[4.0], [12.0]], "nothing is kept from the first call"
    table.fill_(3.0)
    assert graphs.run(("total",), lambda *_: None, pairs[0], (torch.ones(1),)).tolist() == [6.0]
    with pytest.raises(ValueError, match="a tuple of 1 was captured, not a tuple of 2"):
        graphs.run(("total",), lambda *_: None, pairs[0], (torch.ones(1), torch.ones(1)))
    with pytest.raises(ValueError, match="NoneType'> was captured, not <class 'torch.Tensor'>"):
        graphs.run(("total",), lambda *_: None, replace(pairs[0], right=table), (torch.ones(1),))


def test_a_result_keeps_nothing_that_an_earlier_call_has_computed() -> None:
    graphs, table = Graphs(FirstCallRecorder()), torch.ones(1)
    results = [
        graphs.run(("same",), lambda x: Pair(x + 0, None, table), torch.full((2,), value)) for value in (1.0, 5.0)
    ]
    assert results[0].left is results[1].left
    assert [each.total.tolist() for each in results] == [11.0, 11.0]
    graphs.run(("same",), lambda x: Pair(x + 0, None, table), torch.zeros(2))
    assert graphs.run(("same",), lambda x: Pair(x + 0, None, table), torch.ones(2)).total.tolist() == 3.0


def test_what_is_flattened_is_restored_in_order() -> None:
    pair = Pair(torch.zeros(1), torch.ones(1), torch.ones(1), 7)
    reader = TensorReader((pair, torch.zeros(1)))
    tensors = reader.read((pair, torch.full((1,), 2.0)))
    assert [each.tolist() for each in tensors] == [[0.0], [1.0], [2.0]]
    again, last = builder((pair, torch.zeros(1)), iter(tensors[::-1]))()
    assert (again.left.tolist(), again.right.tolist(), last.tolist(), again.steps) == ([2.0], [1.0], [0.0], 7)
    assert again.table is pair.table


def test_replays_walk_no_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs and outputs are walked at capture, which happens before the first request."""
    target = random_target()
    engine = speculative(
        target,
        random_head(target, "EAGLE3"),
        3,
        4,
        backend="flashinfer",
        graph_sizes=(1, 2, 4),
        max_running_requests=4,
        stand_ins={"flashinfer": Emulation(), "recorder": FirstCallRecorder()},
    )
    for name in ("fields", "is_dataclass"):
        monkeypatch.setattr(captured, name, lambda value: pytest.fail("a structure is walked"))
    run(engine, [request(i, range(1, 9 + i), ignore_eos=True) for i in range(3)])
    assert engine.stats().drafted_tokens > 0
