"""Trees: parents, depths, ancestor mask and retrive links from a drafter's selection."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_server.ops.dispatch import op
from eagle_server.ops.native.library import functions, pointer
from eagle_server.ops.tree.candidates import OUTSIDE, CandidatePool, best_candidates, best_of, ordered
from eagle_server.ops.triton_support import blocks, constant, jit, power_of_two, tl

_ROWS = 16  # nodes per program; each is compared with all D nodes
_SELECTED_ROWS = 8  # nodes per program of 8 warps: the code is short, and a GPU reads it anew in each cycle
_POOL = 1024  # candidates, of the largest pool whose tree one kernel makes
_NUMBERS = constant(2048)  # more than a tree of such a pool has nodes


class SelectedNodes(NamedTuple):
    """The best candidates of each request as a tree of D nodes, node 0 the root."""

    tokens: Tensor  # int64 [bs, D]
    parents: Tensor  # int64 [bs, D], -1 at the root
    depths: Tensor  # int64 [bs, D]
    positions: Tensor  # int64 [bs, D]
    mask: Tensor  # bool [bs, D, D], True: ancestor or self
    scores: Tensor  # float32 [bs, D - 1]
    guesses: Tensor  # float32 [bs, D - 1]


@op
def select_nodes(verified_id: Tensor, seq_lens: Tensor, pool: CandidatePool, count: int) -> SelectedNodes:
    """The `count` candidates with the best scores. Ties go to the lower number, and NaN counts as -inf.

    A child must not score above its parent. Then the best are closed under ancestors, and parents come before children.
    verified_id, seq_lens: int64 [bs], the roots and their positions.
    """
    topk = pool.topk
    parts = zip(pool.first, pool.later, strict=True)
    tokens, scores, guesses = (torch.cat([first, later], 1) for first, later in parts)
    best = best_candidates(scores, tokens, guesses, count)
    # The parent of each K siblings: the root, the first level's nodes, then the nodes that later steps fed.
    first = torch.arange(-1, topk if pool.steps else 0, device=tokens.device).expand(len(tokens), -1)
    fed = [pool.fed(step) + topk + (step - 1) * topk**2 for step in range(1, pool.steps)]
    parents, depths, mask = link_tree(best.selected, torch.cat([first, *fed], 1), topk, pool.steps + 1)
    tokens = torch.cat([verified_id[:, None], best.tokens], dim=1)
    assert best.guesses is not None
    return SelectedNodes(tokens, parents, depths, seq_lens[:, None] + depths, mask, best.scores, best.guesses)


@op
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


@link_tree.on("native")
def _link_native(selected_index: Tensor, parent_list: Tensor, topk: int, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    (bs, drafted), groups = selected_index.shape, parent_list.shape[1]
    parents, depths = selected_index.new_empty(bs, drafted + 1), selected_index.new_empty(bs, drafted + 1)
    mask = torch.empty(bs, drafted + 1, drafted + 1, dtype=torch.bool, device=parents.device)
    selected, above = selected_index.contiguous(), parent_list.contiguous()
    sizes = (bs, drafted, groups, topk)
    if functions().eagle_link_trees(pointer(selected), pointer(above), *sizes, *map(pointer, (parents, depths, mask))):
        raise ValueError(f"a selected candidate is not behind its parent, or not one of {groups * topk}")
    return parents, depths, mask


@link_tree.on("triton", when=lambda selected_index, *_: selected_index.shape[1] > 0)
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


@select_nodes.on("triton", when=lambda verified_id, seq_lens, pool, count: count > 0 and pool.size <= _POOL)
def _launch_select(verified_id: Tensor, seq_lens: Tensor, pool: CandidatePool, count: int) -> SelectedNodes:
    bs, size = len(verified_id), count + 1
    depths = verified_id.new_empty(bs, size)
    scores = pool.first.scores.new_empty(bs, count)
    nodes = SelectedNodes(
        *(torch.empty_like(depths), torch.empty_like(depths), depths, torch.empty_like(depths)),
        torch.empty(bs, size, size, dtype=torch.bool, device=depths.device),
        *(scores, torch.empty_like(scores)),
    )
    _select_kernel[bs, blocks(size, _SELECTED_ROWS)](
        *(part.contiguous() for part in (*pool.first, *pool.later, pool.chosen, verified_id, seq_lens)),
        *(*nodes[:4], nodes.mask.view(torch.uint8), nodes.scores, nodes.guesses),
        *(pool.later.tokens.shape[1], pool.chosen.shape[1], count, pool.steps + 1),
        TOPK=pool.topk,
        SIZE=power_of_two(pool.size),
        ROWS=_SELECTED_ROWS,
        NODES=power_of_two(size),
        num_warps=8,
    )
    return nodes


@jit(varying=("verified_id", "seq_lens", "chosen", "later_count", "chosen_count", "count", "steps"))
def _select_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    first_tokens,
    first_scores,
    first_guesses,
    later_tokens,
    later_scores,
    later_guesses,
    chosen,
    verified_id,
    seq_lens,
    tokens,
    parents,
    depths,
    positions,
    mask,
    scores,
    guesses,
    later_count,
    chosen_count,
    count,
    steps,
    TOPK: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    NODES: tl.constexpr,
):
    """Every program finds the selected candidates of its request, and links its own nodes.

    A node's number is that of the selected candidates up to it. Nodes climb to the root through registers: `links` has
    each candidate's node and its parent.
    """
    request = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, SIZE)
    inside = candidate < TOPK + later_count
    is_first = candidate < TOPK
    of_first = request * TOPK
    of_later = request * later_count - TOPK
    # The root's children, those of the first level's nodes, then of the nodes fed later.
    siblings = candidate // TOPK
    entry = siblings - TOPK - 1
    is_deep = inside & (entry >= 0)
    fed = tl.load(chosen + request * chosen_count + entry, mask=is_deep, other=0).to(tl.int32)
    above = tl.where(is_deep, fed + TOPK + entry // TOPK * TOPK * TOPK, siblings - 1)  # the parent; -1: the root
    value = tl.where(is_first, first_scores + of_first + candidate, later_scores + of_later + candidate)
    key = ordered(tl.load(value, mask=inside, other=0.0))
    taken, number = best_of(tl.where(inside, key, OUTSIDE), count)
    links = (above + 1) * _NUMBERS + number

    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_own = (number[None, :] == row[:, None]) & taken[None, :]
    current = tl.max(tl.where(is_own, candidate[None, :], -1), 1)  # of each node; -1: the root
    is_node = row <= count
    place = request * (count + 1) + row
    own_first = (current >= 0) & (current < TOPK)
    own_later = current >= TOPK
    depth = tl.where(own_later, (current - TOPK) // (TOPK * TOPK) + 2, own_first.to(tl.int32)).to(tl.int64)
    tl.store(depths + place, depth, mask=is_node)
    tl.store(positions + place, tl.load(seq_lens + request) + depth, mask=is_node)
    root = tl.load(verified_id + request)
    drafted = is_node & (current >= 0)
    token = tl.where(own_first, first_tokens + of_first + current, later_tokens + of_later + current)
    tl.store(tokens + place, tl.where(row == 0, root, tl.load(token, mask=drafted, other=0)), mask=is_node)
    score = tl.where(own_first, first_scores + of_first + current, later_scores + of_later + current)
    score = tl.load(score, mask=drafted, other=0.0)
    score = tl.where(score != score, float("-inf"), score)  # noqa: PLR0124  a NaN
    guess = tl.where(own_first, first_guesses + of_first + current, later_guesses + of_later + current)
    guess = tl.load(guess, mask=drafted, other=0.0)
    tl.store(scores + request * count + row - 1, score, mask=drafted)
    tl.store(guesses + request * count + row - 1, guess, mask=drafted)

    column = tl.arange(0, NODES)
    hit = (column[None, :] == row[:, None]) | (column[None, :] == 0)
    parent = tl.where(row > 0, 0, -1)
    for step in range(steps):
        link = tl.gather(links, tl.maximum(current, 0), 0)
        climbing = current >= 0
        node = tl.where(climbing, link % _NUMBERS, 0)
        parent = tl.where(climbing & (step == 1), node, parent)
        hit = hit | (column[None, :] == node[:, None])
        current = tl.where(climbing, link // _NUMBERS - 1, -1)
    tl.store(parents + place, parent.to(tl.int64), mask=is_node)
    cell = place[:, None] * (count + 1) + column[None, :]
    tl.store(mask + cell, hit.to(tl.uint8), mask=is_node[:, None] & (column[None, :] <= count))


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
