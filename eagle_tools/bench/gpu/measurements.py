"""The parts of the benchmark that measure engines. Each is independent and returns a document for the report."""

from __future__ import annotations

import os.path
from collections import Counter
from typing import Any

from eagle_server.engine.assembly.pools import bytes_per_slot
from eagle_server.engine.engine import Engine
from eagle_server.models.layers import Linear
from eagle_server.plan import TreeShape
from eagle_server.speculation.tree_config import TreeConfig
from eagle_tools.bench.gpu.engines import AS_SERVED, BenchEngines
from eagle_tools.bench.gpu.machine import GIGA
from eagle_tools.bench.gpu.steady import Pace, Steady

Document = dict[str, Any]

GOALS = {"plain step / floor": 1.15, "cycle / plain step": 1.40}
ADAPTIVE: Document = {"speculative": True, **AS_SERVED}
CHAINS = (5, 3)  # steps; the best of them was the best fixed tree at 32 and 64 requests on an H100
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
    """Throughput for each batch size: plain, with trees that follow the load, with chains, and with trees of one size.

    One engine after the other, because the KV of all would not fit. `chosen`: what the adaptive budget drafted.
    """
    rows: dict[int, Document] = {size: {"batch": size} for size in engines.scale.batches}
    settings: dict[str, Document] = {
        "plain": {"speculative": False},
        "adaptive": ADAPTIVE,
        **{f"chain of {steps}": {"speculative": True, "tree": TreeConfig(steps, 1, steps + 1)} for steps in CHAINS},
        "one size": {"speculative": True},
    }
    for name, setting in settings.items():
        engine = engines.make(batches=engines.scale.batches, **setting)
        for size, row in rows.items():
            if row["batch"] > 1 and engines.seconds_left < STEP_SECONDS:
                return {"rows": [*rows.values()], "note": f"no time left for {name}, batch {size} and more"}
            row |= _throughput(engines, engine, name, size)
        del engine
        engines.release()
    return {"rows": [*rows.values()]}


def _throughput(engines: BenchEngines, engine: Engine, name: str, size: int) -> Document:
    cycles, settling = engines.scale.cycles, engines.scale.settling if name == "adaptive" else engines.scale.cycles
    with Steady(engine, engines.batch_of(size), settling) as run:
        run.cycles(settling)
    shapes = Counter[TreeShape]()
    engine.worker.observers.append(lambda cycle: shapes.update([cycle.budget.shape]))
    with Steady(engine, engines.batch_of(size), cycles) as run:  # anew: the same part of the texts for all
        shapes.clear()
        pace = run.cycles(cycles)
    engine.worker.observers.pop()
    (shape, _), *_ = shapes.most_common(1)
    return {name: pace.document(), **({"chosen": _described(shape)} if name == "adaptive" else {})}


def _described(shape: TreeShape) -> str:
    if not shape.steps:
        return "nothing"
    if shape.topk == 1:
        return f"chain of {shape.steps}"
    return f"{shape.steps} steps, {shape.nodes} nodes{f', topk {shape.topk}' if shape.topk else ''}"


def weight_bytes(model: Any) -> int:
    """Bytes of a model's parameters, including packed linear layers."""
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    packed = {id(linear.weight) for linear in linears}
    others: int = sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in packed)
    return others + sum(linear.nbytes for linear in linears)
