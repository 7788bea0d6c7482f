"""The machine that is measured: its clock, its description, and the rates that bound every forward."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from eagle_tools.bench.gpu.packages import version

GIGA = 1e9


class Machine:
    """Times functions on a device: by CUDA events on a GPU, by the wall clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, function: Callable[[], object], *, repeats: int = 15, warm_ups: int = 3) -> float:
        """The median time of one call. On a GPU it is device time, and the calls are queued without waiting."""
        for _ in range(warm_ups):
            function()
        if not self.cuda:
            return statistics.median(_wall(function) for _ in range(repeats))
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        self.synchronize()
        events[0].record()
        for event in events[1:]:
            function()
            event.record()
        self.synchronize()
        pairs = zip(events, events[1:], strict=False)
        return statistics.median(float(before.elapsed_time(after)) / 1e3 for before, after in pairs)

    def copy_bandwidth(self, size: int) -> float:
        """Bytes read and written per second by a copy of `size` bytes."""
        source = torch.ones(size // 4, dtype=torch.float32, device=self.device)
        target = torch.empty_like(source)
        return 2 * size / self.seconds(lambda: target.copy_(source))

    def read_bandwidth(self, size: int) -> float:
        """Bytes per second read by a matrix of `size` bytes times a vector, the work of a layer for one row."""
        columns = 4096
        matrix = torch.ones(size // 2 // columns, columns, dtype=torch.bfloat16, device=self.device)
        vector = torch.ones(1, columns, dtype=torch.bfloat16, device=self.device)
        return size / self.seconds(lambda: torch.nn.functional.linear(vector, matrix))

    def matmul_rate(self, size: int) -> float:
        """Floating-point operations per second of a square bfloat16 matrix product."""
        a = torch.randn(size, size, device=self.device).to(torch.bfloat16)
        b = torch.randn(size, size, device=self.device).to(torch.bfloat16)
        operations = 2.0 * float(size) ** 3
        return operations / self.seconds(lambda: a @ b)

    def facts(self) -> dict[str, Any]:
        """What a reader of the report must know about the machine."""
        names = ("torch", "triton", "flashinfer-python", "transformers")
        facts: dict[str, Any] = {
            "python": platform.python_version(),
            "versions": {name: version(name) for name in names},
            "device": platform.processor() or platform.machine(),
        }
        if self.cuda:
            properties = torch.cuda.get_device_properties(self.device)
            facts |= {
                "device": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "multiprocessors": properties.multi_processor_count,
                "cuda": torch.version.cuda,
            }
        return facts


# After these errors every later call of the process fails too. They are in CUDA's words (cudaGetErrorString), which
# torch, Triton and FlashInfer all append to their own.
_FATAL_REASONS = (
    "an illegal memory access was encountered",
    "an illegal instruction was encountered",
    "misaligned address",
    "unspecified launch failure",
    "device-side assert triggered",
    "hardware stack error",
    "invalid program counter",
    "operation not supported on global/shared address space",
    "uncorrectable ECC error encountered",
    "the launch timed out and was terminated",
)


def is_fatal(error: BaseException) -> bool:
    """Whether the process cannot use its GPU any more."""
    return type(error).__name__ == "AcceleratorError" or any(reason in str(error) for reason in _FATAL_REASONS)


def is_missing_module(error: BaseException) -> bool:
    """Whether FlashInfer has no prebuilt module for a shape and is not allowed to compile one."""
    return type(error).__name__ == "MissingJITCacheError"


def brief(error: BaseException) -> str:
    """The error in one line."""
    missing = getattr(getattr(error, "spec", None), "name", "")  # FlashInfer names the module that was not built
    name = " ".join([type(error).__name__, *missing.split()])
    return " ".join(f"{name}: {error}".split())[:300]


def _wall(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began
