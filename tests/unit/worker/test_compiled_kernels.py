"""No request waits for the compiler: every kernel that serving launches was launched before the engine is ready."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_server.attention import recurrent
from eagle_server.cache import states
from eagle_server.engine.assembly import assemble as assemble_module
from eagle_server.engine.engine import Engine
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.save import save_checkpoint
from eagle_server.models.ranks import RankGroup
from eagle_server.models.targets.transformers import TransformersTarget
from eagle_server.ops.kv import indices
from eagle_server.ops.layers import rope_kv
from eagle_server.ops.layers.fused import AngleTable
from eagle_server.ops.linear import rounded as rounded_linear
from eagle_server.ops.linear.quantize import Quantization, QuantizedWeight, quantize
from eagle_server.ops.recurrent import kernels as recurrent_kernels
from eagle_server.ops.triton_support import HAS_TRITON
from eagle_server.request import Request
from tests.support.engines import (
    engine_config,
    plain,
    random_config,
    random_head,
    random_target,
    request,
    run,
    speculative,
)
from tests.support.flashinfer_emulation import Emulation
from tests.support.hybrids import hybrid_target
from tests.support.kernel_counts import LaunchCounter, take_gpu_branches
from tests.support.kernels import take
from tests.support.launches import launch_kernels, launched
from tests.support.ranks import SplitEngines
from tests.support.replay import FirstCallRecorder
from tests.unit.models.test_targets_on_a_device import by_transformers

pytestmark = pytest.mark.skipif(
    not HAS_TRITON or os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"
)

ENGINES: dict[str, dict[str, Any]] = {
    "graphs, adaptive": {"backend": "flashinfer", "graph_sizes": (2,), "adaptive": True},
    "without graphs": {"backend": "flashinfer"},
    "without graphs, adaptive": {"backend": "flashinfer", "adaptive": True},
    "torch_native": {"backend": "torch_native"},
    "torch_native, adaptive": {"backend": "torch_native", "adaptive": True},
    "torch_native, more drafted": {"backend": "torch_native", "model_steps": 3, "topk": 4, "nodes": 13},
}
NGRAMS = {"model_steps": 0, "topk": 1, "ngram_steps": 3}


def numbers(module: Any, **settings: Any) -> dict[str, Any]:
    """An engine's settings, with its stand-ins."""
    recorder = FirstCallRecorder() if settings.get("graph_sizes") else None
    sizes = {"max_running_requests": 3, "chunked_prefill_size": 40, "estimating": True, "poison": False}
    trees = {"model_steps": 2, "topk": 2, "nodes": 4}
    return {**trees, **sizes, "stand_ins": {"flashinfer": module, "recorder": recorder}, **settings}


def engine(module: Emulation, **settings: Any) -> Engine:
    target = random_target(layers=3)
    return speculative(target, random_head(target, "EAGLE3"), **numbers(module, **settings))


Round = tuple[list[Request], dict[int, list[Request]]]  # requests at first, and those that join in a later cycle


def served() -> Iterator[Round]:
    """Prompts of many lengths alone, together and beside decodes, each way of sampling, batches of every size."""
    truncated = {"temperature": 0.9, "top_k": 5, "top_p": 0.8, "min_p": 0.01}
    edited = {**truncated, "logit_bias": ((3, 1.0),)}
    ways: list[dict[str, Any]] = [{}, {"temperature": 0.7}, truncated, edited]
    for number, length in enumerate((1, 3, 16, 41, 97)):
        yield [request("a", range(1, length + 1), max_tokens=3, ignore_eos=True, seed=number, **ways[number % 4])], {}
    for count in (2, 3):
        each = [request(i, range(1, 2 + 3 * i), max_tokens=3 + i, ignore_eos=True, **ways[i % 3]) for i in range(count)]
        yield each, {}
    for number, length in enumerate((1, 17, 33)):
        first = request("a", [1, 2, 1, 3, 1, 2, 1], max_tokens=12, ignore_eos=True, **ways[number])
        yield [first], {3: [request("b", range(1, length + 1), max_tokens=3, ignore_eos=True)]}


def check(ready: Engine, seen: set[str]) -> None:
    """Serving launches what was `seen`, and nothing else."""
    compiled = set(seen)
    seen.clear()
    for requests, joining in served():
        run(ready, requests, joining=joining)
    late = sorted(seen - compiled)
    assert compiled and seen and not late, f"{len(late)} of {len(seen)}:\n" + "\n".join(late)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The signatures of all launches of a GPU's branches."""
    monkeypatch.setattr(assemble_module, "mirrors", lambda _: True)
    return launched(monkeypatch, run=False)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Emulation:
    return take_gpu_branches(monkeypatch, LaunchCounter())


@pytest.mark.deep
@pytest.mark.parametrize("name", list(ENGINES))
def test_every_kernel_is_compiled_before_the_engine_is_ready(name: str, module: Emulation, seen: set[str]) -> None:
    check(engine(module, **ENGINES[name]), seen)


@pytest.mark.deep
@pytest.mark.parametrize("name", ["graphs, adaptive", "torch_native"])
def test_so_it_is_in_bfloat16_whose_edited_logits_are_float32(name: str, module: Emulation, seen: set[str]) -> None:
    target = random_target(layers=3, torch_dtype="bfloat16").to(torch.bfloat16)
    head = random_head(target, "EAGLE3").to(torch.bfloat16)  # type: ignore[attr-defined]
    check(speculative(target, head, **numbers(module, **ENGINES[name])), seen)


@pytest.mark.deep
@pytest.mark.parametrize("name", list(ENGINES))
def test_so_it_is_without_a_draft_model(name: str, module: Emulation, seen: set[str]) -> None:
    settings = numbers(module, **{**ENGINES[name], **NGRAMS})
    check(plain(random_target(layers=3), **settings), seen)


@pytest.mark.deep
@pytest.mark.parametrize("backend", ["flashinfer", "torch_native"])
def test_so_it_is_with_a_model_that_runs_by_transformers_code(
    backend: str, tmp_path: Path, module: Emulation, seen: set[str]
) -> None:
    by_transformers(tmp_path)
    target: Any = load_target(tmp_path, Loading(progress=False), dtype="float32")
    assert isinstance(target, TransformersTarget)
    check(plain(target, **numbers(module, backend=backend, **NGRAMS)), seen)


@pytest.mark.deep
def test_so_it_is_on_two_ranks_which_have_communicated(
    tmp_path: Path, module: Emulation, seen: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = random_target(layers=3)
    save_checkpoint(whole, tmp_path, random_config(layers=3), torch.float32)
    summed: list[int] = []
    original = RankGroup.sum
    monkeypatch.setattr(RankGroup, "sum", lambda ranks, x: (summed.append(ranks.rank), original(ranks, x))[1])
    settings = {name: value for name, value in numbers(module, backend="torch_native").items() if name != "stand_ins"}
    with SplitEngines(tmp_path, 2) as split:
        ready = split.engine(lambda _: random_head(whole, "EAGLE3"), engine_config(**settings))
        assert set(summed) == {0, 1}
        check(ready, seen)


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
    monkeypatch.setattr(assemble_module, "mirrors", lambda _: True)
    monkeypatch.setattr(states, "available", lambda *_: False)
    launch_kernels(monkeypatch, recurrent_kernels)
    monkeypatch.setattr(recurrent, "delta_trees", lambda *args: recurrent_kernels.delta_trees(*args).zero_())
    seen = launched(monkeypatch, run=False)
    ready = speculative(
        target,
        random_head(target, "EAGLE3"),
        **numbers(Emulation(), **settings),
    )
    check(ready, seen)
    assert {each.split()[0] for each in seen} == {"_tree_kernel", "_keep_kernel"}
