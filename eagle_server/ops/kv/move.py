"""Moves the KV of accepted nodes to the front of their request's window, in all layers at once."""

from __future__ import annotations

from ctypes import c_int64

import torch
from torch import Tensor

from eagle_server.ops.dispatch import op
from eagle_server.ops.native.library import check_inside, functions, pointer
from eagle_server.ops.triton_support import blocks, jit, power_of_two, tl

_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_BLOCK = 1024  # units of one slot's data that a program moves


@op
def keep_accepted(
    data: Tensor, slot_dim: int, path: Tensor, seq_lens: Tensor, req_pool_indices: Tensor, req_to_token: Tensor
) -> None:
    """Move the KV of node path[:, j] to the place of node j in its window, in the contiguous pool `data`.

    A path ascends, and path[j] >= j. So no move overwrites the source of a later one, and there is no copy in between.

    Args:
        data: [..., slots, ...] with the slots at `slot_dim`. Each index before it selects a separate plane.
        path: int64 [bs, w], node numbers, the root first; -1 after its end.
        seq_lens: int64 [bs], the position of node 0.
        req_pool_indices: int64 [bs], rows of the page table req_to_token int32 [max requests, width].

    Raises:
        IndexError: on a CPU, a position or slot that does not exist.
    """
    nodes = torch.arange(path.shape[1], device=path.device)
    first, rows = seq_lens[:, None], req_pool_indices[:, None]
    source = req_to_token[rows, first + torch.where(path < 0, nodes, path)].long().flatten()
    target = req_to_token[rows, first + nodes].long().flatten()
    data.index_copy_(slot_dim, target, data.index_select(slot_dim, source))


@keep_accepted.on("native")
def _move_native(
    data: Tensor, slot_dim: int, path: Tensor, seq_lens: Tensor, req_pool_indices: Tensor, req_to_token: Tensor
) -> None:
    planes = data.flatten(0, slot_dim - 1).flatten(2)  # [planes, slots, row]
    row_bytes = planes.shape[2] * data.element_size()
    path, seq_lens, req_pool_indices = path.contiguous(), seq_lens.contiguous(), req_pool_indices.contiguous()
    sizes = (
        *path.shape,
        planes.shape[0],
        c_int64(planes.shape[1]),
        c_int64(row_bytes),
        c_int64(req_to_token.shape[0]),
        c_int64(req_to_token.stride(0)),
    )
    tensors = (data, path, seq_lens, req_pool_indices, req_to_token)
    check_inside(outside=bool(functions().eagle_keep(*map(pointer, tensors), *sizes)))


@keep_accepted.on("triton")
def _launch_move(
    data: Tensor, slot_dim: int, path: Tensor, seq_lens: Tensor, req_pool_indices: Tensor, req_to_token: Tensor
) -> None:
    """One program per (part of a slot's data, request, plane). It makes its request's moves one by one."""
    planes = data.flatten(0, slot_dim - 1).flatten(2)  # [planes, slots, row]
    row_bytes = planes.shape[2] * data.element_size()
    unit = next(dtype for size, dtype in _UNITS.items() if row_bytes % size == 0)
    units = planes.view(unit)
    block = min(_BLOCK, power_of_two(units.shape[2]))
    grid = (blocks(units.shape[2], block), len(path), units.shape[0])
    _move_kernel[grid](
        units,
        path.contiguous(),
        seq_lens.contiguous(),
        req_pool_indices.contiguous(),
        req_to_token,
        path.shape[1],
        req_to_token.stride(0),
        units.shape[1],
        units.shape[2],
        BLOCK=block,
    )


@jit(varying=("path", "seq_lens", "req_pool_indices", "width"))
def _move_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    data, path, seq_lens, req_pool_indices, req_to_token, width, table_width, slots, row, BLOCK: tl.constexpr
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request = tl.program_id(1)
    plane = data + tl.program_id(2).to(tl.int64) * slots * row
    window = req_to_token + tl.load(req_pool_indices + request) * table_width + tl.load(seq_lens + request)
    for j in range(1, width):
        node = tl.load(path + request * width + j)
        if node > j:
            here = tl.load(window + node).to(tl.int64)
            there = tl.load(window + j).to(tl.int64)
            tl.store(
                plane + there * row + place, tl.load(plane + here * row + place, mask=place < row), mask=place < row
            )
        tl.debug_barrier()  # all threads read this move's source before any thread writes the next target
