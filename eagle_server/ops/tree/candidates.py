"""The best children of a frontier, and the best nodes of a candidate pool. One program per request."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_server.ops.device import on_gpu
from eagle_server.ops.triton_support import jit, power_of_two, tl

_ONE_WARP = 1024  # up to this many candidates one warp counts them, without barriers


class BestChildren(NamedTuple):
    """The next frontier of each request: the topk best children, in descending order."""

    scores: Tensor  # float32 [bs, topk]
    tokens: Tensor  # int64 [bs, topk]
    chosen: Tensor  # int64 [bs, topk], flat indices into the topk * topk children
    rows: Tensor  # int64 [bs * topk], the parents' rows in the batch
    ancestor_mask: Tensor  # bool [bs, topk, W]


class BestCandidates(NamedTuple):
    """The best candidates of each request, in ascending order of their indices. Each is [bs, count]."""

    selected: Tensor  # int64
    tokens: Tensor  # int64
    scores: Tensor  # float32
    guesses: Tensor | None  # float32


def best_children(scores: Tensor, tokens: Tensor, ancestor_mask: Tensor, step: int) -> BestChildren:
    """The topk best of topk * topk children. They become the nodes of `step`.

    Args:
        scores: float32 [bs, topk, topk], by parent and rank.
        tokens: int64 [bs, topk, topk].
        ancestor_mask: bool [bs, topk, W], the window slots that the parents see. A child sees those of its parent, and
            its own one: column step * topk + its place.
    """
    best = _launch_children if on_gpu(scores) else _children_torch
    return best(scores, tokens, ancestor_mask, step)


def best_candidates(scores: Tensor, tokens: Tensor, guesses: Tensor | None, count: int) -> BestCandidates:
    """The `count` candidates with the best scores. Ties go to the lower index, and NaN counts as -inf.

    Args:
        scores: float32 [bs, n], n >= count.
        tokens: int64 [bs, n].
        guesses: float32 [bs, n] or None, selected along with the tokens.
    """
    assert count <= scores.shape[1]
    if on_gpu(scores) and count:
        return _launch_candidates(scores, tokens, guesses, count)
    return _candidates_torch(scores, tokens, guesses, count)


def _children_torch(scores: Tensor, tokens: Tensor, ancestor_mask: Tensor, step: int) -> BestChildren:
    bs, topk, _ = scores.shape
    best, chosen = scores.flatten(1).topk(topk, dim=1)
    parent = torch.div(chosen, topk, rounding_mode="floor")  # [bs, topk]
    base = torch.arange(0, bs * topk, topk, device=parent.device)[:, None]
    mask = ancestor_mask.gather(1, parent[:, :, None].expand(-1, -1, ancestor_mask.shape[2]))
    mask[:, :, step * topk : (step + 1) * topk] = torch.eye(topk, dtype=torch.bool, device=parent.device)
    return BestChildren(best, tokens.flatten(1).gather(1, chosen), chosen, (parent + base).view(-1), mask)


def _candidates_torch(scores: Tensor, tokens: Tensor, guesses: Tensor | None, count: int) -> BestCandidates:
    scores = scores.nan_to_num(nan=float("-inf"), neginf=float("-inf"))
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    selected = order.sort(dim=1).values
    best = (None if values is None else values.gather(1, selected) for values in (tokens, scores, guesses))
    return BestCandidates(selected, *best)  # type: ignore[arg-type]


def _launch_children(scores: Tensor, tokens: Tensor, ancestor_mask: Tensor, step: int) -> BestChildren:
    bs, topk, _ = scores.shape
    width = ancestor_mask.shape[2]
    chosen = torch.empty(bs, topk, dtype=torch.int64, device=scores.device)
    best = BestChildren(
        scores=torch.empty(bs, topk, dtype=torch.float32, device=scores.device),
        tokens=torch.empty_like(chosen),
        chosen=chosen,
        rows=torch.empty_like(chosen).view(-1),
        ancestor_mask=torch.empty(bs, topk, width, dtype=torch.bool, device=scores.device),
    )
    seen = ancestor_mask.view(torch.uint8)
    _children_kernel[bs,](
        *(scores.contiguous(), tokens.contiguous(), seen, *seen.stride()),
        *(best.scores, best.tokens, best.chosen, best.rows, best.ancestor_mask.view(torch.uint8)),
        *(topk, width, step * topk),
        CHILDREN=power_of_two(topk * topk),
        WIDTH=power_of_two(width),
        num_warps=1,
    )
    return best


def _launch_candidates(scores: Tensor, tokens: Tensor, guesses: Tensor | None, count: int) -> BestCandidates:
    bs, size = scores.shape
    selected = torch.empty(bs, count, dtype=torch.int64, device=scores.device)
    best = BestCandidates(
        selected,
        torch.empty_like(selected),
        torch.empty(bs, count, dtype=torch.float32, device=scores.device),
        None if guesses is None else torch.empty(bs, count, dtype=torch.float32, device=scores.device),
    )
    _candidates_kernel[bs,](
        *(scores.contiguous(), tokens.contiguous(), None if guesses is None else guesses.contiguous()),
        *(*best, size, count),
        SIZE=power_of_two(size),
        num_warps=1 if size <= _ONE_WARP else 8,
    )
    return best


@jit
def ordered(value):  # type: ignore[no-untyped-def]
    """Float32 as int64 from 0 on in the same order. NaN comes first, -0.0 equals 0.0."""
    value = tl.where(value != value, float("-inf"), tl.where(value == 0.0, 0.0, value))  # noqa: PLR0124  a NaN
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648


@jit
def _children_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    scores,
    tokens,
    seen,
    seen_request,
    seen_row,
    seen_column,
    best_scores,
    best_tokens,
    chosen,
    rows,
    mask,
    topk,
    width,
    first,
    CHILDREN: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Takes the best children one after the other. Ties go to the lower index, and NaN ranks last."""
    request = tl.program_id(0).to(tl.int64)
    child = tl.arange(0, CHILDREN)
    column = tl.arange(0, WIDTH)
    alive = child < topk * topk
    family = request * topk * topk
    value = tl.load(scores + family + child, mask=alive, other=float("-inf"))
    ranked = tl.where(value != value, float("-inf"), value)  # noqa: PLR0124  a NaN
    for j in range(topk):
        best = tl.max(tl.where(alive, ranked, float("-inf")), 0)
        index = tl.min(tl.where(alive & (ranked == best), child, CHILDREN), 0)
        alive = alive & (child != index)
        place = request * topk + j
        parent = index // topk
        tl.store(best_scores + place, tl.load(scores + family + index))
        tl.store(best_tokens + place, tl.load(tokens + family + index))
        tl.store(chosen + place, index.to(tl.int64))
        tl.store(rows + place, request * topk + parent)
        inside = column < width
        row = seen + request * seen_request + parent * seen_row
        inherited = tl.load(row + column * seen_column, mask=inside, other=0)
        tl.store(mask + place * width + column, tl.where(column == first + j, 1, inherited).to(tl.uint8), mask=inside)


@jit
def _candidates_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    scores,
    tokens,
    guesses,
    selected,
    best_tokens,
    best_scores,
    best_guesses,
    size,
    count,
    SIZE: tl.constexpr,
):
    """Finds the bits of the last selected score from the highest on, then takes as many ties as are wanted."""
    request = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, SIZE)
    inside = index < size
    place = request * size + index
    value = tl.load(scores + place, mask=inside, other=float("-inf"))
    key = tl.where(inside, ordered(value), -1)
    least = tl.full([], 0, tl.int64)
    for step in range(32):
        trial = least + (tl.full([], 2147483648, tl.int64) >> step)
        enough = tl.sum((key >= trial).to(tl.int32), 0) >= count
        least = tl.where(enough, trial, least)
    above = key > least
    ties = key == least
    wanted = count - tl.sum(above.to(tl.int32), 0)
    number = tl.cumsum(ties.to(tl.int32), 0)
    taken = above | (ties & (number <= wanted))
    target = request * count + tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(selected + target, index.to(tl.int64), mask=taken)
    tl.store(best_tokens + target, tl.load(tokens + place, mask=taken), mask=taken)
    tl.store(best_scores + target, tl.where(value != value, float("-inf"), value), mask=taken)  # noqa: PLR0124
    if guesses is not None:
        tl.store(best_guesses + target, tl.load(guesses + place, mask=taken), mask=taken)
