"""Attention over whole texts in blocks of rows, so that no matrix of length x length is ever made.

Row i of pass s sees the keys of pass 0 at rows j <= i - s of its document, and in a layer with a window w those with
j > i - w. In later passes it also sees one key per pass of its own chain, see `ttt`. Blocks that need their scores for
the gradient compute them again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from eagle_server.attention.dense import DenseCausal
from eagle_server.attention.interface import BoundAttention, LayerSpec
from eagle_server.ops.recurrent.nodes import RecurrentLayer
from eagle_tools.training.packing import Packing

LONG = 1024  # rows; scores of longer texts are computed again, not kept, as that costs time
BLOCK = 256  # rows of queries; scores of a block are [heads, 256, length]
Pair = tuple[Tensor, Tensor]  # keys, values [batch, kv_heads, length, head_dim]


class TextAttention(BoundAttention):
    """Causal attention of `batch` texts of one length, within the documents of `packing`; None: each is one."""

    def __init__(self, batch: int, packing: Packing | None = None) -> None:
        self.batch, self.packing = batch, packing

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec) -> Tensor:
        """q, k [batch * length, heads or kv_heads, head_dim], v [.., kv_heads, value_dim] -> [.., heads, value_dim]."""
        if self.packing is None and not layer.sliding_window and not layer.softcap:
            dense: Tensor = DenseCausal(self.batch).run(q, k, v, layer)
            return dense
        pair = (by_text(k, self.batch), by_text(v, self.batch))
        return in_blocks(q, pair, (), self.packing, layer)

    def recur(self, x: Tensor, gates: Tensor, layer: RecurrentLayer) -> Tensor:
        """See `BoundAttention.recur`. Only for texts of one document."""
        if self.packing is not None:
            raise ValueError("recurrent layers cannot read packed documents")
        states: Tensor = DenseCausal(self.batch).recur(x, gates, layer)
        return states


def recomputed(function: Callable[..., Any], *arguments: Any, large: bool) -> Any:
    """function(*arguments). If it is `large`, nothing but the results is kept: the backward pass computes it again."""
    if not (large and torch.is_grad_enabled()):
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False)


def by_text(rows: Tensor, batch: int) -> Tensor:
    """[batch * length, heads, dim] -> [batch, heads, length, dim]."""
    split: Tensor = rows.unflatten(0, (batch, -1))
    return split.transpose(1, 2)


def in_blocks(
    q: Tensor,
    prefix: Pair,
    chain: Sequence[Pair],
    packing: Packing | None,
    layer: LayerSpec,
) -> Tensor:
    """Attention of all rows q [batch * length, heads, head_dim] in pass len(chain): [.., heads, value_dim].

    prefix: of pass 0. chain: of passes 1 to s, moved down so that row i has the key of its own chain.
    """
    batch, kv_heads, length, _ = prefix[0].shape
    queries = q.unflatten(0, (batch, length)).unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)
    shift, window = len(chain), layer.sliding_window
    near = [pair for number, pair in enumerate(chain, 1) if not window or number > shift - window]
    found = []
    for start in range(0, length, BLOCK):
        rows = slice(start, min(start + BLOCK, length))
        columns = slice(max(0, start - window + 1) if window else 0, max(0, rows.stop - shift))
        columns = slice(min(columns.start, columns.stop), columns.stop)
        seen = _seen(rows, columns, shift, window, packing, q.device)
        own = [x[:, :, rows] for pair in near for x in pair]
        parts = (queries[..., rows, :], *(x[:, :, columns] for x in prefix), seen, layer, *own)
        found.append(_attended(*parts, large=length > LONG))
    return torch.cat(found, dim=3).permute(0, 3, 1, 2, 4).reshape(q.shape[0], q.shape[1], -1)


def _attended(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, layer: LayerSpec, *own: Tensor, large: bool) -> Tensor:
    """The block's rows [batch, kv_heads, group, rows, value_dim]; by PyTorch's own attention where that can do it."""
    if not own and not layer.softcap and layer.sinks is None:
        heads = q.flatten(1, 2)
        out = F.scaled_dot_product_attention(heads, k, v, attn_mask=seen[:, None], scale=layer.scale, enable_gqa=True)
        grouped: Tensor = out.unflatten(1, q.shape[1:3])
        return grouped
    mixed: Tensor = recomputed(_joined, q, k, v, seen, layer, *own, large=large)
    return mixed


def _joined(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, layer: LayerSpec, *own: Tensor) -> Tensor:
    """Softmax over the keys k [batch, kv_heads, columns, d], one key of each pair of `own`, and a sink."""
    keys, values = own[::2], own[1::2]
    columns = [q @ k.unsqueeze(2).transpose(-1, -2), *((q * a.unsqueeze(2)).sum(-1, keepdim=True) for a in keys)]
    scores = torch.cat(columns, dim=-1).float() * layer.scale
    if layer.softcap:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    hidden = F.pad(~seen[:, None, None], (0, len(keys)))
    scores = scores.masked_fill(hidden, -torch.inf)
    if layer.sinks is not None:
        sinks = layer.sinks.float().view(1, q.shape[1], -1, 1, 1)
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    weights, width = scores.softmax(-1).to(v.dtype), k.shape[2]
    out = weights[..., :width] @ v.unsqueeze(2)
    for number, b in enumerate(values):
        out = out + weights[..., width + number, None] * b.unsqueeze(2)
    return out


def _seen(
    rows: slice, columns: slice, shift: int, window: int, packing: Packing | None, device: torch.device
) -> Tensor:
    """Which keys of pass 0 the rows see, bool [batch or 1, rows, columns]."""
    i = torch.arange(rows.start, rows.stop, device=device)[:, None]
    j = torch.arange(columns.start, columns.stop, device=device)
    seen = j <= i - shift
    if window:
        seen = seen & (j > i - window)
    if packing is None:
        return seen[None]
    documents = packing.documents
    return seen & (documents[:, rows, None] == documents[:, None, columns])
