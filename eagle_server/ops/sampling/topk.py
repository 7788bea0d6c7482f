"""Top-k of the logits with their log-probabilities: the children of a drafted node.

With the noise of the target's draw the first child is the draw, if draft and target agree (Daliri, Musco, Suresh 2024).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_server.ops.dispatch import op
from eagle_server.ops.native.sampling import NativeScoring, is_read
from eagle_server.ops.sampling.correction import Correction, correct_guesses
from eagle_server.ops.sampling.draw import perturb, perturb_at
from eagle_server.ops.tree.candidates import Children
from eagle_server.ops.triton_support import blocks, jit, power_of_two, tl

MAX_TOPK = 16  # limit of the kernel, which finds the k best one after the other
_BLOCK = 2048  # tokens per program of the first stage


class DrawNoise(NamedTuple):
    """The noise of the target's draws that the rows of some logits draft.

    A row's draw has its request's key, and its position + `ahead`. Both are unused at temperature 0. Requests have
    equally many rows, which follow each other.
    """

    keys: Tensor  # int64 [requests]
    positions: Tensor  # int64 [requests]
    temperature: Tensor  # float32 [requests]
    ahead: int = 0

    def of_rows(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Key, position and temperature of each of `count` rows."""
        nodes = count // len(self.keys)
        each = (self.keys, self.positions + self.ahead, self.temperature)
        keys, positions, temperature = (part.repeat_interleave(nodes) for part in each)
        return keys, positions, temperature


@op
def topk_logprobs(
    logits: Tensor, k: int, ids: Tensor | None = None, noise: DrawNoise | None = None
) -> tuple[Tensor, Tensor]:
    """The k best tokens of each row: the most probable ones, or by `draw_tokens`' score, which is logits / T + Gumbel
    noise, or the logits at temperature 0.

    Args:
        logits: float32 or bfloat16 [n, V], V >= k.
        ids: int64 [V], the target ids of the draft's tokens, which index the noise (None: the vocabularies are equal).

    Returns:
        logp float32 [n, k], descending: scores minus the logsumexp of their row. Target ids, int64 [n, k]. Ties go to
        the draft's lower id and NaN ranks last; in torch's twin torch.topk decides. In a row with NaN or inf the
        log-probabilities are not finite, but the ids are still those of tokens.
    """
    scores = logits if noise is None else perturb(logits, *noise.of_rows(len(logits)), ids)
    best, tokens = scores.topk(k, dim=-1)
    return best.float() - scores.float().logsumexp(-1, keepdim=True), _target_ids(tokens, ids)


@topk_logprobs.on("native", when=is_read)
def _topk_native(
    logits: Tensor, k: int, ids: Tensor | None = None, noise: DrawNoise | None = None
) -> tuple[Tensor, Tensor]:
    rows = () if noise is None else (*noise.of_rows(len(logits)), ids)
    logp, tokens = NativeScoring(logits, logits.shape[1], *rows).topk(k)
    return logp, _target_ids(tokens, ids)


def _target_ids(tokens: Tensor, ids: Tensor | None) -> Tensor:
    return tokens if ids is None else ids.index_select(0, tokens.view(-1)).view_as(tokens)


@op
def score_children(
    logits: Tensor,
    above: Tensor,
    out: Children,
    ids: Tensor | None = None,
    noise: DrawNoise | None = None,
    correction: Correction | None = None,
) -> Children:
    """Write the best children of each node to `out`, a level of a pool.

    Their guesses are those of `topk_logprobs`. A path's score is that of its parent plus the corrected guess.

    Args:
        logits, ids, noise: as in `topk_logprobs`, one row per node.
        above: float32 [bs, nodes], scores of the nodes' paths.
        out: [bs, nodes, k], the children of a request in one piece.

    Returns:
        out.
    """
    k = out.tokens.shape[2]
    logp, tokens = topk_logprobs(logits, k, ids, noise)
    guesses = logp.view(out.guesses.shape)
    chances = guesses if correction is None else correct_guesses(guesses, correction)
    for part, values in zip(out, (tokens.view(out.tokens.shape), above[:, :, None] + chances, guesses), strict=True):
        part.copy_(values)
    return out


class _BestOfBlocks(NamedTuple):
    """What the first stage finds in each block of a row."""

    values: Tensor  # float32 [n, pieces, k]
    candidates: Tensor  # int32 [n, pieces, k]
    mass: Tensor  # float32 [n, pieces, 2]: maximum, sum of exp(score - maximum)


def _launch_blocks(logits: Tensor, k: int, ids: Tensor | None, noise: DrawNoise | None) -> _BestOfBlocks:
    n, vocab_size = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    block = min(_BLOCK, power_of_two(vocab_size, least=16))
    pieces = blocks(vocab_size, block)
    found = _BestOfBlocks(
        torch.empty(n, pieces, k, dtype=torch.float32, device=logits.device),
        torch.empty(n, pieces, k, dtype=torch.int32, device=logits.device),
        torch.empty(n, pieces, 2, dtype=torch.float32, device=logits.device),
    )
    keyed = (None, None, None) if noise is None else tuple(part.contiguous() for part in noise[:3])
    _block_kernel[n, pieces](
        *(logits, *keyed, None if ids is None else ids.contiguous(), *found),
        *(vocab_size, logits.stride(0), k, 1 if noise is None else n // len(noise.keys)),
        0 if noise is None else noise.ahead,
        BLOCK=block,
    )
    return found


@topk_logprobs.on("triton", when=lambda logits, k, *_, **__: k <= MAX_TOPK)
def _launch_topk(
    logits: Tensor, k: int, ids: Tensor | None = None, noise: DrawNoise | None = None
) -> tuple[Tensor, Tensor]:
    n, found = len(logits), _launch_blocks(logits, k, ids, noise)
    logp = torch.empty(n, k, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(n, k, dtype=torch.int64, device=logits.device)
    _merge(found, Children(tokens[:, None], logp[:, None], logp[:, None]), logits.shape[1], ids)
    return logp, tokens


@score_children.on("triton", when=lambda logits, above, out, *_, **__: out.tokens.shape[2] <= MAX_TOPK)
def _launch_children(
    logits: Tensor,
    above: Tensor,
    out: Children,
    ids: Tensor | None = None,
    noise: DrawNoise | None = None,
    correction: Correction | None = None,
) -> Children:
    found = _launch_blocks(logits, out.tokens.shape[2], ids, noise)
    _merge(found, out, logits.shape[1], ids, above.contiguous(), correction)
    return out


def _merge(
    found: _BestOfBlocks,
    out: Children,
    vocab_size: int,
    ids: Tensor | None,
    above: Tensor | None = None,
    correction: Correction | None = None,
) -> None:
    """Without `above` there are no scores."""
    rows, pieces, k = found.values.shape
    nodes = out.tokens.shape[1]
    assert all(part.stride()[1:] == (k, 1) or part.shape[1] == 1 for part in out)
    corrected: tuple[Tensor | int | float | None, ...] = (None, None, None, 0, 0, 0, 0.0)
    if correction is not None:
        ratios, edges, temperature_bin, depth, most = correction
        corrected = (ratios, edges, temperature_bin.contiguous(), ratios.shape[1], ratios.shape[3], depth, most)
    _merge_kernel[rows,](
        *(*found, out.tokens, out.scores if above is not None else None, out.guesses),
        *(None if ids is None else ids.contiguous(), above, *corrected),
        *(vocab_size, pieces, k, nodes, out.tokens.stride(0)),
        PIECES=power_of_two(pieces),
        CANDIDATES=power_of_two(pieces * k),
        BEST=power_of_two(k),
    )


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


@jit(varying=("tokens", "scores", "guesses", "above", "temperature_bin", "depth", "nodes", "stride"))
def _merge_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    values,
    candidates,
    mass,
    tokens,
    scores,
    guesses,
    ids,
    above,
    ratios,
    edges,
    temperature_bin,
    depths,
    bins,
    depth,
    most,
    vocab_size,
    pieces,
    k,
    nodes,
    stride,
    PIECES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BEST: tl.constexpr,
):
    """The k best over all blocks of a row, minus the logarithm of the blocks' total mass.

    Without `ids` (None) tokens are the draft's, without `above` there are no scores, without `ratios` no corrections.
    `stride`: of requests in the results.
    """
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
    rank = tl.arange(0, BEST)
    found = tl.full([BEST], 0.0, tl.float32)
    found_token = tl.zeros([BEST], tl.int32)
    for j in range(k):
        best = tl.max(tl.where(alive, value, float("-inf")), 0)
        chosen = tl.min(tl.where(alive & (value == best), token, vocab_size), 0)
        alive = alive & (token != chosen)
        found = tl.where(rank == j, best, found)
        found_token = tl.where(rank == j, chosen, found_token)
    is_best = rank < k
    guess = found - logsumexp
    target_token = found_token.to(tl.int64)
    if ids is not None:
        target_token = tl.load(ids + found_token, mask=is_best, other=0)
    request = row // nodes
    place = request * stride + row % nodes * k + rank
    tl.store(tokens + place, target_token, mask=is_best)
    tl.store(guesses + place, guess, mask=is_best)
    if above is not None:
        chance = guess
        if ratios is not None:
            number = tl.where(rank > 0, bins, 0)
            for edge in range(bins - 1):
                number += (guess > tl.load(edges + edge)).to(tl.int32)
            first = (tl.load(temperature_bin + request) * depths + depth) * 2 * bins
            chance = guess + tl.load(ratios + first + number, mask=is_best, other=0.0)
            chance = tl.where(chance > most, most, chance)
        tl.store(scores + place, tl.load(above + row) + chance, mask=is_best)
