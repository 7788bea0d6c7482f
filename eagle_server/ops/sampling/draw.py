"""Sampling: argmax(logits / T + Gumbel noise) per row. The kernels store no [n, V] noise or probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_server.ops.dispatch import op
from eagle_server.ops.native.sampling import draw_by_rows, is_read, of_rows
from eagle_server.ops.sampling.gumbel import gumbel, gumbel_at, row_state
from eagle_server.ops.triton_support import blocks, jit, power_of_two, tl

_BLOCK = 2048  # tokens per program of the first stage


@op
def draw_tokens(logits: Tensor, keys: Tensor, positions: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row: the argmax at temperature 0, else a sample of softmax(logits / T).

    Args:
        logits: float32 or bfloat16 [n, V].
        keys: int64 [requests]. Requests have equally many rows, which follow each other.
        positions: int64 [n]. The noise depends on key and position (see `gumbel`). Both are unused at temperature 0.
        temperature: float32 [requests].

    Returns:
        tokens int64 [n]: ties go to the lower id. scores float32 [n]: the maximum. It is not finite if the row holds
        NaN or inf, or only -inf; the token of such a row is some id below V.
    """
    keys, temperature = of_rows(len(logits), keys, temperature)
    scores, tokens = perturb(logits, keys, positions, temperature).max(dim=1)
    return tokens, scores


draw_tokens.on("native", when=is_read)(draw_by_rows)


def perturb(logits: Tensor, keys: Tensor, positions: Tensor, temperature: Tensor, ids: Tensor | None = None) -> Tensor:
    """The scores logits / T + Gumbel noise, float32 [n, V]; at temperature 0 the logits.

    Args:
        logits: float32 or bfloat16 [n, V].
        keys, positions, temperature: int64, int64 and float32 [n], see `draw_tokens`.
        ids: int64 [V], the tokens whose noise the columns get (None: 0, 1, ...).
    """
    drawn, logits = temperature > 0, logits.float()
    if logits.device.type == "cpu":  # rows that follow each other often have the same noise
        wanted = torch.stack([keys, positions]) * drawn
        (keys, positions), number = wanted.unique_consecutive(return_inverse=True, dim=1)
        noise = gumbel(keys, positions, logits.shape[1], ids).index_select(0, number)
    else:
        noise = gumbel(keys, positions, logits.shape[1], ids)
    return torch.where(drawn[:, None], logits / torch.where(drawn, temperature, 1.0)[:, None] + noise, logits)


@draw_tokens.on("triton")
def _launch_draw(logits: Tensor, keys: Tensor, positions: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    n, vocab_size = logits.shape
    pieces = blocks(vocab_size, _BLOCK)
    best = torch.empty(n, pieces, dtype=torch.float32, device=logits.device)
    ids = torch.empty(n, pieces, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(n, dtype=torch.int64, device=logits.device)
    scores = torch.empty(n, dtype=torch.float32, device=logits.device)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    _draw_kernel[n, pieces](
        logits,
        keys.contiguous(),
        positions.contiguous(),
        temperature.contiguous(),
        best,
        ids,
        vocab_size,
        logits.stride(0),
        n // max(1, len(keys)),
        BLOCK=_BLOCK,
    )
    _merge_kernel[n,](best, ids, tokens, scores, pieces, PIECES=power_of_two(pieces))
    return tokens, scores


@jit(varying=("keys", "positions", "temperature", "rows"))
def _draw_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    logits, keys, positions, temperature, best, ids, vocab_size, stride, rows, BLOCK: tl.constexpr
):
    """The maximum of one block of one row and its lowest id; NaN if the block holds one."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    token = piece * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    value = tl.load(logits + row * stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    score, index = first_max(perturb_at(value, row // rows, row, 0, keys, positions, temperature, token), token)
    place = row * tl.num_programs(1) + piece
    tl.store(best + place, score)
    tl.store(ids + place, index)


@jit
def _merge_kernel(best, ids, tokens, scores, pieces, PIECES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The maximum over a row's blocks. Ids rise with the block, so the first of equal maxima has the lowest id."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PIECES)
    score, first = first_max(tl.load(best + row * pieces + piece, mask=piece < pieces, other=float("-inf")), piece)
    tl.store(scores + row, score)
    tl.store(tokens + row, tl.load(ids + row * pieces + first).to(tl.int64))


@jit
def perturb_at(value, request, row, ahead, keys, positions, temperature, token):  # type: ignore[no-untyped-def]
    """The scores of a block of one row; `value` holds its logits, `token` the tokens whose noise they get.

    The noise is that of keys[request] at positions[row] + ahead.
    """
    t = tl.load(temperature + request)
    if t > 0:
        state = row_state(tl.load(keys + request), tl.load(positions + row) + ahead)
        value = tl.div_rn(value, t) + gumbel_at(state, token)
    return value


@jit
def first_max(value, index):  # type: ignore[no-untyped-def]
    """The maximum of a block and its lowest index. If the block holds NaN: NaN and its lowest index."""
    wrong = value != value  # noqa: PLR0124  a NaN
    top = tl.max(tl.where(wrong, float("inf"), value), 0)
    spoilt = tl.max(wrong.to(tl.int32), 0) != 0
    chosen = tl.min(tl.where(wrong | ((value == top) & (spoilt == 0)), index, 0x7FFFFFFF), 0)
    return tl.where(spoilt, float("nan"), top), chosen
