"""The parts of the benchmark that measure engines. Each is independent and returns a document for the report."""

from __future__ import annotations

import os.path
from typing import Any

from eagle_server.engine.assembly.pools import bytes_per_slot
from eagle_server.models.layers import Linear
from eagle_tools.bench.gpu.engines import AS_SERVED, BenchEngines
from eagle_tools.bench.gpu.machine import GIGA
from eagle_tools.bench.gpu.steady import Pace, Steady

Document = dict[str, Any]

GOALS = {"plain step / floor": 1.15, "cycle / plain step": 1.40}
ADAPTIVE: Document = {"speculative": True, **AS_SERVED}
STEP_SECONDS = 6.0  # seconds that must be left to begin a larger batch


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
        "head_weight_bytes": weight_bytes(engines.pair.head),
        "kv_bytes_per_token": per_slot,
        "floor_ms": {str(n): 1e3 * (weights + n * per_slot) / copied for n in (0, *scale.contexts)},
    }


def read_per_step(engines: BenchEngines) -> int:
    """Bytes of weights that a step of one row reads: all except the embedding, of which it reads one row."""
    target = engines.pair.target
    read = weight_bytes(target)
    return read if target.config.tie_word_embeddings else read - target.embed.numel() * target.embed.element_size()


def decode(engines: BenchEngines) -> Document:
    """Batch 1 by the wall clock: a plain step against the floor, a whole cycle against the plain step."""
    plain, fast = Pace(1), Pace(1)
    runs = ((engines.make(speculative=False), plain), (engines.make(speculative=True), fast))
    chosen = engines.prompts[: engines.scale.prompts]
    compared, alike = 0, 0
    for prompt in chosen:  # alternately, so that both run at the same clock rates
        answers = []
        for engine, pace in runs:
            with Steady(engine, [prompt], engines.scale.cycles) as run:
                pace.add(run.cycles(engines.scale.cycles))
                answers.append(run.tokens["0"])
        compared += min(map(len, answers))
        alike += len(os.path.commonprefix(answers))
    context = sum(map(len, chosen)) // len(chosen) + engines.scale.cycles // 2
    bandwidth = engines.machine.copy_bandwidth(engines.scale.copied_bytes)
    least = (read_per_step(engines) + context * bytes_per_slot(engines.pair.target.config)) / bandwidth
    ratios = {
        "plain step / floor": plain.step / least,
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


def batches(engines: BenchEngines) -> Document:
    """Throughput for each batch size: plain, with trees of one size, and with trees that follow the load."""
    rows: list[Document] = []
    sizes, cycles = engines.scale.batches, engines.scale.cycles
    settings: tuple[dict[str, Any], ...] = ({"speculative": False}, {"speculative": True}, ADAPTIVE)
    made = [engines.make(batches=sizes, **setting) for setting in settings]
    for size in sizes:
        if rows and engines.seconds_left < STEP_SECONDS:
            return {"rows": rows, "note": f"no time left for batch {size} and more"}
        paces = []
        for engine in made:
            with Steady(engine, engines.batch_of(size), 2 * cycles) as run:
                run.cycles(cycles)  # the budget settles
                paces.append(run.cycles(cycles))
        plain, fast, adaptive = paces
        rows.append(
            {
                "batch": size,
                "plain": plain.document(),
                "speculative": fast.document(),
                "adaptive": adaptive.document(),
                "speedup": fast.tokens_per_second / plain.tokens_per_second,
                "adaptive_speedup": adaptive.tokens_per_second / plain.tokens_per_second,
            }
        )
    return {"rows": rows}


def weight_bytes(model: Any) -> int:
    """Bytes of a model's parameters, including packed linear layers."""
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    packed = {id(linear.weight) for linear in linears}
    others: int = sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in packed)
    return others + sum(linear.nbytes for linear in linears)
