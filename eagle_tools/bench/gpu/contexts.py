"""Batch 1 at long contexts: the plain step with its floor, and ways to attend to trees. Each way is a part."""

from __future__ import annotations

from typing import Any

from eagle_server.engine.assembly.pools import bytes_per_slot
from eagle_server.engine.engine import Engine
from eagle_tools.bench.gpu.engines import BenchEngines
from eagle_tools.bench.gpu.measurements import read_per_step
from eagle_tools.bench.gpu.stages import measured
from eagle_tools.bench.gpu.steady import Steady

_CYCLES = 12  # measured, at most


def long_plain(engines: BenchEngines) -> dict[str, Any]:
    """A plain step by the wall clock, and the least time of reading weights and KV, for each length."""
    engine = _engine(engines, speculative=False)
    bandwidth = engines.machine.copy_bandwidth(engines.scale.copied_bytes)
    per_slot = bytes_per_slot(engines.pair.target.config)
    return {
        "contexts": list(engines.scale.contexts),
        "step_ms": {str(n): _cycle_ms(engines, engine, n) for n in engines.scale.contexts},
        "floor_ms": {str(n): 1e3 * (read_per_step(engines) + n * per_slot) / bandwidth for n in engines.scale.contexts},
    }


def long_trees(engines: BenchEngines, *, verifying: str, drafting: str) -> dict[str, Any]:
    """Kernel times of verification and of drafting for one way of each, and the whole cycle by the wall clock."""
    ways = {"verify_attention": verifying, "draft_attention": drafting} if engines.flashinfer else {}
    engine = _engine(engines, speculative=True, **ways)
    document: dict[str, Any] = {name: {} for name in ("verify_ms", "propose_ms", "cycle_ms")}
    for length in engines.scale.contexts:
        times = measured(engine, [engines.text_of(length)], cuda=engines.machine.cuda)
        document["verify_ms"][str(length)] = times.ms("verify")
        document["propose_ms"][str(length)] = times.ms("propose")
        document["cycle_ms"][str(length)] = _cycle_ms(engines, engine, length)
    return {"verify": verifying, "draft": drafting, **document}


def _engine(engines: BenchEngines, *, speculative: bool, **ways: Any) -> Engine:
    longest = max(engines.scale.contexts)
    return engines.make(speculative=speculative, context_length=longest + 512, max_total_tokens=longest + 1024, **ways)


def _cycle_ms(engines: BenchEngines, engine: Engine, length: int) -> float:
    count = min(engines.scale.cycles, _CYCLES)
    with Steady(engine, [engines.text_of(length)], count) as run:
        return 1e3 * run.cycles(count).step
