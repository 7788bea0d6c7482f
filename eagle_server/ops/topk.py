"""Top-k of the logits with their log-probabilities: the candidates for the children of a drafted node."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_server.ops.gumbel import gumbel_of
from eagle_server.ops.triton_support import blocks, jit, on_gpu, power_of_two, tl

MAX_TOPK = 16  # limit of the kernel, which finds the k best one after the other
_BLOCK = 2048  # tokens per program of the first stage


def topk_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most probable tokens of each row.

    Args:
        logits: float32 or bfloat16 [n, V], V >= k.

    Returns:
        logp float32 [n, k], descending: logits minus the logsumexp of their row. ids int64 [n, k]. On a GPU ties go to
        the lower id and NaN ranks last; elsewhere torch.topk decides. In a row with NaN or inf the log-probabilities
        are not finite, but the ids are still below V.
    """
    if on_gpu(logits) and k <= MAX_TOPK:
        return _launch_topk(logits, k)
    return _topk_torch(logits, k)


def coupled_topk_logprobs(  # noqa: PLR0913, PLR0917
    logits: Tensor, k: int, keys: Tensor, positions: Tensor, temperature: Tensor, ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`topk_logprobs` of logits / T + G, the scores by which the target draws; at T = 0 of the logits.

    Args:
        logits: float32 [n, V], V >= k, over the draft's vocabulary.
        keys, positions: int64 [n]; the noise G depends on them and on the target's token id.
        temperature: float32 [n].
        ids: int64 [V], the target id of each draft token; None: they are the same.

    Returns:
        logp float32 [n, k], descending: scores minus the logsumexp of their row. tokens int64 [n, k]: draft ids.
    """
    return _coupled_topk_torch(logits, k, keys, positions, temperature, ids)


def _coupled_topk_torch(  # noqa: PLR0913, PLR0917
    logits: Tensor, k: int, keys: Tensor, positions: Tensor, temperature: Tensor, ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    tokens = torch.arange(logits.shape[1], device=logits.device) if ids is None else ids
    drawn = temperature[:, None] > 0
    coupled = logits / torch.where(drawn, temperature[:, None], 1.0) + gumbel_of(keys, positions, tokens)
    return _topk_torch(torch.where(drawn, coupled, logits), k)


def _topk_torch(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    best, ids = logits.topk(k, dim=-1)
    return best.float() - logits.float().logsumexp(-1, keepdim=True), ids


def _launch_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    n, vocab_size = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    block = min(_BLOCK, power_of_two(vocab_size, least=16))
    pieces = blocks(vocab_size, block)
    values = torch.empty(n, pieces, k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(n, pieces, k, dtype=torch.int32, device=logits.device)
    # (maximum, sum of exp(logit - maximum))
    mass = torch.empty(n, pieces, 2, dtype=torch.float32, device=logits.device)
    logp = torch.empty(n, k, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(n, k, dtype=torch.int64, device=logits.device)
    _block_kernel[n, pieces](logits, values, ids, mass, vocab_size, logits.stride(0), k, BLOCK=block)
    _merge_kernel[n,](
        values,
        ids,
        mass,
        logp,
        tokens,
        vocab_size,
        pieces,
        k,
        PIECES=power_of_two(pieces),
        CANDIDATES=power_of_two(pieces * k),
    )
    return logp, tokens


@jit
def _block_kernel(logits, values, ids, mass, vocab_size, stride, k, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Top-k and softmax mass of one block of one row. Entries beyond the vocabulary get id `vocab_size`."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    token = piece * BLOCK + tl.arange(0, BLOCK)
    alive = token < vocab_size
    raw = tl.load(logits + row * stride + token, mask=alive, other=float("-inf")).to(tl.float32)
    ranked = tl.where(raw != raw, float("-inf"), raw)  # noqa: PLR0124  a NaN
    top = tl.max(ranked, 0)
    place = row * tl.num_programs(1) + piece
    tl.store(mass + place * 2, top)
    tl.store(mass + place * 2 + 1, tl.sum(tl.exp(raw - tl.where(top == float("-inf"), 0.0, top)), 0))
    for j in range(k):
        best = tl.max(tl.where(alive, ranked, float("-inf")), 0)
        chosen = tl.min(tl.where(alive & (ranked == best), token, vocab_size), 0)
        alive = alive & (token != chosen)
        tl.store(values + place * k + j, best)
        tl.store(ids + place * k + j, chosen)


@jit
def _merge_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    values, ids, mass, logp, tokens, vocab_size, pieces, k, PIECES: tl.constexpr, CANDIDATES: tl.constexpr
):
    """The k best over all blocks of a row, minus the logarithm of the blocks' total mass."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PIECES)
    part = mass + (row * pieces + piece) * 2
    highest = tl.load(part, mask=piece < pieces, other=float("-inf"))
    total = tl.load(part + 1, mask=piece < pieces, other=0.0)
    top = tl.max(highest, 0)
    logsumexp = tl.log(tl.sum(total * tl.exp(highest - top), 0)) + top
    candidate = tl.arange(0, CANDIDATES)
    inside = candidate < pieces * k
    value = tl.load(values + row * pieces * k + candidate, mask=inside, other=float("-inf"))
    token = tl.load(ids + row * pieces * k + candidate, mask=inside, other=vocab_size)
    alive = token < vocab_size
    for j in range(k):
        best = tl.max(tl.where(alive, value, float("-inf")), 0)
        chosen = tl.min(tl.where(alive & (value == best), token, vocab_size), 0)
        alive = alive & (token != chosen)
        tl.store(logp + row * k + j, best - logsumexp)
        tl.store(tokens + row * k + j, chosen.to(tl.int64))
