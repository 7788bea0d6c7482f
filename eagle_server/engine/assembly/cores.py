"""The number of compute threads on cores that other processes use too.

All threads of an operation wait for the slowest one. If another process has its core, that wait is a time slice of the
kernel's scheduler, milliseconds, and a cycle has hundreds of short operations. Measured on two cores with one other
busy process: with two threads the demo decodes at a third of the speed of one thread. So a small model computes with
one thread while its threads do not get their cores, and tries more threads from time to time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import TracebackType

import torch

logger = logging.getLogger(__name__)

_WINDOW = 0.1  # seconds of computing per decision, or one cycle if that is longer
_LEAST = 0.75  # share of the time that threads must have run; waiting threads spin, so undisturbed it is nearly 1
_TRIAL = 20  # pause after a failed trial, as a multiple of its seconds


class SharedCores:
    """A context to compute in: `threads` threads, or one while other processes keep cores busy."""

    def __init__(
        self,
        threads: int,
        *,
        wall: Callable[[], float] = time.perf_counter,
        cpu: Callable[[], float] = time.process_time,
        compute_with: Callable[[int], None] = torch.set_num_threads,
    ) -> None:
        """`wall` gives the time and `cpu` the run time of all threads of this process, both in seconds."""
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
