"""The parts of the benchmark that measure engines. Each is independent and returns a document for the report."""

from __future__ import annotations

import os.path
from collections.abc import Sequence
from typing import Any

import torch

from eagle_server.bench.gpu.engines import BenchEngines
from eagle_server.bench.gpu.machine import GIGA, brief, is_fatal
from eagle_server.bench.gpu.steady import Pace, Steady
from eagle_server.engine.engine import Engine
from eagle_server.engine.pools import bytes_per_slot

Document = dict[str, Any]

GOALS = {"plain step / floor": 1.15, "verify / plain step": 1.2, "cycle / plain step": 1.45}
PROFILED = 3  # cycles
TOP_KERNELS = 12
STEP_SECONDS, WAY_SECONDS = 6.0, 20.0  # that must be left to begin a larger batch, or another way of attention


def floor(engines: BenchEngines) -> Document:
    """The lower bound of a plain step: reading its weights and KV once."""
    scale, machine = engines.scale, engines.machine
    copied = machine.copy_bandwidth(scale.copied_bytes)
    weights = read_per_step(engines)
    per_slot = bytes_per_slot(engines.pair.target.config)
    return {
        "copy_gb_per_s": copied / GIGA,
        "read_gb_per_s": machine.read_bandwidth(scale.copied_bytes // 2) / GIGA,
        "matmul_tflop_per_s": machine.matmul_rate(scale.matmul) / 1e12,
        "weight_bytes": weights,
        "head_weight_bytes": sum(p.numel() * p.element_size() for p in _parameters(engines.pair.head)),
        "kv_bytes_per_token": per_slot,
        "floor_ms": {str(n): 1e3 * (weights + n * per_slot) / copied for n in (0, *scale.contexts)},
    }


def read_per_step(engines: BenchEngines) -> int:
    """Bytes of weights that a step of one row reads: all except the embedding, where it reads one row."""
    target = engines.pair.target
    read = sum(p.numel() * p.element_size() for p in target.parameters())
    return read if target.config.tie_word_embeddings else read - target.embed.numel() * target.embed.element_size()


def decode(engines: BenchEngines) -> Document:
    """Batch 1: a plain step against the floor, a verification and a whole cycle against the plain step."""
    plain, fast = Pace(1), Pace(1)
    chosen = engines.prompts[: engines.scale.prompts]
    compared, alike = 0, 0
    for prompt in chosen:  # alternately, so that both run at the same clock rates
        texts = []
        for engine, pace in ((engines.plain, plain), (engines.speculative, fast)):
            with Steady(engine, [prompt], engines.scale.cycles) as run:
                pace.add(run.cycles(engines.scale.cycles))
                texts.append(run.texts["0"])
        compared += min(map(len, texts))
        alike += len(os.path.commonprefix(texts))
    context = sum(map(len, chosen)) // len(chosen) + engines.scale.cycles // 2
    bandwidth = engines.machine.copy_bandwidth(engines.scale.copied_bytes)
    least = (read_per_step(engines) + context * bytes_per_slot(engines.pair.target.config)) / bandwidth
    ratios = {
        "plain step / floor": plain.step / least,
        # Both are device time: one verification against a plain cycle.
        "verify / plain step": fast.stage_seconds["verify"] / plain.device_seconds,
        "cycle / plain step": fast.step / plain.step,
    }
    return {
        "plain": plain.document(),
        "speculative": fast.document(),
        "floor_ms": 1e3 * least,
        "speedup": fast.tokens_per_second / plain.tokens_per_second,
        "tokens_compared": compared,
        "tokens_alike": alike,  # before the first difference in each prompt's text
        "goals": [
            {"name": name, "measured": ratio, "goal": GOALS[name], "met": ratio <= GOALS[name]}
            for name, ratio in ratios.items()
        ],
    }


def profile(engines: BenchEngines) -> Document:
    """The kernels that take most of a cycle and of a plain step."""
    return {
        "cycle": _top_kernels(engines, engines.speculative),
        "plain step": _top_kernels(engines, engines.plain),
    }


def _top_kernels(engines: BenchEngines, engine: Engine) -> list[Document]:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiling

    gpu = engines.machine.cuda
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with Steady(engine, engines.batch_of(1), PROFILED + 1) as run, profiling(activities=activities) as recorded:
        run.cycles(PROFILED)
    times: list[tuple[float, Any]] = []
    for event in recorded.key_averages():
        if gpu and not str(event.device_type).endswith("CUDA"):
            continue
        times.append((event.self_device_time_total if gpu else event.self_cpu_time_total, event))
    total = sum(time for time, _ in times) or 1.0
    times.sort(key=lambda pair: -pair[0])
    return [
        {
            "kernel": " ".join(event.key.split())[:90],
            "ms_per_cycle": time / 1e3 / PROFILED,
            "calls_per_cycle": event.count / PROFILED,
            "share": time / total,
        }
        for time, event in times[:TOP_KERNELS]
    ]


def batches(engines: BenchEngines) -> Document:
    """Speculative over plain throughput for each batch size."""
    rows: list[Document] = []
    for size in engines.scale.batches:
        if rows and engines.seconds_left < STEP_SECONDS:
            return {"rows": rows, "note": f"no time left for batch {size} and more"}
        paces = []
        for engine in (engines.plain, engines.speculative):
            with Steady(engine, engines.batch_of(size), engines.scale.cycles) as run:
                paces.append(run.cycles(engines.scale.cycles))
        plain, fast = paces
        rows.append(
            {
                "batch": size,
                "plain": plain.document(),
                "speculative": fast.document(),
                "speedup": fast.tokens_per_second / plain.tokens_per_second,
            }
        )
    return {"rows": rows}


def contexts(engines: BenchEngines) -> Document:
    """Batch 1 at long contexts: ways to verify, ways to draft, and the plain step with its floor."""
    engines.forget("plain")
    engines.forget("speculative")
    lengths = engines.scale.contexts
    numbers: Document = {
        "context_length": max(lengths) + 512,
        "max_total_tokens": max(lengths) + 1024,
        "max_running_requests": 1,
        "graph_sizes": (1,) if engines.flashinfer else (),
    }
    ways = (
        [("mask", "mask"), ("cascade", "cascade"), ("cascade", "per_node")]
        if engines.flashinfer
        else [("auto", "auto")]
    )
    verify: dict[str, dict[str, float]] = {}
    draft: dict[str, dict[str, float]] = {}
    failed: dict[str, str] = {}
    for verifying, drafting in ways:
        if verify and engines.seconds_left < WAY_SECONDS:
            failed[f"verify {verifying}, draft {drafting}"] = "no time left"
            continue
        try:
            paces = _at_lengths(
                engines,
                engines.make(speculative=True, verify_attention=verifying, draft_attention=drafting, **numbers),
                lengths,
            )
        except (RuntimeError, ValueError) as error:
            if is_fatal(error):
                raise
            failed[f"verify {verifying}, draft {drafting}"] = brief(error)
            continue
        finally:
            engines.collect()
        for length, pace in paces.items():
            verify.setdefault(verifying, {}).setdefault(length, 1e3 * pace.stage_seconds["verify"])
            draft.setdefault(drafting, {})[length] = 1e3 * pace.stage_seconds["propose"]
    plain = _at_lengths(engines, engines.make(speculative=False, **numbers), lengths)
    engines.collect()
    bandwidth = engines.machine.copy_bandwidth(engines.scale.copied_bytes)
    per_slot = bytes_per_slot(engines.pair.target.config)
    return {
        "contexts": list(lengths),
        "verify_ms": verify,
        "propose_ms": draft,
        "plain_step_ms": {length: 1e3 * pace.step for length, pace in plain.items()},
        "floor_ms": {str(n): 1e3 * (read_per_step(engines) + n * per_slot) / bandwidth for n in lengths},
        "failed": failed,
    }


def _at_lengths(engines: BenchEngines, engine: Engine, lengths: Sequence[int]) -> dict[str, Pace]:
    paces = {}
    for length in lengths:
        count = min(engines.scale.cycles, 12)
        with Steady(engine, [engines.text_of(length)], count) as run:
            paces[str(length)] = run.cycles(count)
    return paces


def _parameters(module: Any) -> Sequence[torch.Tensor]:
    return list(module.parameters())
