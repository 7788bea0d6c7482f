"""Threads on cores that other processes want too.

The threads of an operation wait for its last one. If that one's core is taken, they wait for a slice of the kernel's
scheduler, milliseconds, at every one of a cycle's hundreds of short operations: with one busy process beside it on two
cores the demo decodes with two threads at a third of what one thread gives. So a small model computes with one thread
while its threads do not get their cores, and tries again from time to time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import TracebackType

import torch

logger = logging.getLogger(__name__)

_WINDOW = 0.1  # seconds of computing that are judged together, or one cycle if that is longer
_LEAST = 0.75  # of their time that threads must have run; waiting for each other they spin, so alone it is nearly all
_TRIAL = 20  # times the seconds that a failed trial took, it is not repeated


class SharedCores:
    """A context to compute in: with `threads` threads, or with one while other processes keep cores busy."""

    def __init__(
        self,
        threads: int,
        *,
        wall: Callable[[], float] = time.perf_counter,
        cpu: Callable[[], float] = time.process_time,
        compute_with: Callable[[int], None] = torch.set_num_threads,
    ) -> None:
        """`wall` and `cpu` tell the time, and that which all threads of this process have run, in seconds."""
        self.threads = self._most = threads
        self._wall, self._cpu, self._compute_with = wall, cpu, compute_with
        self._entered = (0.0, 0.0)
        self._seconds = self._ran = 0.0  # of the window so far
        self._again = 0.0

    def __enter__(self) -> None:
        if self.threads < self._most and self._wall() >= self._again:
            self._change(self._most)
        self._entered = (self._wall(), self._cpu())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.threads == 1:
            return
        now = self._wall()
        self._seconds += now - self._entered[0]
        self._ran += self._cpu() - self._entered[1]
        if self._seconds < _WINDOW:
            return
        if self._ran < _LEAST * self._seconds * self.threads:
            self._again = now + _TRIAL * self._seconds
            self._change(1)
        self._seconds = self._ran = 0.0

    def _change(self, threads: int) -> None:
        logger.debug("computing with %d threads", threads)
        self.threads = threads
        self._compute_with(threads)
