"""The target's own draw at each row: one function for plain decoding, prefill and verification.

Order: the `transforms` of logits, temperature, top-k, top-p on the renormalized remainder, min_p. Then
y = argmax(logits / T + Gumbel(key, position)), which is a draw from the transformed softmax; plain argmax at T = 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagle_server.ops.draw import draw_tokens
from eagle_server.ops.gumbel import gumbel
from eagle_server.ops.triton_support import on_gpu
from eagle_server.ops.upload import upload
from eagle_server.plan import RequestSampling
from eagle_server.speculation.transforms import Paths, PenalizerState, Rows, Transform, transforms_of

_SORTED_ROWS = 64  # of logits at a time, on a GPU: some 56 bytes for each of their tokens


@dataclass(frozen=True)
class SamplingBatch:
    """Sampling settings of `bs` requests. Index tensors select the requests that need a step; None where none does."""

    all_keys: Tensor  # int64 [bs]
    all_temperature: Tensor  # float32 [bs], 0: greedy
    stochastic: Tensor | None  # int64 [s], requests with temperature > 0
    keys: Tensor  # int64 [s]
    temperature: Tensor  # float32 [s]
    truncated: Tensor | None  # int64 [t], indices into the s stochastic ones with top-k or top-p on
    top_k: Tensor  # int64 [t], beyond any vocabulary where off
    top_p: Tensor  # float32 [t]
    floored: Tensor | None  # int64 [m], indices into the s stochastic ones with min_p on
    min_p: Tensor  # float32 [m]
    transforms: tuple[Transform, ...]
    penalizer_state: PenalizerState = field(default_factory=PenalizerState)  # of the texts at this cycle's start

    @classmethod
    def of(cls, settings: Sequence[RequestSampling], device: torch.device) -> SamplingBatch:
        params = [s.params for s in settings]
        stochastic = [i for i, p in enumerate(params) if p.temperature > 0]
        truncated = [n for n, i in enumerate(stochastic) if params[i].top_k > 0 or params[i].top_p < 1]
        limits = [params[stochastic[n]] for n in truncated]
        floored = [n for n, i in enumerate(stochastic) if params[i].min_p > 0]
        return cls(
            all_keys=upload([s.key for s in settings], device),
            all_temperature=upload([p.temperature for p in params], device, torch.float32),
            stochastic=_indices(stochastic, device),
            keys=upload([settings[i].key for i in stochastic], device),
            temperature=upload([params[i].temperature for i in stochastic], device, torch.float32),
            truncated=_indices(truncated, device),
            top_k=upload([p.top_k or 1 << 40 for p in limits], device),
            top_p=upload([p.top_p for p in limits], device, torch.float32),
            floored=_indices(floored, device),
            min_p=upload([params[stochastic[n]].min_p for n in floored], device, torch.float32),
            transforms=transforms_of(settings, device),
        )


def draw(
    logits: Tensor, positions: Tensor, sampling: SamplingBatch, span: int = 1, paths: Paths | None = None
) -> tuple[Tensor, Tensor]:
    """One token per row, and its score (not finite where the row's logits hold NaN or inf, or allow no token).

    Args:
        logits: float32 [bs, rows, vocab]. They stay raw: log-probabilities are read from them.
        positions: int64 [bs, rows], the sequence position that each row's draw fills. It keys the noise, so rows that
            fill the same position of the same request see the same noise. Row 0 fills the first position.
        span: how many distinct positions a request's rows fill at most (a tree's depth + 1).
        paths: the tokens between the committed text and each row, where there is more than one row.

    Returns:
        tokens int64 [bs, rows] and scores float32 [bs, rows].
    """
    logits = transformed(logits, positions, sampling, paths)
    if on_gpu(logits):
        return _draw_fused(_truncated(logits, sampling), positions, sampling)
    scores, drawn = logits.max(dim=-1)
    if sampling.stochastic is None:
        return drawn, scores
    chosen = logits.index_select(0, sampling.stochastic) / sampling.temperature[:, None, None]
    if sampling.truncated is not None:
        kept = truncate(chosen.index_select(0, sampling.truncated), sampling.top_k, sampling.top_p)
        chosen.index_copy_(0, sampling.truncated, kept)
    if sampling.floored is not None:
        kept = above_min_p(chosen.index_select(0, sampling.floored), sampling.min_p)
        chosen.index_copy_(0, sampling.floored, kept)
    where = positions.index_select(0, sampling.stochastic)
    best, tokens_drawn = chosen.add_(_noise(sampling.keys, where, logits.shape[-1], span)).max(dim=-1)
    return drawn.index_copy(0, sampling.stochastic, tokens_drawn), scores.index_copy(0, sampling.stochastic, best)


def sampling_probs(logits: Tensor, positions: Tensor, sampling: SamplingBatch, paths: Paths | None = None) -> Tensor:
    """The distribution that `draw` draws from, after all transforms: probabilities [s, rows, vocab] of the stochastic
    requests.

    Arguments as in `draw`; at least one request is stochastic.
    """
    assert sampling.stochastic is not None
    kept = _truncated(transformed(logits, positions, sampling, paths), sampling)
    return (kept.index_select(0, sampling.stochastic) / sampling.temperature[:, None, None]).softmax(-1)


def transformed(logits: Tensor, positions: Tensor, sampling: SamplingBatch, paths: Paths | None = None) -> Tensor:
    """The logits after all that precedes the temperature: the same tensor where no request asks for anything.

    Arguments as `draw`'s.
    """
    if not sampling.transforms:
        return logits
    logits, rows = logits.clone(), Rows(positions, paths, sampling.penalizer_state)
    for transform in sampling.transforms:
        transform.apply(logits, rows)
    return logits


def _truncated(logits: Tensor, sampling: SamplingBatch) -> Tensor:
    """The logits with -inf where top-k, top-p or min_p leave a token out."""
    if sampling.truncated is None and sampling.floored is None:
        return logits
    logits = logits.clone()
    if sampling.truncated is not None:
        _drop(logits, sampling, sampling.truncated, truncate, sampling.top_k, sampling.top_p)
    if sampling.floored is not None:
        _drop(logits, sampling, sampling.floored, above_min_p, sampling.min_p)
    return logits


def _drop(
    logits: Tensor, sampling: SamplingBatch, chosen: Tensor, kept: Callable[..., Tensor], *limits: Tensor
) -> None:
    """-inf in place where `kept` leaves a token of the `chosen` stochastic requests out.

    A few requests at a time: sorting takes memory.
    """
    assert sampling.stochastic is not None
    requests = sampling.stochastic.index_select(0, chosen)
    temperature = sampling.temperature.index_select(0, chosen)[:, None, None]
    step = max(1, _SORTED_ROWS // logits.shape[1])
    for some, t, *own in zip(*(x.split(step) for x in (requests, temperature, *limits)), strict=True):
        rows = logits.index_select(0, some)
        dropped = kept(rows / t, *own) == float("-inf")
        logits.index_copy_(0, some, rows.masked_fill_(dropped, float("-inf")))


def _draw_fused(logits: Tensor, positions: Tensor, sampling: SamplingBatch) -> tuple[Tensor, Tensor]:
    """`draw` for all requests' rows alike, by the kernel that makes the noise as it goes."""
    rows = positions.shape[1]
    keys = sampling.all_keys.repeat_interleave(rows)
    temperature = sampling.all_temperature.repeat_interleave(rows)
    tokens, scores = draw_tokens(logits.flatten(0, 1), keys, positions.flatten(), temperature)
    return tokens.view_as(positions), scores.view_as(positions)


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """-inf outside the top-k, then outside the smallest set whose renormalized mass reaches top_p.

    logits [n, rows, vocab], already divided by the temperature; ties go to the smaller token id.
    """
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered.masked_fill(rank >= top_k[:, None, None], float("-inf"))
    probs = ordered.softmax(-1)
    mass_before = probs.cumsum(-1) - probs
    dropped = (mass_before >= top_p[:, None, None]) & (rank > 0)
    return torch.empty_like(logits).scatter_(-1, tokens, ordered.masked_fill(dropped, float("-inf")))


def above_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """-inf where a token has less than min_p [n] times the best one's probability; as `truncate` else."""
    least = logits.amax(dim=-1, keepdim=True) + min_p.log()[:, None, None]
    return logits.masked_fill(logits < least, float("-inf"))


def typical_threshold(probability: Tensor, posterior_threshold: float, posterior_alpha: float) -> Tensor:
    """min(eps, alpha * exp(-H(p))), [..] of distributions [.., V]."""
    entropy = -(probability * (probability + 1e-5).log()).sum(-1)
    return (posterior_alpha * (-entropy).exp()).clamp(max=posterior_threshold)


def _noise(keys: Tensor, positions: Tensor, vocab_size: int, span: int) -> Tensor:
    """Noise [n, rows, vocab]. Rows of one request fill at most `span` positions from its first, each drawn once."""
    n, rows = positions.shape
    base = positions[:, :1]
    distinct = base + torch.arange(span, device=base.device)  # [n, span]
    noise = gumbel(keys.repeat_interleave(span), distinct.view(-1), vocab_size)
    if rows == span == 1:
        return noise.view(n, 1, vocab_size)
    place = positions - base + torch.arange(0, n * span, span, device=base.device)[:, None]
    return noise.index_select(0, place.view(-1)).view(n, rows, vocab_size)


def _indices(values: list[int], device: torch.device) -> Tensor | None:
    return upload(values, device) if values else None
