"""Trees: parents, depths, ancestor mask and retrive links from a drafter's selection."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_server.ops.device import on_gpu
from eagle_server.ops.native.library import available, functions, pointer
from eagle_server.ops.triton_support import blocks, jit, power_of_two, tl

_ROWS = 16  # nodes per program; each is compared with all D nodes


def link_tree(selected_index: Tensor, parent_list: Tensor, topk: int, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Link each request's selected tokens into a tree of D = n + 1 nodes. Node 0 is the root.

    Args:
        selected_index: int64 [bs, n], numbers of candidates, ascending and closed under ancestors.
        parent_list: int64 [bs, P]. Pool entries come in groups of `topk` siblings; this is the pool index of each
            group's parent, -1 for the root.
        steps: the largest depth of a node.

    Raises:
        ValueError: a candidate is outside the pool, or not behind its parent. Only the native kernel checks it.

    Returns:
        parents int64 [bs, D] (-1 at the root), depths int64 [bs, D], mask bool [bs, D, D] (True: ancestor or self).
    """
    if on_gpu(selected_index) and selected_index.shape[1]:
        return _launch_link(selected_index, parent_list, topk, steps)
    if available(selected_index.device, torch.float32):
        return _link_native(selected_index, parent_list, topk)
    return _link_torch(selected_index, parent_list, topk, steps)


def ancestors(parents: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Ancestor-or-self mask, bool [bs, D, D], and depths, int64 [bs, D], of trees whose depth is at most `steps`.

    The reflexive closure (I + P)^steps of the parent matrix P, by repeated squaring.
    """
    bs, size = parents.shape
    eye = torch.eye(size, device=parents.device)
    reach = eye.expand(bs, -1, -1).clone()
    if size > 1:
        reach[:, 1:].scatter_(2, parents[:, 1:, None], 1.0)
    hops = 1
    while hops < steps:
        reach = (reach @ reach).clamp_(max=1.0)
        hops *= 2
    mask = reach > 0
    return mask, mask.sum(-1) - 1


def _link_torch(selected_index: Tensor, parent_list: Tensor, topk: int, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    bs, drafted = selected_index.shape
    parents = torch.full((bs, drafted + 1), -1, dtype=torch.int64, device=selected_index.device)
    if drafted:
        group = torch.div(selected_index, topk, rounding_mode="floor")
        parent_pool = parent_list.gather(1, group)  # pool index of the parent, -1 for the root
        # The selection is ascending, so a binary search finds the parent's place in it. Node = place + 1.
        place = torch.searchsorted(selected_index, parent_pool) + 1
        parents[:, 1:] = torch.where(parent_pool < 0, 0, place)
    mask, depths = ancestors(parents, steps)
    return parents, depths, mask


def _link_native(selected_index: Tensor, parent_list: Tensor, topk: int) -> tuple[Tensor, Tensor, Tensor]:
    (bs, drafted), groups = selected_index.shape, parent_list.shape[1]
    parents, depths = selected_index.new_empty(bs, drafted + 1), selected_index.new_empty(bs, drafted + 1)
    mask = torch.empty(bs, drafted + 1, drafted + 1, dtype=torch.bool, device=parents.device)
    selected, above = selected_index.contiguous(), parent_list.contiguous()
    sizes = (bs, drafted, groups, topk)
    if functions().eagle_link_trees(pointer(selected), pointer(above), *sizes, *map(pointer, (parents, depths, mask))):
        raise ValueError(f"a selected candidate is not behind its parent, or not one of {groups * topk}")
    return parents, depths, mask


def _launch_link(selected_index: Tensor, parent_list: Tensor, topk: int, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    bs, drafted = selected_index.shape
    size = drafted + 1
    parents = torch.empty(bs, size, dtype=torch.int64, device=selected_index.device)
    depths = torch.empty_like(parents)
    mask = torch.empty(bs, size, size, dtype=torch.bool, device=selected_index.device)
    _link_kernel[bs, blocks(size, _ROWS)](
        selected_index.contiguous(),
        parent_list.contiguous(),
        parents,
        depths,
        mask.view(torch.uint8),
        drafted,
        parent_list.shape[1],
        topk,
        steps,
        HALVINGS=drafted.bit_length(),
        ROWS=_ROWS,
        NODES=power_of_two(size),
    )
    return parents, depths, mask


@jit(varying=("selected_index", "parent_list", "drafted", "groups", "steps"))
def _link_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    selected_index,
    parent_list,
    parents,
    depths,
    mask,
    drafted,
    groups,
    topk,
    steps,
    HALVINGS: tl.constexpr,
    ROWS: tl.constexpr,
    NODES: tl.constexpr,
):
    """Each row climbs to the root through pool indices. It reads nothing that this kernel writes."""
    request = tl.program_id(0)
    selected = selected_index + request * drafted
    above = parent_list + request * groups
    size = drafted + 1
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, NODES)
    # the current node of the climb; -1: the root
    index = tl.load(selected + row - 1, mask=(row > 0) & (row < size), other=-1)
    hit = column[None, :] == row[:, None]
    parent = tl.full([ROWS], -1, tl.int64)
    depth = tl.zeros([ROWS], tl.int64)
    for step in range(steps):
        climbing = index >= 0
        index = tl.load(above + index // topk, mask=climbing, other=-1)
        node = tl.where(index < 0, 0, _place(selected, index, drafted, HALVINGS) + 1)
        hit = hit | (climbing[:, None] & (column[None, :] == node[:, None]))
        parent = tl.where(climbing & (step == 0), node, parent)
        depth += climbing.to(tl.int64)
    tl.store(parents + request * size + row, parent, mask=row < size)
    tl.store(depths + request * size + row, depth, mask=row < size)
    cell = (request * size + row[:, None]).to(tl.int64) * size + column[None, :]
    tl.store(mask + cell, hit.to(tl.uint8), mask=(row[:, None] < size) & (column[None, :] < size))


@jit
def _place(selected, index, drafted, HALVINGS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number of entries of the ascending `selected` below `index`, by binary search."""
    low = tl.zeros(index.shape, tl.int64)
    high = low + drafted
    for _ in tl.static_range(HALVINGS):
        middle = (low + high) // 2
        below = tl.load(selected + middle, mask=middle < high, other=0) < index
        low = tl.where((middle < high) & below, middle + 1, low)
        high = tl.where((middle < high) & ~below, middle, high)
    return low
