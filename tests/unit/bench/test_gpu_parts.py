"""The GPU benchmark's parts over emulated FlashInfer and replayed graphs, and stage times from a profiler's trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest
import torch

from eagle_server.config import parse_args
from eagle_server.engine.assembly.from_config import load_models
from eagle_server.engine.assembly.resolve import resolve
from eagle_server.engine.engine_config import EngineConfig
from eagle_server.plan import TRACED_STAGE
from eagle_server.worker.clock import StageClock
from eagle_tools.bench.gpu import child
from eagle_tools.bench.gpu import engines as engines_module
from eagle_tools.bench.gpu.child_command import BUILD, PARTS
from eagle_tools.bench.gpu.engines import TINY, BenchEngines, Pair
from eagle_tools.bench.gpu.measurements import ADAPTIVE
from eagle_tools.bench.gpu.served import server_flags
from eagle_tools.bench.gpu.stages import OUTSIDE, of_trace
from tests.support.flashinfer_emulation import Emulation
from tests.support.paged import CPU
from tests.support.replay import FirstCallRecorder

SMALL = replace(
    TINY,
    batches=(2,),
    contexts=(64, 128),
    cycles=2,
    prompts=1,
    model_steps=3,
    topk=3,
    nodes=8,
)
HOST = {"peer", "served"}  # transformers needs no FlashInfer, and servers run in processes of their own
SIZES = {"context_length", "max_total_tokens", "tree", "max_running_requests", "chunked_prefill_size", "graph_sizes"}
CACHED = {"disable_radix_cache", "checkpoints", "checkpoint_interval"}  # checkpoints are of recurrent layers
CHOSEN = SIZES | CACHED | {"backend", "algorithm"}  # by a part, for its machine and its question


@cache
def pair() -> Pair:
    return BenchEngines(SMALL, CPU).pair


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[BenchEngines]:
    monkeypatch.setattr(engines_module, "CONTEXT", 256)  # texts of this length are captured
    stand_ins = {"flashinfer": Emulation(), "recorder": FirstCallRecorder()}
    made = BenchEngines(SMALL, CPU, stand_ins=stand_ins)
    made.__dict__["pair"] = pair()
    yield made


@pytest.mark.deep
@pytest.mark.parametrize("part", [BUILD, *(part for part in PARTS if part not in HOST)])
def test_every_part_runs_through_flashinfer_and_graphs(engines: BenchEngines, part: str) -> None:
    result = child.MEASURES[part](engines)
    log = engines.stand_ins["flashinfer"].log
    assert result
    if part == "floor":  # 18 layers of the demo's widths, padded
        assert result["weight_bytes"] > result["head_weight_bytes"] > 10_000_000
    without_attention = {"floor", "products"}
    assert part in without_attention or log.plans > 0
    assert part in {*without_attention, BUILD} or log.runs > 0
    if part == "mla":
        assert all(
            "failed" not in row[name] for row in result["rows"] for name in ("decode", "chain of 4", "tree of 8")
        )
    if part == "per_node":
        assert set(result["cycle_ms"]) == {"64", "128"} and (result["verify"], result["draft"]) == (
            "cascade",
            "per_node",
        )


def test_adaptive_engines_are_set_as_a_server_is_by_default(engines: BenchEngines) -> None:
    config = parse_args([], environ={})
    models = load_models(config, progress=False)
    served, measured = resolve(config, models.target, models.draft), engines.config(**ADAPTIVE)
    assert {field.name for field in fields(EngineConfig)} > CHOSEN
    for field in fields(EngineConfig):
        if field.name not in CHOSEN:
            assert getattr(measured, field.name) == getattr(served, field.name), field.name
    assert served.adaptive and served.estimating


def test_the_measured_servers_get_no_flags_but_their_models() -> None:
    for flags in server_flags("folder", "cuda").values():
        names = {flag for flag in flags if flag.startswith("--")}
        assert names <= {"--device", "--model-path", "--speculative-draft-model-path", "--speculative-algorithm"}


def kernel(name: str, correlation: int, dur: float, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": 9000.0, "dur": dur, "args": {"correlation": correlation}}


def call(name: str, correlation: int, ts: float, cat: str = "cuda_runtime") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": 2.0, "args": {"correlation": correlation}}


def stage(name: str, ts: float, dur: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": TRACED_STAGE + name, "ts": ts, "dur": dur, "args": {}}


def test_kernels_belong_to_the_stage_that_launched_them_also_within_a_graph() -> None:
    trace = [
        {"ph": "M", "name": "process_name"},
        stage("verify", 200.0, 50.0),
        stage("extend", 100.0, 50.0),
        call("cudaLaunchKernel", 1, 110.0),
        call("cuLaunchKernelEx", 2, 120.0, "cuda_driver"),
        call("cudaMemcpyAsync", 3, 130.0),
        call("cudaGraphLaunch", 4, 210.0),
        call("cudaLaunchKernel", 5, 170.0),
        kernel("norm", 1, 10.0),
        kernel("tree", 2, 20.0),
        kernel("Memcpy HtoD", 3, 1.0, "gpu_memcpy"),
        kernel("gemm", 4, 300.0),
        kernel("gemm", 4, 500.0),
        kernel("norm", 5, 7.0),
        {
            "ph": "X",
            "cat": "gpu_user_annotation",
            "name": TRACED_STAGE + "verify",
            "ts": 9000.0,
            "dur": 800.0,
            "args": {},
        },
    ]
    found = of_trace(trace, cycles=2)
    assert found.ms("extend") == pytest.approx(31e-3 / 2)
    assert found.ms("verify") == pytest.approx(800e-3 / 2)
    assert found.ms(OUTSIDE) == pytest.approx(7e-3 / 2)
    document = found.document()
    assert document["kernels"] == {"extend": 1.5, "verify": 1.0, OUTSIDE: 0.5}
    assert document["total_ms"] == pytest.approx(838e-3 / 2)
    assert [(top["kernel"], top["calls"]) for top in document["top"][:2]] == [("gemm", 1.0), ("tree", 0.5)]


class Event:
    """A CUDA event on a machine without a GPU."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...


def test_a_trace_of_a_gpu_names_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = StageClock(torch.device("cuda"))
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as recorded, clock.stage("verify"):
        torch.ones(2).sum()
    assert TRACED_STAGE + "verify" in {event.name for event in recorded.events() or ()}
