"""top-k, top-p and min_p without a sort: a search for the smallest logit that stays. One program per row.

A pass over the row measures the logits above a pivot: their number, or their mass. The pivot halves the interval in
which the threshold lies. The ends of the interval are logits of the row, so that few passes are needed. All sums are
taken in an order that depends on nothing but the vocabulary's size.

Source: the rejection sampling of FlashInfer (flashinfer.ai, 2025) searches by pivots too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from eagle_server.ops.dispatch import op
from eagle_server.ops.triton_support import constant, jit, power_of_two, tl

NO_TOP_K = float(1 << 30)  # exact in float32, and larger than any vocabulary
_SORTED_ROWS = 64  # rows of logits sorted at a time on a GPU; sorting takes about 56 bytes per row and vocabulary entry
_BLOCK = 4096
_LEAST_MASS = constant(1e-30)  # top_p = 0 keeps one token


@op
def truncate_rows(
    logits: Tensor, temperature: Tensor, limits: Tensor, truncated: Tensor | None, floored: Tensor | None
) -> Tensor:
    """The logits with -inf for tokens that top-k, then top-p, then min_p remove. Ties go to the smaller token id.

    Args:
        logits: float32 [bs, rows, V], not modified. The kernel returns a row with NaN or +inf as it is.
        temperature: float32 [bs]. Greedy requests (0) lose no token.
        limits: float32 [3, bs]: top_k (`NO_TOP_K`: off), top_p (1: off) and min_p (0: off).
        truncated, floored: int64, the stochastic requests with top-k or top-p, and those with min_p; None: there are
            none. The kernel reads the limits only.
    """
    if truncated is not None:
        logits = _restricted(logits, temperature, truncated, truncate, *limits[:2])
    return above_min_ps(logits, temperature, limits, floored)


def above_min_ps(logits: Tensor, temperature: Tensor, limits: Tensor, floored: Tensor | None) -> Tensor:
    """The logits with -inf for tokens that min_p removes. Arguments: see `truncate_rows`."""
    return logits if floored is None else _restricted(logits, temperature, floored, above_min_p, limits[2])


def _restricted(
    logits: Tensor, temperature: Tensor, requests: Tensor, kept: Callable[..., Tensor], *limits: Tensor
) -> Tensor:
    """The logits with -inf for tokens that `kept` removes, for some requests. `limits` belong to all requests.

    It takes a few requests at a time, because sorting needs memory.
    """
    logits = logits.clone()
    for some in requests.split(max(1, _SORTED_ROWS // logits.shape[1])):
        heat, *limit = (x.index_select(0, some) for x in (temperature, *limits))
        rows = logits.index_select(0, some)
        dropped = kept(rows / heat[:, None, None], *limit) == float("-inf")
        logits.index_copy_(0, some, rows.masked_fill_(dropped, float("-inf")))
    return logits


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The logits with -inf outside the top-k, then outside the smallest set with renormalized mass >= top_p.

    logits [n, rows, vocab] are already divided by the temperature. Ties go to the smaller token id.
    """
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered.masked_fill(rank >= top_k[:, None, None], float("-inf"))
    probs = ordered.softmax(-1)
    mass_before = probs.cumsum(-1) - probs
    dropped = (mass_before >= top_p[:, None, None]) & (rank > 0)
    return torch.empty_like(logits).scatter_(-1, tokens, ordered.masked_fill(dropped, float("-inf")))


def above_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """The logits with -inf for tokens with less than min_p [n] times the best probability. Shapes as in `truncate`."""
    least = logits.amax(dim=-1, keepdim=True) + min_p.log()[:, None, None]
    return logits.masked_fill(logits < least, float("-inf"))


@truncate_rows.on("triton")
def _launch_truncate(
    logits: Tensor, temperature: Tensor, limits: Tensor, truncated: Tensor | None, floored: Tensor | None
) -> Tensor:
    bs, rows, vocab_size = logits.shape
    flat = logits.reshape(bs * rows, vocab_size).contiguous()
    out = torch.empty_like(flat)
    block = min(_BLOCK, power_of_two(vocab_size, least=16))
    _truncate_kernel[bs * rows,](
        flat, temperature.contiguous(), limits.contiguous(), out, rows, bs, vocab_size, BLOCK=block, num_warps=8
    )
    return out.view_as(logits)


@jit(varying=("temperature", "limits", "rows", "bs"))
def _truncate_kernel(  # type: ignore[no-untyped-def]
    logits, temperature, limits, out, rows, bs, vocab_size, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    request = row // rows
    here, there = logits + row * vocab_size, out + row * vocab_size
    t = tl.load(temperature + request)
    top_k = tl.load(limits + request)
    top_p = tl.load(limits + bs + request)
    min_p = tl.load(limits + 2 * bs + request)
    threshold = tl.full([], float("-inf"), tl.float32)  # the smallest score that stays, a score is a logit / T
    ties = tl.full([], float("inf"), tl.float32)  # how many tokens with that score stay
    floor = tl.full([], float("-inf"), tl.float32)
    active = (t > 0) & ((top_k < vocab_size) | (top_p < 1.0) | (min_p > 0.0))
    scale = tl.where(t > 0, t, 1.0)
    if active:
        highest, lowest, count, wrong = _range(here, scale, vocab_size, BLOCK)
        if (wrong == 0) & (highest > float("-inf")):
            if top_k < count:
                threshold, above = _search(here, scale, highest, lowest, top_k, vocab_size, BLOCK, MASS=False)
                ties = top_k - above
            if top_p < 1.0:
                start = tl.maximum(threshold, lowest)
                mass, _, _ = _measure(here, scale, highest, start, vocab_size, BLOCK, MASS=True)
                at_start = _count(here, scale, start, vocab_size, BLOCK)
                ties = tl.minimum(ties, at_start)
                goal = tl.maximum(top_p * (mass + ties * tl.exp(start - highest)), _LEAST_MASS)
                cut, above = _search(here, scale, highest, start, goal, vocab_size, BLOCK, MASS=True)
                wanted = tl.maximum(tl.ceil((goal - above) / tl.exp(cut - highest)), 1.0)
                ties = tl.where(cut == start, tl.minimum(ties, wanted), wanted)
                threshold = cut
            if min_p > 0.0:
                floor = highest + tl.log(min_p)
    taken = tl.full([], 0.0, tl.float32)
    for first in range(0, vocab_size, BLOCK):
        token = first + tl.arange(0, BLOCK)
        inside = token < vocab_size
        value = tl.load(here + token, mask=inside, other=float("-inf"))
        score = tl.div_rn(value, scale)
        tie = (score == threshold) & inside
        number = taken + tl.cumsum(tie.to(tl.float32), 0)
        dropped = (score < threshold) | (tie & (number > ties)) | (score < floor)
        tl.store(there + token, tl.where(dropped, float("-inf"), value), mask=inside)
        taken += tl.sum(tie.to(tl.float32), 0)


@jit
def _range(here, scale, vocab_size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The highest score, the lowest finite one, the number of finite ones, and whether there is NaN or +inf."""
    highest = tl.full([], float("-inf"), tl.float32)
    lowest = tl.full([], float("inf"), tl.float32)
    count = tl.full([], 0.0, tl.float32)
    wrong = 0
    for first in range(0, vocab_size, BLOCK):
        token = first + tl.arange(0, BLOCK)
        score = tl.div_rn(tl.load(here + token, mask=token < vocab_size, other=float("-inf")), scale)
        finite = tl.abs(score) < float("inf")
        highest = tl.maximum(highest, tl.max(tl.where(finite, score, float("-inf")), 0))
        lowest = tl.minimum(lowest, tl.min(tl.where(finite, score, float("inf")), 0))
        count += tl.sum(finite.to(tl.float32), 0)
        wrong = tl.maximum(wrong, tl.max(((finite == 0) & (score != float("-inf"))).to(tl.int32), 0))
    return highest, lowest, count, wrong


@jit
def _measure(here, scale, highest, pivot, vocab_size, BLOCK: tl.constexpr, MASS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number or the mass of scores above the pivot, the lowest of them, and the highest of the others."""
    total = tl.full([], 0.0, tl.float32)
    over = tl.full([], float("inf"), tl.float32)
    under = tl.full([], float("-inf"), tl.float32)
    for first in range(0, vocab_size, BLOCK):
        token = first + tl.arange(0, BLOCK)
        score = tl.div_rn(tl.load(here + token, mask=token < vocab_size, other=float("-inf")), scale)
        above = score > pivot
        weight = tl.exp(score - highest) if MASS else above.to(tl.float32)
        total += tl.sum(tl.where(above, weight, 0.0), 0)
        over = tl.minimum(over, tl.min(tl.where(above, score, float("inf")), 0))
        under = tl.maximum(under, tl.max(tl.where(above, float("-inf"), score), 0))
    return total, over, under


@jit
def _count(here, scale, wanted, vocab_size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number of scores that equal `wanted`."""
    count = tl.full([], 0.0, tl.float32)
    for first in range(0, vocab_size, BLOCK):
        token = first + tl.arange(0, BLOCK)
        score = tl.div_rn(tl.load(here + token, mask=token < vocab_size, other=float("-inf")), scale)
        count += tl.sum(((score == wanted) & (token < vocab_size)).to(tl.float32), 0)
    return count


@jit
def _search(here, scale, highest, lowest, goal, vocab_size, BLOCK: tl.constexpr, MASS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The highest score that reaches the goal together with all above it, and the measure of those above it.

    `lowest` reaches it. The result lies between `low` and `high`, which are scores of the row. Each pass moves one of
    them closer.
    """
    low, high = lowest, highest
    beyond = tl.full([], 0.0, tl.float32)  # the measure above `high`
    while low < high:
        pivot = 0.5 * low + 0.5 * high
        pivot = tl.where((pivot >= high) | (pivot < low), low, pivot)
        total, over, under = _measure(here, scale, highest, pivot, vocab_size, BLOCK, MASS)
        reached = total >= goal
        low = tl.where(reached, over, low)
        high = tl.where(reached, high, under)
        beyond = tl.where(reached, beyond, total)
    return low, beyond
