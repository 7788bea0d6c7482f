"""The input of an EAGLE-3 head's first layer: embedding, parents' states, both norms, the pair. One program per row."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_server.ops.dispatch import op
from eagle_server.ops.layers.fused import owned, rms_norm
from eagle_server.ops.triton_support import jit, power_of_two, tl


class PairNorms(NamedTuple):
    """The norms of the two halves: x / rms(x) * weight."""

    embedded: Tensor  # [H]
    hidden: Tensor  # [H]
    eps: float


def _computes(tokens: Tensor, embed: Tensor, hidden: Tensor, *_: Any, **__: Any) -> bool:
    return hidden.dtype == embed.dtype and not torch.is_grad_enabled()


@op
def normed_pairs(
    tokens: Tensor,
    embed: Tensor,
    hidden: Tensor,
    norms: PairNorms,
    parents: Tensor | None = None,
    *,
    keeps_normed: bool,
) -> tuple[Tensor, Tensor]:
    """The pairs cat(norm(embedding), norm(hidden)), and the residual stream before the layer.

    Args:
        tokens: int64 [rows].
        embed: [V, H], dense rows.
        hidden: [.., H].
        parents: int64 [rows], the row of `hidden` that each row reads; None: its own.
        keeps_normed: the residual stream is norm(hidden) instead of hidden.

    Returns:
        pairs [rows, 2H], and the residual stream [rows, H], which the caller may overwrite.
    """
    if parents is not None:
        hidden = hidden.index_select(0, parents)
    normed = rms_norm(hidden, norms.hidden, norms.eps)
    embedded = rms_norm(F.embedding(tokens, embed), norms.embedded, norms.eps)
    return torch.cat([embedded, normed], dim=-1), normed if keeps_normed else owned(hidden)


@normed_pairs.on("triton", when=_computes)
def _launch_pairs(
    tokens: Tensor,
    embed: Tensor,
    hidden: Tensor,
    norms: PairNorms,
    parents: Tensor | None = None,
    *,
    keeps_normed: bool,
) -> tuple[Tensor, Tensor]:
    rows, size, hidden = len(tokens), hidden.shape[1], hidden.contiguous()
    pairs, residual = hidden.new_empty(rows, 2 * size), hidden.new_empty(rows, size)
    _pairs_kernel[rows,](
        *(tokens.contiguous(), embed, hidden, None if parents is None else parents.contiguous()),
        *(norms.embedded, norms.hidden, pairs, residual),
        *(embed.stride(0), size, norms.eps),
        KEEPS_NORMED=keeps_normed,
        SIZE=power_of_two(size),
        num_warps=8,
    )
    return pairs, residual


@jit(varying=("tokens", "parents"))
def _pairs_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    tokens,
    embed,
    hidden,
    parents,
    embed_weight,
    hidden_weight,
    pairs,
    residual,
    embed_row,
    size,
    eps,
    KEEPS_NORMED: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Each norm is computed in float32 and rounded once, as in `rms_norm`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    inside = column < size
    dtype = pairs.dtype.element_ty
    pair = pairs + row * 2 * size + column
    token = tl.load(tokens + row)
    embedded = tl.load(embed + token * embed_row + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(embed_weight + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(embedded * embedded, 0) / size + eps)
    tl.store(pair, (embedded * scale * weight).to(dtype), mask=inside)
    source = row if parents is None else tl.load(parents + row)
    stream = tl.load(hidden + source * size + column, mask=inside, other=0.0)
    wide = stream.to(tl.float32)
    weight = tl.load(hidden_weight + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    normed = (wide * scale * weight).to(dtype)
    tl.store(pair + size, normed, mask=inside)
    if KEEPS_NORMED:
        stream = normed
    tl.store(residual + row * size + column, stream, mask=inside)
