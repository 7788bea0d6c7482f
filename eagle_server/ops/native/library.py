"""The compiled CPU kernels of kernels/cpu: whether they compute, their functions and their threads.

Each row is computed in an order that does not depend on the other rows, so a row has the same result, bit for bit, in
every batch, and a node of a tree the same as its token in plain decoding.
"""

from __future__ import annotations

import logging
from ctypes import c_char_p, c_int64, c_void_p
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from eagle_server.ops.native.build import BuildError, library
from eagle_server.ops.native.structs import check_layout

logger = logging.getLogger(__name__)


_enabled, _threads = True, 0  # 0: as many threads as torch


def use_native(wanted: Literal["auto", "native", "torch"]) -> None:
    """Choose who computes models that are loaded from now on. "auto": the kernels, or torch where there is no compiler.

    Raises:
        BuildError: "native" is wanted, and the kernels cannot be compiled.
    """
    global _enabled
    _enabled = wanted != "torch"
    if wanted == "native":
        library()


def available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether native kernels compute on this device in this dtype."""
    return _enabled and device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and _compiles()


@cache
def _compiles() -> bool:
    try:
        library()
    except BuildError as error:
        logger.warning("torch computes on the CPU, because the native kernels are not available: %s", error)
        return False
    return True


@cache
def functions() -> Any:
    """The library's functions, with the types of their results."""
    loaded = library()
    loaded.eagle_layout.restype = c_char_p
    check_layout(loaded.eagle_layout().decode())
    loaded.eagle_session_new.restype = c_void_p
    loaded.eagle_packed_bytes.restype = loaded.eagle_block_bytes.restype = c_int64
    for name in ("pack", "unpack", "linear", "experts", "attention"):
        getattr(loaded, f"eagle_{name}").restype = None
    return loaded


@cache
def _session_of(threads: int) -> c_void_p:
    return c_void_p(functions().eagle_session_new(threads))


def set_threads(threads: int, *, fused: bool) -> None:
    """Compute with so many threads from now on.

    `fused`: native calls do nearly all of the work. Then torch gets one thread, because its threads spin after each
    operation, on the cores that the kernels' threads want.
    """
    global _threads
    _threads = threads
    torch.set_num_threads(1 if fused else threads)


def threads() -> int:
    """How many threads compute."""
    return _threads or torch.get_num_threads()


def session() -> c_void_p:
    """Threads and scratch memory. All forwards share it."""
    return _session_of(threads())


def empty(*shape: int) -> Tensor:
    """Uninitialized float32, for a kernel to fill."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def floats(x: Tensor) -> Tensor:
    """As the kernels read it."""
    return x.float().contiguous()


def check_inside(*, outside: bool) -> None:
    """Raise IndexError if a kernel was given a position, slot or tree node `outside` of its tables."""
    if outside:
        raise IndexError("a position is beyond the RoPE or page table, or a slot, row or tree node beyond the pool")


def pointer(tensor: Tensor) -> c_void_p:
    """Its first element. The tensor must outlive its uses."""
    return c_void_p(tensor.data_ptr())
