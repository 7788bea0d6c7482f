"""top-k, top-p and min_p without a sort: a search for the last token that stays, among few candidates.

A token's key is an integer that orders a row: by logit, equal logits by token id. All three limits are one cut: tokens
with smaller keys are dropped. Three kernels:

1. `_candidates_kernel`, one program per piece of a row: its best tokens, its maximum and its mass.
2. `_cut_kernel`, one program per row: the cut. It searches the row's candidates. Where they do not reach the limit
   (top_p = 0.999 of a flat distribution) it searches the whole row, which is slow.
3. `_drop_kernel`, one program per block of a row: the logits that stay.

A step of a search measures the tokens above a pivot: their number, or their mass. The pivot halves the interval in
which the cut lies. Its ends are keys of the row, so that few steps are needed. All sums are taken in an order that
depends on nothing but the vocabulary's size and the row.

Source: the rejection sampling of FlashInfer (flashinfer.ai, 2025) searches by pivots too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_server.ops.dispatch import op
from eagle_server.ops.triton_support import blocks, constant, jit, power_of_two, tl

NO_TOP_K = float(1 << 30)  # exact in float32, and larger than any vocabulary
_SORTED_ROWS = 64  # rows of logits sorted at a time on a GPU; sorting takes about 56 bytes per row and vocabulary entry
_BLOCK = 2048  # tokens of a piece
_CANDIDATES = 128  # at most, of a piece; see "top-k and top-p among candidates" in docs/experiments.md
_SEARCHED = 4096  # keys or logits that a search reads at once
_RUN = 64  # tokens in a row that belong to the same piece: 128 bytes or more
_LEAST_MASS = constant(1e-30)  # top_p = 0 keeps one token
_LEAST = constant(-(1 << 63))  # smaller than every key
_MOST = constant((1 << 63) - 1)
_LAST_TOKEN = constant((1 << 31) - 1)


@op
def truncate_rows(
    logits: Tensor, temperature: Tensor, limits: Tensor, truncated: Tensor | None, floored: Tensor | None
) -> Tensor:
    """The logits with -inf for tokens that top-k, then top-p, then min_p remove. Equal logits: the smaller id stays.

    Args:
        logits: float32 or bfloat16 [bs, rows, V], not modified. The result is float32. The kernel drops nothing from a
            row with NaN or +inf.
        temperature: float32 [bs]. Greedy requests (0) lose no token.
        limits: float32 [3, bs]: top_k (`NO_TOP_K`: off), top_p (1: off) and min_p (0: off).
        truncated, floored: int64, the stochastic requests with top-k or top-p, and those with min_p; None: there are
            none. The kernel reads the limits only.
    """
    logits = logits.float()
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
        own = (each.index_select(0, some) for each in (logits, temperature, *limits))
        logits.index_copy_(0, some, kept(*own))
    return logits


def truncate(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The logits with -inf outside the top-k, then outside the smallest set with renormalized mass >= top_p.

    Args:
        logits: float32 [n, rows, vocab]. Equal ones: the smaller token id is better.
        temperature, top_k, top_p: [n]. top_p >= 1 drops nothing, whatever rounding does to the mass.
    """
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered.masked_fill(rank >= top_k[:, None, None], float("-inf"))
    probs = (ordered / temperature[:, None, None]).softmax(-1)
    most = top_p.masked_fill(top_p >= 1, float("inf"))[:, None, None]
    dropped = (probs.cumsum(-1) - probs >= most) & (rank > 0)
    return torch.empty_like(logits).scatter_(-1, tokens, ordered.masked_fill(dropped, float("-inf")))


def above_min_p(logits: Tensor, temperature: Tensor, min_p: Tensor) -> Tensor:
    """The logits with -inf for tokens with less than min_p [n] times the best probability. Shapes as in `truncate`."""
    least = logits.amax(dim=-1, keepdim=True) + (temperature * min_p.log())[:, None, None]
    return logits.masked_fill(logits < least, float("-inf"))


class _Pieces(NamedTuple):
    """What the first kernel finds in each piece of a row. Rows without limits have no values.

    A row's candidates are the tokens with logits above the largest of its pieces' bounds.
    """

    keys: Tensor  # int64 [n, pieces, candidates], of the logits above the bound
    measures: Tensor  # float32 [n, pieces, 4]: maximum, bound, mass relative to the maximum, number of finite logits


@truncate_rows.on("triton")
def _launch_truncate(
    logits: Tensor, temperature: Tensor, limits: Tensor, truncated: Tensor | None, floored: Tensor | None
) -> Tensor:
    flat, vocab_size = logits.flatten(0, 1).contiguous(), logits.shape[2]
    settings = temperature.contiguous(), limits.contiguous()
    cuts = _launch_cuts(flat, *settings, _launch_candidates(flat, *settings))
    out = torch.empty(flat.shape, dtype=torch.float32, device=flat.device)
    block = _block(vocab_size)
    _drop_kernel[len(flat), blocks(vocab_size, block)](flat, cuts, out, vocab_size, BLOCK=block)
    return out.view_as(logits)


def _block(vocab_size: int) -> int:
    return min(_BLOCK, power_of_two(vocab_size, least=16))


def _launch_candidates(logits: Tensor, temperature: Tensor, limits: Tensor) -> _Pieces:
    n, vocab_size = logits.shape
    block = _block(vocab_size)
    most, pieces = min(_CANDIDATES, block), blocks(vocab_size, block)
    found = _Pieces(
        torch.empty(n, pieces, most, dtype=torch.int64, device=logits.device),
        torch.empty(n, pieces, 4, dtype=torch.float32, device=logits.device),
    )
    _candidates_kernel[n, pieces](
        *(logits, temperature, limits, *found, n // len(temperature), len(temperature), vocab_size),
        **{"BLOCK": block, "RUN": min(_RUN, block), "CANDIDATES": most},
    )
    return found


def _launch_cuts(logits: Tensor, temperature: Tensor, limits: Tensor, found: _Pieces) -> Tensor:
    """The smallest key of each row that stays, int64 [n]."""
    n, vocab_size = logits.shape
    _, pieces, most = found.keys.shape
    cuts = torch.empty(n, dtype=torch.int64, device=logits.device)
    _cut_kernel[n,](
        *(logits, temperature, limits, *found, cuts, n // len(temperature), len(temperature), vocab_size, pieces),
        **{"BLOCK": min(_SEARCHED, power_of_two(vocab_size, least=16)), "PIECES": power_of_two(pieces)},
        **{"CANDIDATES": most, "num_warps": 16},
    )
    return cuts


@jit
def _ordered(value):  # type: ignore[no-untyped-def]
    """An int32 in the order of float32 values. -0 is 0."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@jit
def _value(ordered):  # type: ignore[no-untyped-def]
    """The inverse of `_ordered`."""
    magnitude = tl.abs(ordered).to(tl.float32, bitcast=True)
    return tl.where(ordered < 0, -magnitude, magnitude)


@jit
def _key(value, token):  # type: ignore[no-untyped-def]
    """An int64 that is larger for a better token: by logit, then for the smaller id."""
    return (_ordered(value).to(tl.int64) << 32) + (_LAST_TOKEN - token)


@jit
def _middle(low, high):  # type: ignore[no-untyped-def]
    """The mean of two integers, rounded down, without overflow."""
    return (low & high) + ((low ^ high) >> 1)


@jit
def _settings(temperature, limits, request, bs, vocab_size):  # type: ignore[no-untyped-def]
    """A request's temperature, top_k, top_p and min_p, and whether they drop tokens."""
    t = tl.load(temperature + request)
    top_k = tl.load(limits + request)
    top_p = tl.load(limits + bs + request)
    min_p = tl.load(limits + 2 * bs + request)
    return t, top_k, top_p, min_p, (t > 0) & ((top_k < vocab_size) | (top_p < 1.0) | (min_p > 0.0))


@jit(varying=("temperature", "limits", "rows", "bs"))
def _candidates_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    logits,
    temperature,
    limits,
    keys,
    measures,
    rows,
    bs,
    vocab_size,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """A piece has every n-th run of RUN tokens: tokenizers give common tokens small ids, next to each other.

    At most CANDIDATES of its logits are above its bound; more than three quarters as many, where ties allow it.
    """
    row = tl.program_id(0).to(tl.int64)
    piece, pieces = tl.program_id(1), tl.num_programs(1)
    t, _, _, _, limited = _settings(temperature, limits, row // rows, bs, vocab_size)
    if limited:
        place = tl.arange(0, BLOCK)
        token = (place // RUN * pieces + piece) * RUN + place % RUN
        value = tl.load(logits + row * vocab_size + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        finite = tl.abs(value) < float("inf")
        count = tl.sum(finite.to(tl.int32), 0)
        highest = tl.max(tl.where(finite, value, float("-inf")), 0)
        origin = tl.where(count > 0, highest, 0.0)
        mass = tl.sum(tl.exp((value - origin) * (1.0 / t)), 0)  # not finite where a logit is NaN or +inf
        low, high = _ordered(tl.full([], float("-inf"), tl.float32)), _ordered(highest)
        chosen = tl.full([], 0, tl.int32)  # above `high`; more than CANDIDATES are above `low`
        if count <= CANDIDATES:  # all of them
            high = low
        while (low + 1 < high) & (4 * chosen <= 3 * CANDIDATES):
            pivot = _middle(low, high)
            above = tl.sum((value > _value(pivot)).to(tl.int32), 0)
            fits = above <= CANDIDATES
            low, high = tl.where(fits, low, pivot), tl.where(fits, pivot, high)
            chosen = tl.where(fits, above, chosen)
        bound = _value(high)
        best = (finite & (value > bound)).to(tl.int32)
        here = (row * pieces + piece) * CANDIDATES
        tl.store(keys + here + tl.cumsum(best, 0) - 1, _key(value, token), mask=best > 0)
        slot = tl.arange(0, CANDIDATES)
        tl.store(keys + here + slot, tl.full([CANDIDATES], _LEAST, tl.int64), mask=slot >= tl.sum(best, 0))
        part = measures + (row * pieces + piece) * 4
        tl.store(part, highest)
        tl.store(part + 1, bound)
        tl.store(part + 2, mass)
        tl.store(part + 3, count.to(tl.float32))


@jit(varying=("temperature", "limits", "rows", "bs"))
def _cut_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    logits,
    temperature,
    limits,
    keys,
    measures,
    cuts,
    rows,
    bs,
    vocab_size,
    pieces,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    t, top_k, top_p, min_p, limited = _settings(temperature, limits, row // rows, bs, vocab_size)
    cut = tl.full([], _LEAST, tl.int64)
    if limited:
        piece = tl.arange(0, PIECES)
        part, inside = measures + (row * pieces + piece) * 4, piece < pieces
        maxima = tl.load(part, mask=inside, other=float("-inf"))
        highest = tl.max(maxima, 0)
        bound = tl.max(tl.load(part + 1, mask=inside, other=float("-inf")), 0)
        scale = 1.0 / t
        masses = tl.load(part + 2, mask=inside, other=0.0)
        mass = tl.sum(masses * tl.exp((maxima - highest) * scale), 0)
        count = tl.sum(tl.load(part + 3, mask=inside, other=0.0), 0)
        if mass < float("inf"):  # no NaN, no +inf, and not all are -inf
            some, size = keys + row * pieces * CANDIDATES, pieces * CANDIDATES
            here, start = logits + row * vocab_size, _key(bound, 0)
            if top_k < count:
                cut = _search(some, size, here, vocab_size, start, top_k, highest, scale, BLOCK, MASS=False)
                if top_p < 1.0:
                    if cut > start:
                        mass, _, _ = _measure(some, size, cut - 1, highest, scale, BLOCK, MASS=True, KEYS=True)
                    else:
                        mass, _, _ = _measure(here, vocab_size, cut - 1, highest, scale, BLOCK, MASS=True, KEYS=False)
            if top_p < 1.0:
                goal = tl.maximum(top_p * mass, _LEAST_MASS)
                found = _search(some, size, here, vocab_size, start, goal, highest, scale, BLOCK, MASS=True)
                cut = tl.maximum(cut, found)
            if min_p > 0.0:
                cut = tl.maximum(cut, _key(highest + t * tl.log(min_p), _LAST_TOKEN))
    tl.store(cuts + row, cut)


@jit
def _search(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    some, size, here, vocab_size, start, goal, highest, scale, BLOCK: tl.constexpr, MASS: tl.constexpr
):
    """The largest key that reaches the goal together with all above it.

    `some`: the keys of the row's candidates, which are all keys above `start`. `here`: the row.
    """
    best = _key(highest, 0)
    found = _between(start, best, some, size, goal, highest, scale, BLOCK, MASS, KEYS=True)
    if found == start:  # the candidates do not reach the goal
        least = tl.full([], _LEAST, tl.int64)
        found = _between(least, start, here, vocab_size, goal, highest, scale, BLOCK, MASS, KEYS=False)
    return found


@jit
def _between(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    low, high, source, size, goal, highest, scale, BLOCK: tl.constexpr, MASS: tl.constexpr, KEYS: tl.constexpr
):
    """The largest key up to `high` that reaches the goal together with all above it, or `low` if none above `low` does.

    Each step moves `low` or `high` to a key that is closer to the result.
    """
    while low < high:
        pivot = _middle(low, high)
        total, over, under = _measure(source, size, pivot, highest, scale, BLOCK, MASS, KEYS)
        reached = total >= goal
        low, high = tl.where(reached, over, low), tl.where(reached, high, under)
    return low


@jit
def _measure(source, size, pivot, highest, scale, BLOCK: tl.constexpr, MASS: tl.constexpr, KEYS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number or the mass of the tokens above the pivot, the lowest key of them, and the highest of the others.

    The source has keys, or the logits of a row.
    """
    total = tl.zeros([BLOCK], tl.float32)
    over = tl.full([BLOCK], _MOST, tl.int64)
    under = tl.full([BLOCK], _LEAST, tl.int64)
    for first in range(0, size, BLOCK):
        place = first + tl.arange(0, BLOCK)
        if KEYS:
            key = tl.load(source + place, mask=place < size, other=_LEAST)
            value = _value((key >> 32).to(tl.int32))
        else:
            value = tl.load(source + place, mask=place < size, other=float("-inf")).to(tl.float32)
            key = _key(value, place)
        above = key > pivot
        weight = tl.exp((value - highest) * scale) if MASS else above.to(tl.float32)
        total += tl.where(above, weight, 0.0)
        over = tl.minimum(over, tl.where(above, key, _MOST))
        under = tl.maximum(under, tl.where(above, _LEAST, key))
    return tl.sum(total, 0), tl.min(over, 0), tl.max(under, 0)


@jit
def _drop_kernel(logits, cuts, out, vocab_size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place, inside = row * vocab_size + token, token < vocab_size
    value = tl.load(logits + place, mask=inside).to(tl.float32)
    tl.store(out + place, tl.where(_key(value, token) < tl.load(cuts + row), float("-inf"), value), mask=inside)
