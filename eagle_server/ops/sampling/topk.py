"""Top-k of the logits with their log-probabilities: the candidates for the children of a drafted node.

With the noise of the target's draw the first child is the draw, if draft and target agree (Daliri, Musco, Suresh 2024).
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_server.ops.device import on_gpu
from eagle_server.ops.native.library import available
from eagle_server.ops.native.sampling import NativeScoring
from eagle_server.ops.sampling.draw import perturb, perturb_at
from eagle_server.ops.triton_support import blocks, jit, power_of_two, tl

MAX_TOPK = 16  # limit of the kernel, which finds the k best one after the other
_BLOCK = 2048  # tokens per program of the first stage


def topk_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most probable tokens of each row.

    Args:
        logits: float32 or bfloat16 [n, V], V >= k.

    Returns:
        logp float32 [n, k], descending: logits minus the logsumexp of their row. ids int64 [n, k]. Ties go to the lower
        id and NaN ranks last; in torch's twin torch.topk decides. In a row with NaN or inf the log-probabilities are
        not finite, but the ids are still below V.
    """
    if on_gpu(logits) and k <= MAX_TOPK:
        return _launch_topk(logits, k)
    if available(logits.device, logits.dtype):
        return NativeScoring(logits, logits.shape[1]).topk(k)
    return _topk_torch(logits, k)


def coupled_topk_logprobs(
    logits: Tensor,
    k: int,
    keys: Tensor,
    positions: Tensor,
    temperature: Tensor,
    ids: Tensor | None = None,
    *,
    ahead: int = 0,
) -> tuple[Tensor, Tensor]:
    """The k best tokens of each row by `draw_tokens`' score: logits / T + Gumbel noise, or the logits at temperature 0.

    Args:
        logits: float32 or bfloat16 [n, V], V >= k.
        keys, positions: int64 [requests]. The target's draw that a row drafts has its request's key, and its position
            + `ahead`. Unused at temperature 0. Requests have equally many rows, which follow each other.
        temperature: float32 [requests].
        ids: int64 [V], the target ids of the draft's tokens, which index the noise (None: the vocabularies are equal).

    Returns:
        As `topk_logprobs`, of the scores: logp float32 [n, k], tokens int64 [n, k] of the draft's vocabulary.
    """
    if on_gpu(logits) and k <= MAX_TOPK:
        inputs = (keys.contiguous(), positions.contiguous(), temperature.contiguous())
        return _launch_topk(logits, k, *inputs, ids, ahead=ahead)
    nodes = len(logits) // len(keys)
    keys, positions, temperature = (x.repeat_interleave(nodes) for x in (keys, positions + ahead, temperature))
    if available(logits.device, logits.dtype):
        return NativeScoring(logits, logits.shape[1], keys, positions, temperature, ids).topk(k)
    return _topk_torch(perturb(logits, keys, positions, temperature, ids), k)


def _topk_torch(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    best, ids = logits.topk(k, dim=-1)
    return best.float() - logits.float().logsumexp(-1, keepdim=True), ids


def _launch_topk(
    logits: Tensor,
    k: int,
    keys: Tensor | None = None,
    positions: Tensor | None = None,
    temperature: Tensor | None = None,
    ids: Tensor | None = None,
    *,
    ahead: int = 0,
) -> tuple[Tensor, Tensor]:
    n, vocab_size = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    block = min(_BLOCK, power_of_two(vocab_size, least=16))
    pieces = blocks(vocab_size, block)
    values = torch.empty(n, pieces, k, dtype=torch.float32, device=logits.device)
    candidates = torch.empty(n, pieces, k, dtype=torch.int32, device=logits.device)
    # (maximum, sum of exp(score - maximum))
    mass = torch.empty(n, pieces, 2, dtype=torch.float32, device=logits.device)
    logp = torch.empty(n, k, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(n, k, dtype=torch.int64, device=logits.device)
    _block_kernel[n, pieces](
        logits,
        keys,
        positions,
        temperature,
        None if ids is None else ids.contiguous(),
        values,
        candidates,
        mass,
        vocab_size,
        logits.stride(0),
        k,
        1 if keys is None else n // len(keys),
        ahead,
        BLOCK=block,
    )
    _merge_kernel[n,](
        values,
        candidates,
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


@jit(varying=("keys", "positions", "temperature", "nodes", "ahead"))
def _block_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    logits,
    keys,
    positions,
    temperature,
    ids,
    values,
    candidates,
    mass,
    vocab_size,
    stride,
    k,
    nodes,
    ahead,
    BLOCK: tl.constexpr,
):
    """Top-k and softmax mass of one block of one row. Entries beyond the vocabulary get token `vocab_size`.

    Without `temperature` (None) the logits are ranked as they are, without `ids` (None) the noise is indexed by token.
    """
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    token = piece * BLOCK + tl.arange(0, BLOCK)
    alive = token < vocab_size
    raw = tl.load(logits + row * stride + token, mask=alive, other=float("-inf")).to(tl.float32)
    if temperature is not None:
        noisy = token if ids is None else tl.load(ids + token, mask=alive, other=0)
        raw = perturb_at(raw, row // nodes, row // nodes, ahead, keys, positions, temperature, noisy)
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
        tl.store(candidates + place * k + j, chosen)


@jit
def _merge_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    values, candidates, mass, logp, tokens, vocab_size, pieces, k, PIECES: tl.constexpr, CANDIDATES: tl.constexpr
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
    token = tl.load(candidates + row * pieces * k + candidate, mask=inside, other=vocab_size)
    alive = token < vocab_size
    for j in range(k):
        best = tl.max(tl.where(alive, value, float("-inf")), 0)
        chosen = tl.min(tl.where(alive & (value == best), token, vocab_size), 0)
        alive = alive & (token != chosen)
        tl.store(logp + row * k + j, best - logsumexp)
        tl.store(tokens + row * k + j, chosen.to(tl.int64))
