"""The accepted tokens of a cycle with the target's features, gathered and stored in one kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_server.ops.dispatch import op
from eagle_server.ops.triton_support import blocks, jit, power_of_two, tl

_BLOCK = 1024  # elements of one feature that a program copies


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
