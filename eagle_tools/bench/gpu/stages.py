"""Device time of a cycle's stages, as the sum of their kernels' times. Gaps between kernels are not in it.

A profiler's trace has the host's calls and the device's kernels. A kernel has the correlation number of the call that
launched it, also if that was one launch of a whole CUDA graph. The call lies within a stage on the host's clock.
"""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle_server.engine.engine import Engine
from eagle_server.plan import TRACED_STAGE
from eagle_tools.bench.gpu.engines import BenchEngines
from eagle_tools.bench.gpu.steady import STAGES, Steady

VERIFY_GOAL = 1.2  # verification of a whole tree / a plain step
PROFILED = 4  # cycles
TOP_KERNELS = 12
OUTSIDE = "between"  # kernels that no stage launched
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_CALLS = {"cuda_runtime", "cuda_driver"}


@dataclass
class StageKernels:
    """Seconds and number of kernels of several cycles together, by stage and by kernel. A CPU has no kernels."""

    cycles: int
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    kernels: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    by_kernel: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def ms(self, stage: str) -> float:
        """Milliseconds of a stage in one cycle."""
        return 1e3 * self.seconds[stage] / self.cycles

    def document(self) -> dict[str, Any]:
        """For the report, of one cycle."""
        names = [name for name in (*STAGES, OUTSIDE) if name in self.seconds]
        top = sorted(self.by_kernel.items(), key=lambda kernel: -sum(kernel[1]))[:TOP_KERNELS]
        total = sum(self.seconds.values())
        return {
            "total_ms": 1e3 * total / self.cycles,
            "ms": {name: self.ms(name) for name in names},
            "kernels": {name: self.kernels[name] / self.cycles for name in names},
            "top": [
                {
                    "kernel": " ".join(name.split())[:90],
                    "ms": 1e3 * sum(times) / self.cycles,
                    "calls": len(times) / self.cycles,
                    "share": sum(times) / total,
                }
                for name, times in top
            ],
        }


def stages(engines: BenchEngines) -> dict[str, Any]:
    """Each stage of a plain step and of a whole cycle, and the wall time of both."""
    document: dict[str, Any] = {}
    times = {}
    for name, speculative in (("plain", False), ("speculative", True)):
        engine = engines.make(speculative=speculative)
        times[name] = measured(engine, engines.batch_of(1), cuda=engines.machine.cuda)
        with Steady(engine, engines.batch_of(1), engines.scale.cycles) as run:
            wall = 1e3 * run.cycles(engines.scale.cycles).step
        document[name] = {**times[name].document(), "cycle_ms": wall}
    ratio = times["speculative"].ms("verify") / document["plain"]["total_ms"]
    goal = {"name": "verify / plain step", "measured": ratio, "goal": VERIFY_GOAL, "met": ratio <= VERIFY_GOAL}
    return {**document, "goals": [goal]}


def measured(engine: Engine, prompts: Sequence[Sequence[int]], *, cuda: bool) -> StageKernels:
    """A few cycles in steady state under torch's profiler. On a CPU by the host's clock, without a profiler."""
    if not cuda:
        return _by_clock(engine, prompts)
    from torch.profiler import ProfilerActivity, profile

    with Steady(engine, prompts, PROFILED + 1) as run, _every_stage_named(engine):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            run.cycles(PROFILED)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            recorded.export_chrome_trace(str(path))
            return of_trace(json.loads(path.read_text(errors="replace"))["traceEvents"], PROFILED)


@contextmanager
def _every_stage_named(engine: Engine) -> Iterator[None]:
    """The engine measures, and so names, the stages of every cycle, not of some."""
    lessons = engine.worker.drafting.budget.lessons
    usual, lessons.measured_every = lessons.measured_every, 1
    try:
        yield
    finally:
        lessons.measured_every = usual


def of_trace(events: Iterable[Mapping[str, Any]], cycles: int) -> StageKernels:
    """Assign the kernels of a trace (Chrome's format, times in microseconds) to the stages that launched them."""
    complete = [event for event in events if event.get("ph") == "X"]
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"].removeprefix(TRACED_STAGE))
        for event in complete
        if event.get("cat") == "user_annotation" and event["name"].startswith(TRACED_STAGE)
    )
    began = [start for start, _, _ in spans]
    launched = {event["args"].get("correlation"): event["ts"] for event in complete if event.get("cat") in _CALLS}
    stages = StageKernels(cycles)
    for event in complete:
        if event.get("cat") not in _ON_DEVICE:
            continue
        stage, call = OUTSIDE, launched.get(event["args"]["correlation"])
        if call is not None and (place := bisect_right(began, call)) and call < spans[place - 1][1]:
            stage = spans[place - 1][2]
        seconds = event["dur"] / 1e6
        stages.seconds[stage] += seconds
        stages.kernels[stage] += 1
        stages.by_kernel[event["name"]].append(seconds)
    return stages


def _by_clock(engine: Engine, prompts: Sequence[Sequence[int]]) -> StageKernels:
    stages = StageKernels(PROFILED)
    with Steady(engine, prompts, PROFILED + 1) as run:
        before = engine.stats().stage_seconds
        run.cycles(PROFILED)
        for name, total in engine.stats().stage_seconds.items():
            stages.seconds[name] += total - before.get(name, 0.0)
    return stages
