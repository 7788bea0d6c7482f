"""Moves KV between slots: accepted nodes go to the front of their request's window, in all layers at once."""

from __future__ import annotations

from ctypes import c_int64

import torch
from torch import Tensor

from eagle_server.ops.native import available, functions, pointer
from eagle_server.ops.triton_support import blocks, jit, on_gpu, power_of_two, tl

_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_BLOCK = 1024  # units of one slot's data that a program moves


def move_kv(data: Tensor, slot_dim: int, source: Tensor, target: Tensor) -> None:
    """Copy slots `source` to `target` of the contiguous pool `data`. All reads come before all writes.

    Args:
        data: [..., slots, ...] with the slots at `slot_dim`. Each index before it selects a separate plane.
        source, target: int64 [n], or [bs, m] with m moves per request. For [bs, m], requests must not touch each
            other's slots, and no move may overwrite the source of a later one. Accepted paths satisfy this: path[j] is
            ascending and >= j (see `Accepted`). So the kernel needs no intermediate copy. [n] may hold any moves.
    """
    per_request = source.dim() > 1
    if per_request and on_gpu(data):
        _launch_move(data, slot_dim, source, target)
    elif per_request and available(data.device, torch.float32):
        _move_native(data, slot_dim, source, target)
    else:
        _move_torch(data, slot_dim, source, target)


def _move_torch(data: Tensor, slot_dim: int, source: Tensor, target: Tensor) -> None:
    data.index_copy_(slot_dim, target.flatten(), data.index_select(slot_dim, source.flatten()))


def _move_native(data: Tensor, slot_dim: int, source: Tensor, target: Tensor) -> None:
    planes = data.flatten(0, slot_dim - 1).flatten(2)  # [planes, slots, row]
    row_bytes = planes.shape[2] * data.element_size()
    source, target = source.contiguous(), target.contiguous()
    sizes = (source.numel(), planes.shape[0], c_int64(planes.shape[1]), c_int64(row_bytes))
    functions().eagle_move(pointer(data), pointer(source), pointer(target), *sizes)


def _launch_move(data: Tensor, slot_dim: int, source: Tensor, target: Tensor) -> None:
    """One program per (part of a slot's data, request, plane). It makes its request's moves one by one."""
    planes = data.flatten(0, slot_dim - 1).flatten(2)  # [planes, slots, row]
    row_bytes = planes.shape[2] * data.element_size()
    unit = next(dtype for size, dtype in _UNITS.items() if row_bytes % size == 0)
    units = planes.view(unit)
    bs, moves = source.shape
    block = min(_BLOCK, power_of_two(units.shape[2]))
    grid = (blocks(units.shape[2], block), bs, units.shape[0])
    _move_kernel[grid](
        units, source.contiguous(), target.contiguous(), moves, units.shape[1], units.shape[2], BLOCK=block
    )


@jit
def _move_kernel(data, source, target, moves, slots, row, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request = tl.program_id(1)
    plane = data + tl.program_id(2).to(tl.int64) * slots * row
    for j in range(moves):
        here = tl.load(source + request * moves + j).to(tl.int64)
        there = tl.load(target + request * moves + j).to(tl.int64)
        if here != there:
            tl.store(
                plane + there * row + place, tl.load(plane + here * row + place, mask=place < row), mask=place < row
            )
        tl.debug_barrier()  # all threads read this move's source before any thread writes the next target
