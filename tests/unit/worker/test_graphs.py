"""Captured functions: inputs are copied in, the first call's Python values stay, outputs are the same tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_server.worker.graphs import Graphs, bucket_sizes
from tests.support.replay import FirstCallRecorder


def test_without_a_recorder_a_function_is_simply_called() -> None:
    graphs = Graphs()
    assert [graphs.run("key", lambda x, n=n: x + n, torch.ones(2)).tolist() for n in (1, 2)] == [[2, 2], [3, 3]]
    assert graphs.keys == ()


def test_a_replay_computes_with_new_inputs_but_with_the_first_calls_host_values() -> None:
    graphs = Graphs(FirstCallRecorder())
    outputs = [graphs.run("key", lambda x, n=n: x * n, torch.tensor([n])).clone() for n in (2, 3, 5)]
    assert [out.tolist() for out in outputs] == [[4], [6], [10]]
    assert graphs.keys == ("key",)


def test_keys_have_graphs_of_their_own_and_none_is_never_captured() -> None:
    graphs = Graphs(FirstCallRecorder())

    def double(x: Tensor) -> Tensor:
        return x * 2

    first = graphs.run(1, double, torch.ones(1))
    second = graphs.run(2, double, torch.ones(3))
    again = graphs.run(1, double, torch.full((1,), 7.0))
    assert first is again
    assert first.tolist() == [14]
    assert second.tolist() == [2, 2, 2]
    assert graphs.run(None, double, torch.ones(5)).shape == (5,)
    assert graphs.keys == (1, 2)


def test_bucket_sizes_reach_the_largest_batch() -> None:
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(3) == (1, 2, 3)
    assert bucket_sizes(48) == (1, 2, 4, 8, 16, 24, 32, 40, 48)
    assert bucket_sizes(0) == ()
