"""The accepted tokens of a cycle: stored with the target's features, counted, and read again by draft-extend."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_server.ops.dispatch import op
from eagle_server.ops.triton_support import blocks, jit, power_of_two, tl

_BLOCK = 1024  # elements of one feature that a program copies
_REQUESTS = 128  # whose lengths a program adds up


class NextLengths(NamedTuple):
    """The requests after a cycle has accepted tokens. All are int64 [bs]."""

    extend_lens: Tensor  # how many tokens it has accepted, the bonus included
    seq_lens: Tensor
    verified_id: Tensor  # the bonus
    following: Tensor  # the position behind the bonus


class ExtendRows(NamedTuple):
    """The rows of a draft-extend, `width` of each request."""

    tokens: Tensor  # int64 [bs * width]
    features: Tensor  # [bs * width, F]
    positions: Tensor  # int64 [bs * width]
    first: Tensor  # int64 [bs], the first position of each request


@op
def store_accepted(
    features: Tensor, path: Tensor, tokens: Tensor, rows: Tensor, stored_tokens: Tensor, stored_features: Tensor
) -> Tensor:
    """Store each path's tokens and the features of its nodes in the request's row. -1 stands for node and token 0.

    Args:
        features: [bs * D, F], of all nodes of all trees.
        path, tokens: int64 [bs, w], node numbers and what follows them, -1 after the end of the path.
        rows: int64 [bs], rows of the storage.
        stored_tokens, stored_features: int64 [number of rows, width] and [number of rows, width, F], width >= w.

    Returns:
        the paths' features [bs, w, F].
    """
    bs, width = path.shape
    first = torch.arange(0, len(features), len(features) // bs, device=path.device)
    nodes = first[:, None] + path.clamp(min=0)
    chosen: Tensor = features.index_select(0, nodes.view(-1)).unflatten(0, nodes.shape)
    stored_tokens[:, :width].index_copy_(0, rows, tokens.clamp(min=0))
    stored_features[:, :width].index_copy_(0, rows, chosen)
    return chosen


@op
def next_lengths(seq_lens: Tensor, accept_length: Tensor, tokens: Tensor) -> NextLengths:
    """What a cycle has made of its requests.

    Args:
        seq_lens, accept_length: int64 [bs], before the cycle, and without the bonus.
        tokens: int64 [bs, w], the accepted ones with the bonus, then -1. A bonus of -1 becomes token 0.
    """
    count = accept_length + 1
    bonus = tokens.gather(1, accept_length[:, None])[:, 0].clamp(min=0)
    return NextLengths(count, seq_lens + count, bonus, seq_lens + count + 1)


@op
def extend_rows(
    stored_tokens: Tensor, stored_features: Tensor, rows: Tensor, seq_lens: Tensor, extend_lens: Tensor, width: int
) -> ExtendRows:
    """The first `width` stored tokens and features of each request, from position seq_lens - extend_lens on.

    Args:
        stored_tokens, stored_features: as in `store_accepted`.
        rows, seq_lens, extend_lens: int64 [bs].
    """
    first = seq_lens - extend_lens
    tokens, features = (each[:, :width].index_select(0, rows) for each in (stored_tokens, stored_features))
    positions = first[:, None] + torch.arange(width, device=first.device)
    return ExtendRows(tokens.view(-1), features.flatten(0, 1), positions.view(-1), first)


@op
def newest_rows(normed: Tensor, feedback: Tensor, extend_lens: Tensor, copies: int) -> tuple[Tensor, Tensor]:
    """Of each request's row number extend_lens - 1: normed [bs, H], and `copies` of feedback, [bs * copies, H].

    Args:
        normed, feedback: [bs * width, H], the results of a draft-extend.
        extend_lens: int64 [bs].
    """
    width = len(normed) // len(extend_lens)
    newest = extend_lens - 1 + torch.arange(0, len(normed), width, device=extend_lens.device)
    return normed.index_select(0, newest), feedback.index_select(0, newest).repeat_interleave(copies, dim=0)


@store_accepted.on("triton")
def _launch_store(
    features: Tensor, path: Tensor, tokens: Tensor, rows: Tensor, stored_tokens: Tensor, stored_features: Tensor
) -> Tensor:
    (bs, width), size = path.shape, features.shape[1]
    if features.stride(1) != 1:
        features = features.contiguous()
    chosen = torch.empty(bs, width, size, dtype=features.dtype, device=features.device)
    block = min(_BLOCK, power_of_two(size))
    _store_kernel[bs * width, blocks(size, block)](
        *(features, path.contiguous(), tokens.contiguous(), rows.contiguous()),
        *(chosen, stored_tokens, stored_features),
        *(len(features) // bs, width, size, features.stride(0), stored_tokens.stride(0), *stored_features.stride()[:2]),
        BLOCK=block,
    )
    return chosen


@jit(varying=("path", "tokens", "rows", "nodes", "width"))
def _store_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    features,
    path,
    tokens,
    rows,
    chosen,
    stored_tokens,
    stored_features,
    nodes,
    width,
    size,
    feature_row,
    token_row,
    stored_row,
    stored_column,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0)
    request, step = entry // width, entry % width
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    node = tl.maximum(tl.load(path + entry), 0) + request * nodes
    row = tl.load(rows + request)
    value = tl.load(features + node * feature_row + column, mask=inside)
    tl.store(chosen + entry.to(tl.int64) * size + column, value, mask=inside)
    tl.store(stored_features + row * stored_row + step * stored_column + column, value, mask=inside)
    if tl.program_id(1) == 0:
        tl.store(stored_tokens + row * token_row + step, tl.maximum(tl.load(tokens + entry), 0))


@next_lengths.on("triton")
def _launch_lengths(seq_lens: Tensor, accept_length: Tensor, tokens: Tensor) -> NextLengths:
    bs, width = tokens.shape
    found = NextLengths(*(torch.empty_like(seq_lens) for _ in NextLengths._fields))
    _lengths_kernel[blocks(bs, _REQUESTS),](
        seq_lens.contiguous(), accept_length.contiguous(), tokens.contiguous(), *found, bs, width, BLOCK=_REQUESTS
    )
    return found


@extend_rows.on("triton")
def _launch_extend_rows(
    stored_tokens: Tensor, stored_features: Tensor, rows: Tensor, seq_lens: Tensor, extend_lens: Tensor, width: int
) -> ExtendRows:
    bs, size = len(rows), stored_features.shape[2]
    tokens = stored_tokens.new_empty(bs * width)
    features = stored_features.new_empty(bs * width, size)
    found = ExtendRows(tokens, features, torch.empty_like(tokens), torch.empty_like(seq_lens))
    block = min(_BLOCK, power_of_two(size))
    _extend_kernel[bs * width, blocks(size, block)](
        *(stored_tokens, stored_features, rows.contiguous(), seq_lens.contiguous(), extend_lens.contiguous(), *found),
        *(width, size, stored_tokens.stride(0), *stored_features.stride()[:2]),
        BLOCK=block,
    )
    return found


@newest_rows.on("triton")
def _launch_newest(normed: Tensor, feedback: Tensor, extend_lens: Tensor, copies: int) -> tuple[Tensor, Tensor]:
    bs, size = len(extend_lens), normed.shape[1]
    found = normed.new_empty(bs, size), feedback.new_empty(bs * copies, size)
    block = min(_BLOCK, power_of_two(size))
    _newest_kernel[bs, blocks(size, block)](
        *(normed.contiguous(), feedback.contiguous(), extend_lens.contiguous(), *found),
        *(len(normed) // bs, copies, size),
        BLOCK=block,
    )
    return found


@jit(varying=("seq_lens", "accept_length", "tokens", "bs", "width"))
def _lengths_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    seq_lens,
    accept_length,
    tokens,
    extend_lens,
    lens_after,
    verified_id,
    following,
    bs,
    width,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = request < bs
    accepted = tl.load(accept_length + request, mask=inside, other=0)
    after = tl.load(seq_lens + request, mask=inside, other=0) + accepted + 1
    bonus = tl.load(tokens + request * width + accepted, mask=inside, other=0)
    tl.store(extend_lens + request, accepted + 1, mask=inside)
    tl.store(lens_after + request, after, mask=inside)
    tl.store(verified_id + request, tl.maximum(bonus, 0), mask=inside)
    tl.store(following + request, after + 1, mask=inside)


@jit(varying=("rows", "seq_lens", "extend_lens", "width"))
def _extend_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    stored_tokens,
    stored_features,
    rows,
    seq_lens,
    extend_lens,
    tokens,
    features,
    positions,
    first,
    width,
    size,
    token_row,
    stored_row,
    stored_column,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0)
    request, step = entry // width, entry % width
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    row = tl.load(rows + request)
    value = tl.load(stored_features + row * stored_row + step * stored_column + column, mask=inside)
    tl.store(features + entry.to(tl.int64) * size + column, value, mask=inside)
    if tl.program_id(1) == 0:
        start = tl.load(seq_lens + request) - tl.load(extend_lens + request)
        tl.store(tokens + entry, tl.load(stored_tokens + row * token_row + step))
        tl.store(positions + entry, start + step)
        if step == 0:
            tl.store(first + request, start)


@jit(varying=("extend_lens", "width", "copies"))
def _newest_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    normed, feedback, extend_lens, newest_normed, newest_feedback, width, copies, size, BLOCK: tl.constexpr
):
    request = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    place = (request * width + tl.load(extend_lens + request) - 1) * size + column
    tl.store(newest_normed + request * size + column, tl.load(normed + place, mask=inside), mask=inside)
    value = tl.load(feedback + place, mask=inside)
    for copy in range(copies):
        tl.store(newest_feedback + (request * copies + copy) * size + column, value, mask=inside)
