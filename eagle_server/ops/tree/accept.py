"""Tree acceptance: the path from the root along the tokens that the target drew."""

from __future__ import annotations

from ctypes import byref
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_server.ops.dispatch import op
from eagle_server.ops.native.library import functions, pointer
from eagle_server.ops.native.structs import TreeStruct
from eagle_server.ops.triton_support import jit, power_of_two, tl

_COLUMNS = 32  # columns of the D x D mask that are read at a time
_LEAST = 16  # nodes and levels that the kernel is compiled for: cut trees have any size, and all small ones share it


class Walk(NamedTuple):
    """The path that is walked in each tree."""

    path: Tensor  # int64 [bs, steps + 1], node numbers, -1 after the end of the path
    accept_length: Tensor  # int64 [bs], the number of nodes on the path without the root
    tokens: Tensor  # int64 [bs, steps + 1], what was drawn at the nodes of the path, -1 after its end
    drafted: Tensor  # int64 [bs], the number of nodes without root and padding
    finite: Tensor  # bool [bs], whether all scores on the path are finite


@op
def walk_tree(
    draft_token: Tensor, parents: Tensor, depths: Tensor, mask: Tensor, drawn: Tensor, scores: Tensor, steps: int
) -> Walk:
    """The longest path from the root on which every node's token equals its parent's draw. Ties go to the first node.

    Args:
        draft_token, parents, depths: int64 [bs, D].
        mask: bool [bs, D, D], True at a node's ancestors and at the node itself.
        drawn: int64 [bs, D], the token that the target drew after each node.
        scores: float32 [bs, D], the scores of these tokens.

    Raises:
        ValueError: a depth is above `steps`, or a parent is no node. Only the native kernel checks it.

    Returns:
        See `Walk`. Rejected nodes do not count for `finite`: a request must not fail where plain decoding would
        succeed.
    """
    # A node is reached if it and all its ancestors equal their parents' draws.
    agrees = draft_token[:, 1:] == drawn.gather(1, parents[:, 1:])  # [bs, D - 1]
    broken = (mask[:, :, 1:] & ~agrees[:, None, :]).any(dim=2)  # [bs, D]
    reached_depth = depths.masked_fill(broken, -1)
    accept_length, last = reached_depth.max(dim=1)
    path, on_path = path_to(last, depths, mask, steps)
    tokens = torch.where(path < 0, -1, drawn.gather(1, path.clamp(min=0)))
    finite = (scores.isfinite() | ~on_path).all(dim=1)
    return Walk(path, accept_length, tokens, _drafted(draft_token), finite)


@walk_tree.on("native")
def _walk_native(
    draft_token: Tensor, parents: Tensor, depths: Tensor, mask: Tensor, drawn: Tensor, scores: Tensor, steps: int
) -> Walk:
    rows = (draft_token, parents, depths, mask, drawn, scores.isfinite())
    given = [tensor.contiguous() for tensor in rows]
    bs, size = drawn.shape
    path, tokens = depths.new_empty(bs, steps + 1), depths.new_empty(bs, steps + 1)
    accept_length, finite = depths.new_empty(bs), mask.new_empty(bs)
    trees = TreeStruct(*map(pointer, given), size, steps)
    if functions().eagle_walk_trees(byref(trees), bs, *map(pointer, (path, accept_length, tokens, finite))):
        raise ValueError(f"a tree has a node deeper than {steps} steps, or a parent that is none of its {size} nodes")
    return Walk(path, accept_length, tokens, _drafted(draft_token), finite)


def _drafted(draft_token: Tensor) -> Tensor:
    return (draft_token >= 0).sum(1) - 1


def path_to(last: Tensor, depths: Tensor, mask: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """The path from the root to node `last` [bs] of each tree, as node numbers and as a mask over all nodes.

    depths int64 [bs, D], mask bool [bs, D, D] and path int64 [bs, steps + 1] are as in `walk_tree`; the mask over
    the nodes is bool [bs, D].
    """
    bs, size = depths.shape
    on_path = mask.gather(1, last[:, None, None].expand(-1, 1, size))[:, 0]  # ancestors and self
    column = torch.where(on_path, depths, steps + 1)  # all other nodes go to a spare column
    nodes = torch.arange(size, device=depths.device).expand(bs, -1)
    path = depths.new_full((bs, steps + 2), -1).scatter(1, column, nodes)
    return path[:, :-1], on_path


@walk_tree.on("triton")
def _launch_walk(
    draft_token: Tensor, parents: Tensor, depths: Tensor, mask: Tensor, drawn: Tensor, scores: Tensor, steps: int
) -> Walk:
    bs, size = parents.shape
    path = torch.empty(bs, steps + 1, dtype=torch.int64, device=drawn.device)
    lengths = torch.empty(2, bs, dtype=torch.int64, device=drawn.device)
    finite = torch.empty(bs, dtype=torch.bool, device=drawn.device)
    walk = Walk(path, lengths[0], torch.empty_like(path), lengths[1], finite)
    nodes = power_of_two(size, _LEAST)
    _walk_kernel[bs,](
        draft_token.contiguous(),
        parents.contiguous(),
        depths.contiguous(),
        mask.contiguous().view(torch.uint8),
        drawn.contiguous(),
        scores.contiguous(),
        *walk[:4],
        finite.view(torch.uint8),
        size,
        steps + 1,
        NODES=nodes,
        COLUMNS=min(_COLUMNS, nodes),
        WIDTH=power_of_two(steps + 1, _LEAST),
    )
    return walk


@jit(varying=("accept_length", "drafted", "size", "width"))
def _walk_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    draft_token,
    parents,
    depths,
    mask,
    drawn,
    scores,
    path,
    accept_length,
    tokens,
    drafted,
    finite,
    size,
    width,
    NODES: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    request = tl.program_id(0)
    here = request * size
    node = tl.arange(0, NODES)
    exists = node < size
    window = mask + here.to(tl.int64) * size
    broken = tl.zeros([NODES], tl.int32)
    count = 0
    for first in range(0, size, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        below = (column > 0) & (column < size)
        token = tl.load(draft_token + here + column, mask=below, other=-1)
        count += tl.sum((token >= 0).to(tl.int32), 0)
        parent = tl.load(parents + here + column, mask=below, other=0)
        refused = below & (token != tl.load(drawn + here + parent, mask=below, other=0))
        cell = node[:, None] * size + column[None, :]
        above = tl.load(window + cell, mask=exists[:, None] & below[None, :], other=0) != 0
        broken = broken | tl.max((above & refused[None, :]).to(tl.int32), 1)
    depth = tl.load(depths + here + node, mask=exists, other=-1).to(tl.int32)
    reached_depth = tl.where(broken != 0, -1, depth)
    deepest = tl.max(reached_depth, 0)
    last = tl.min(tl.where(reached_depth == deepest, node, NODES), 0)
    on_path = tl.load(window + last * size + node, mask=exists, other=0) != 0
    column = tl.arange(0, WIDTH)
    stands = on_path[None, :] & (depth[None, :] == column[:, None])  # [WIDTH, NODES]
    walked = tl.max(tl.where(stands, tl.broadcast_to(node[None, :], [WIDTH, NODES]), -1), 1)
    emitted = tl.load(drawn + here + walked, mask=walked >= 0, other=-1)
    tl.store(path + request * width + column, walked.to(tl.int64), mask=column < width)
    tl.store(tokens + request * width + column, emitted, mask=column < width)
    tl.store(accept_length + request, deepest.to(tl.int64))
    tl.store(drafted + request, tl.full([], 0, tl.int64) + count)
    score = tl.load(scores + here + node, mask=exists & on_path, other=0.0)
    tl.store(finite + request, tl.min((tl.abs(score) < float("inf")).to(tl.int32), 0).to(tl.uint8))
