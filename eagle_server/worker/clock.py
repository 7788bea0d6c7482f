"""Times of a cycle's stages: by the host's clock, or on a GPU by events, without waiting for the device.

Events cost the host about a millisecond per cycle. So on a GPU only some cycles are measured, and of the others only
their prompts.

On a GPU a stage begins before the host plans its forwards. If the device is idle meanwhile, that time counts too: the
budget wants what a stage costs. `python -m eagle_tools.bench.gpu` sums the times of the stage's kernels instead. For
that, each stage that is measured is named in a profiler's trace.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from eagle_server.ops.device import has_streams
from eagle_server.plan import TRACED_STAGE

PREFILL = "prefill"  # the stage of prompts; the budget subtracts it from each cycle
READ = "read"  # the drafter reads prompts and backlogs of the requests that draft
UNUSED = "unused"  # a forward that ran ahead and that nobody took; no cycle needs it


class StageClock:
    """Times the stages of one cycle. On a GPU a stage is the time between its two events on the device.

    is_measured: whether all stages are timed. On a GPU that is up to `measured`; if False, only PREFILL is.
    """

    def __init__(self, device: torch.device, *, measured: bool = True) -> None:
        self.device, self._cuda = device, has_streams(device)
        self.is_measured = measured or not self._cuda
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what runs inside. Times of one name add up."""
        if not self.is_measured and name != PREFILL:
            yield
            return
        if self._cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            with torch.profiler.record_function(TRACED_STAGE + name):
                yield
            end.record()
            self._events.append((name, start, end))
            return
        began = time.perf_counter()
        yield
        self._add(name, time.perf_counter() - began)

    def take(self, other: StageClock, stage: str | None = None) -> None:
        """Add the times of another clock, all of them as `stage` unless it is None.

        If one of both clocks is not measured, the result is not.
        """
        self.is_measured &= other.is_measured
        self._events += [(stage or name, start, end) for name, start, end in other._events]
        for name, seconds in other._seconds.items():
            self._add(stage or name, seconds)

    def seconds(self) -> dict[str, float]:
        """Seconds by stage; on a GPU only after the cycle's results have been copied to the host."""
        for name, start, end in self._events:
            end.synchronize()
            self._add(name, start.elapsed_time(end) / 1e3)
        self._events.clear()
        return self._seconds

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
