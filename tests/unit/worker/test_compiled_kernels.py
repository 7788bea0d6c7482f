"""No request waits for the compiler: every kernel that serving launches was launched before the engine is ready."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from eagle_server.attention import recurrent
from eagle_server.cache import states
from eagle_server.engine.assembly import assemble as assemble_module
from eagle_server.engine.engine import Engine
from eagle_server.ops.kv import indices
from eagle_server.ops.layers import rope_kv
from eagle_server.ops.layers.fused import AngleTable
from eagle_server.ops.linear import rounded as rounded_linear
from eagle_server.ops.linear.quantize import Quantization, QuantizedWeight, quantize
from eagle_server.ops.recurrent import kernels as recurrent_kernels
from eagle_server.ops.triton_support import HAS_TRITON
from eagle_server.request import Request
from tests.support.engines import random_head, random_target, request, run, speculative
from tests.support.flashinfer_emulation import Emulation
from tests.support.hybrids import hybrid_target
from tests.support.kernel_counts import LaunchCounter, take_gpu_branches
from tests.support.kernels import take
from tests.support.launches import launch_kernels, launched
from tests.support.replay import FirstCallRecorder

pytestmark = pytest.mark.skipif(
    not HAS_TRITON or os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"
)

ENGINES: dict[str, dict[str, Any]] = {
    "graphs, adaptive": {"backend": "flashinfer", "graph_sizes": (2,), "adaptive": True},
    "without graphs": {"backend": "flashinfer"},
    "torch_native": {"backend": "torch_native"},
    "torch_native, adaptive": {"backend": "torch_native", "adaptive": True},
}


def engine(module: Emulation, **settings: Any) -> Engine:
    target = random_target(layers=3)
    recorder = FirstCallRecorder() if settings.get("graph_sizes") else None
    return speculative(
        target,
        random_head(target, "EAGLE3"),
        2,
        2,
        nodes=4,
        max_running_requests=3,
        chunked_prefill_size=40,
        estimating=True,
        poison=False,
        stand_ins={"flashinfer": module, "recorder": recorder},
        **settings,
    )


def served() -> Iterator[list[Request]]:
    """Rounds of requests: prompts of many lengths alone and together, each way of sampling, batches of every size."""
    truncated = {"temperature": 0.9, "top_k": 5, "top_p": 0.8, "min_p": 0.01}
    ways: list[dict[str, Any]] = [{}, {"temperature": 0.7}, truncated]
    for number, length in enumerate((1, 3, 16, 41, 97)):
        yield [request("a", range(1, length + 1), max_tokens=3, ignore_eos=True, seed=number, **ways[number % 3])]
    for count in (2, 3):
        yield [request(i, range(1, 2 + 3 * i), max_tokens=3 + i, ignore_eos=True, **ways[i % 3]) for i in range(count)]


@pytest.mark.deep
@pytest.mark.parametrize("name", list(ENGINES))
def test_every_kernel_is_compiled_before_the_engine_is_ready(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = take_gpu_branches(monkeypatch, LaunchCounter())
    monkeypatch.setattr(assemble_module, "on_gpu", lambda _: True)
    seen = launched(monkeypatch, run=False)
    ready = engine(module, **ENGINES[name])
    compiled = set(seen)
    seen.clear()
    for requests in served():
        run(ready, requests)
    late = sorted(seen - compiled)
    assert compiled and not late, f"{len(late)} of {len(seen)}:\n" + "\n".join(late)


def test_prompts_of_all_lengths_have_few_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels whose arguments follow from the rows of a prompt and from the number of prompts."""
    take("triton", monkeypatch)
    seen = launched(monkeypatch, run=False)
    table, pool = torch.zeros(3, 8192 + 64, dtype=torch.int32), torch.zeros(4, 2, 64)
    out, angles = torch.zeros(1, dtype=torch.int32), torch.zeros(8192, 64)
    counted = []
    for length in range(1, 8193):
        bs = 1 + length % 48
        numbers = torch.zeros(4, bs, dtype=torch.int64)  # one upload: every second row has an odd address
        indices.window_slots(table, numbers[0], numbers[1], length)
        indices.build_kv_indices(table, numbers[2], numbers[3], out)
        rows = torch.zeros(2, length, dtype=torch.int64)
        qkv = torch.zeros(1, 6, 64).expand(length, -1, -1)  # its memory is not read
        rope_kv.rotate_and_write(qkv, 2, AngleTable(rows[1], angles), pool, pool, rows[0])
        if length in (2, 8192):
            counted.append(len(seen))
    assert counted == [3, 3], sorted(seen)


@pytest.mark.parametrize(("quantization", "group"), [("fp8", 2048), ("fp8", 128), ("int4", 128)])
def test_a_packed_weight_has_launched_its_kernels_for_all_numbers_of_rows(
    quantization: Quantization, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    take("triton", monkeypatch)
    launch_kernels(monkeypatch, rounded_linear)
    monkeypatch.setattr(torch, "_scaled_mm", lambda codes, weight, **_: codes.new_empty(len(codes), weight.shape[1]))
    seen = launched(monkeypatch, run=False)
    weight = quantize(torch.randn(32, 2048), quantization)
    if quantization == "fp8":
        scales = weight.scales.expand(2048 // group, 32).contiguous()
        weight = QuantizedWeight("fp8", weight.codes, scales, weight.zeros, group)
    packed = rounded_linear.RoundedWeight.packed(weight, torch.device("cpu"), torch.bfloat16)
    compiled = set(seen)
    for rows in range(1, 300):
        packed.linear(torch.zeros(rows, 2048, dtype=torch.bfloat16))
    assert seen == compiled
    assert {each.split()[0] for each in seen} >= {"_product_kernel", "_sum_kernel"}


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # costs are measured over states that nobody has written
@pytest.mark.parametrize("name", ["graphs, adaptive", "without graphs"])
def test_kernels_of_recurrent_layers_are_compiled_before_the_engine_is_ready(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only these are launched here. No twin computes what a launch would write: the layers' outputs are zeros."""
    settings, target = ENGINES[name], hybrid_target(62, linear_num_key_heads=1, linear_num_value_heads=1)
    monkeypatch.setattr(assemble_module, "on_gpu", lambda _: True)
    monkeypatch.setattr(states, "available", lambda *_: False)
    launch_kernels(monkeypatch, recurrent_kernels)
    monkeypatch.setattr(recurrent, "delta_trees", lambda *args: recurrent_kernels.delta_trees(*args).zero_())
    seen = launched(monkeypatch, run=False)
    ready = speculative(
        target,
        random_head(target, "EAGLE3"),
        2,
        2,
        nodes=4,
        max_running_requests=3,
        chunked_prefill_size=40,
        estimating=True,
        poison=False,
        stand_ins={"flashinfer": Emulation(), "recorder": FirstCallRecorder() if settings.get("graph_sizes") else None},
        **settings,
    )
    compiled = set(seen)
    seen.clear()
    for requests in served():
        run(ready, requests)
    late = sorted(seen - compiled)
    assert {each.split()[0] for each in seen} == {"_tree_kernel", "_keep_kernel"}
    assert not late, f"{len(late)} of {len(seen)}:\n" + "\n".join(late)
