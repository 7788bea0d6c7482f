"""The best children of a frontier, and the best nodes of a candidate pool. One program per request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_server.ops.dispatch import op
from eagle_server.ops.triton_support import constant, jit, power_of_two, tl

OUTSIDE = constant(-(1 << 31))  # a key below those of all numbers, see `ordered`
_ONE_WARP = 1024  # up to this many candidates one warp counts them, without barriers
_ONE_WARP_NODES = 8  # up to this many nodes one warp takes them from their children


class Children(NamedTuple):
    """The children that one draft step has scored: of the root [bs, K], then of K nodes [bs, K, K]."""

    tokens: Tensor  # int64
    scores: Tensor  # float32, log chances of paths
    guesses: Tensor  # float32, the drafter's own log chances of the last step


class CandidatePool(NamedTuple):
    """All scored children of each request.

    Candidates are numbered by level: the first has 0..K-1, the child of node f and rank c in step i has number
    K + i * K^2 + f * K + c.
    """

    first: Children  # [bs, K], of the root
    later: Children  # [bs, steps * K * K]
    chosen: Tensor  # int64 [bs, (steps - 1) * K], nodes of later steps: flat indices into the step before's children

    @classmethod
    def empty(cls, first: Children, steps: int) -> CandidatePool:
        """The root's children, and memory for those of so many steps."""
        bs, topk = first.tokens.shape
        later = Children(*(part.new_empty(bs, steps * topk**2) for part in first))
        return cls(first, later, first.tokens.new_empty(bs, max(0, steps - 1) * topk))

    @classmethod
    def of(cls, levels: Sequence[Children], chosen: Sequence[Tensor]) -> CandidatePool:
        """The children of all levels. `chosen`: int64 [bs, K] for every level that was expanded after the first."""
        first, *later = levels
        if not later:
            return cls.empty(first, 0)
        joined = Children(*(torch.cat([part.flatten(1) for part in parts], 1) for parts in zip(*later, strict=True)))
        return cls(first, joined, torch.cat(list(chosen), 1) if chosen else first.tokens[:, :0])

    @property
    def topk(self) -> int:
        return self.first.tokens.shape[1]

    @property
    def size(self) -> int:
        """The candidates of a request."""
        return self.topk + self.later.tokens.shape[1]

    @property
    def steps(self) -> int:
        """After the first level."""
        return self.later.tokens.shape[1] // self.topk**2

    def level(self, step: int) -> Children:
        """The children of a step, views [bs, K, K]."""
        of_step = slice(step * self.topk**2, (step + 1) * self.topk**2)
        return Children(*(part[:, of_step].unflatten(1, (self.topk, self.topk)) for part in self.later))

    def fed(self, step: int) -> Tensor:
        """The nodes that a step from the second on feeds, a view [bs, K] of `chosen`."""
        return self.chosen[:, (step - 1) * self.topk : step * self.topk]


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


@op
def best_children(
    scores: Tensor, tokens: Tensor, ancestor_mask: Tensor, step: int, chosen: Tensor | None = None
) -> BestChildren:
    """The topk best of topk * topk children. They become the nodes of `step`.

    Args:
        scores: float32 [bs, topk, topk], by parent and rank.
        tokens: int64 [bs, topk, topk].
        ancestor_mask: bool [bs, topk, W], the window slots that the parents see. A child sees those of its parent, and
            its own one: column step * topk + its place.
        chosen: where to write the chosen ones, int64 [bs, topk], rows of any stride.
    """
    bs, topk, _ = scores.shape
    best, found = scores.flatten(1).topk(topk, dim=1)
    chosen = found if chosen is None else chosen.copy_(found)
    parent = torch.div(chosen, topk, rounding_mode="floor")  # [bs, topk]
    base = torch.arange(0, bs * topk, topk, device=parent.device)[:, None]
    mask = ancestor_mask.gather(1, parent[:, :, None].expand(-1, -1, ancestor_mask.shape[2]))
    mask[:, :, step * topk : (step + 1) * topk] = torch.eye(topk, dtype=torch.bool, device=parent.device)
    return BestChildren(best, tokens.flatten(1).gather(1, chosen), chosen, (parent + base).view(-1), mask)


@op
def best_candidates(scores: Tensor, tokens: Tensor, guesses: Tensor | None, count: int) -> BestCandidates:
    """The `count` candidates with the best scores. Ties go to the lower index, and NaN counts as -inf.

    Args:
        scores: float32 [bs, n], n >= count.
        tokens: int64 [bs, n].
        guesses: float32 [bs, n] or None, selected along with the tokens.
    """
    assert count <= scores.shape[1]
    scores = scores.nan_to_num(nan=float("-inf"), neginf=float("-inf"))
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    selected = order.sort(dim=1).values
    best = (None if values is None else values.gather(1, selected) for values in (tokens, scores, guesses))
    return BestCandidates(selected, *best)  # type: ignore[arg-type]


@best_children.on("triton")
def _launch_children(
    scores: Tensor, tokens: Tensor, ancestor_mask: Tensor, step: int, chosen: Tensor | None = None
) -> BestChildren:
    bs, topk, _ = scores.shape
    width = ancestor_mask.shape[2]
    scores, tokens = (dense_families(part) for part in (scores, tokens))
    best = BestChildren(
        scores=torch.empty(bs, topk, dtype=torch.float32, device=scores.device),
        tokens=tokens.new_empty(bs, topk),
        chosen=tokens.new_empty(bs, topk) if chosen is None else chosen,
        rows=tokens.new_empty(bs * topk),
        ancestor_mask=torch.empty(bs, topk, width, dtype=torch.bool, device=scores.device),
    )
    seen = ancestor_mask.view(torch.uint8)
    _children_kernel[bs,](
        *(scores, tokens, seen, *seen.stride()),
        *(best.scores, best.tokens, best.chosen, best.rows, best.ancestor_mask.view(torch.uint8)),
        *(topk, width, step * topk, scores.stride(0), tokens.stride(0), best.chosen.stride(0)),
        CHILDREN=power_of_two(topk * topk),
        NODES=power_of_two(topk),
        WIDTH=power_of_two(width),
        num_warps=1 if topk <= _ONE_WARP_NODES else 4,
    )
    return best


def dense_families(children: Tensor) -> Tensor:
    """The same [bs, nodes, k] with the children of a request in one piece, as in a level of a pool."""
    return children if children.stride()[1:] == (children.shape[2], 1) else children.contiguous()


@best_candidates.on("triton", when=lambda scores, tokens, guesses, count: count > 0)
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
    """Float32 as int32 in the same order, all above OUTSIDE. NaN comes first, -0.0 equals 0.0."""
    value = tl.where(value != value, float("-inf"), tl.where(value == 0.0, 0.0, value))  # noqa: PLR0124  a NaN
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@jit
def best_of(key, count):  # type: ignore[no-untyped-def]
    """Marks the `count` largest of `ordered` keys; OUTSIDE is never marked. Also the number of marked keys up to each.

    At least `count` keys reach `low`, and fewer are above `high`. Halves that interval until exactly `count` reach
    `low`, or only ties of one key are left; the first ones of these are taken.
    """
    high = tl.max(key, 0)
    low = tl.min(tl.where(key > OUTSIDE, key, 0x7FFFFFFF), 0)
    reached = tl.full([], -1, tl.int32)  # keys that reach `low`, once counted
    while (low < high) & (reached != count):
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up
        above = tl.sum((key >= middle).to(tl.int32), 0)
        enough = above >= count
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
        reached = tl.where(enough, above, reached)
    above, tie = key > low, key == low
    wanted = count - tl.sum(above.to(tl.int32), 0)
    ties = tl.cumsum(tie.to(tl.int32), 0)
    return above | (tie & (ties <= wanted)), tl.cumsum(above.to(tl.int32), 0) + tl.minimum(ties, wanted)


@jit(varying=("scores", "tokens", "chosen", "scores_request", "tokens_request", "chosen_request"))
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
    scores_request,
    tokens_request,
    chosen_request,
    CHILDREN: tl.constexpr,
    NODES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Takes the best children one after the other. Ties go to the lower index, and NaN ranks last.

    Memory is read before and after the loop, not in it.
    """
    request = tl.program_id(0).to(tl.int64)
    child = tl.arange(0, CHILDREN)
    alive = child < topk * topk
    value = tl.load(scores + request * scores_request + child, mask=alive, other=0.0)
    key = tl.where(alive, ordered(value), OUTSIDE)
    node = tl.arange(0, NODES)
    index = tl.zeros([NODES], tl.int32)  # of each node among the children
    for j in range(topk):
        found = tl.min(tl.where(key == tl.max(key, 0), child, CHILDREN), 0)
        key = tl.where(child == found, OUTSIDE, key)
        index = tl.where(node == j, found, index)
    is_node, place, parent = node < topk, request * topk + node, index // topk
    best = tl.load(scores + request * scores_request + index, mask=is_node)
    token = tl.load(tokens + request * tokens_request + index, mask=is_node)
    column = tl.arange(0, WIDTH)[None, :]
    inside = is_node[:, None] & (column < width)
    row = seen + request * seen_request + parent[:, None] * seen_row
    inherited = tl.load(row + column * seen_column, mask=inside, other=0)
    tl.store(best_scores + place, best, mask=is_node)
    tl.store(best_tokens + place, token, mask=is_node)
    tl.store(chosen + request * chosen_request + node, index.to(tl.int64), mask=is_node)
    tl.store(rows + place, request * topk + parent, mask=is_node)
    seen_now = tl.where(column == first + node[:, None], 1, inherited).to(tl.uint8)
    tl.store(mask + place[:, None] * width + column, seen_now, mask=inside)


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
    """See `best_of`."""
    request = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, SIZE)
    inside = index < size
    place = request * size + index
    value = tl.load(scores + place, mask=inside, other=float("-inf"))
    taken, number = best_of(tl.where(inside, ordered(value), OUTSIDE), count)
    target = request * count + number - 1
    tl.store(selected + target, index.to(tl.int64), mask=taken)
    tl.store(best_tokens + target, tl.load(tokens + place, mask=taken), mask=taken)
    tl.store(best_scores + target, tl.where(value != value, float("-inf"), value), mask=taken)  # noqa: PLR0124
    if guesses is not None:
        tl.store(best_guesses + target, tl.load(guesses + place, mask=taken), mask=taken)
