"""Draw the target's token at each row: one function for plain decoding, prefill and verification.

Order: the `transforms` of logits, temperature, top-k, top-p on the renormalized remainder, min_p. Then
y = argmax(logits / T + Gumbel(key, position)), which is a draw from the softmax of the transformed logits. At T = 0 it
is the plain argmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from eagle_server.ops.device import upload
from eagle_server.ops.sampling.draw import draw_tokens
from eagle_server.ops.sampling.truncate import NO_TOP_K, truncate_rows
from eagle_server.plan import TEMPERATURE_EDGES, RequestSampling
from eagle_server.speculation.transforms import PenalizerState, Rows, Transform, transforms_of
from eagle_server.speculation.tree import Tree


@dataclass(frozen=True)
class SamplingBatch:
    """Sampling settings of `bs` requests. Index tensors select the requests that need a step; None: no request does."""

    all_keys: Tensor  # int64 [bs]
    all_temperature: Tensor  # float32 [bs], 0: greedy
    stochastic: Tensor | None  # int64 [s], requests with temperature > 0
    truncated: Tensor | None  # int64 [t], stochastic requests with top-k or top-p
    floored: Tensor | None  # int64 [m], stochastic requests with min_p
    limits: Tensor  # float32 [3, bs], see `truncate_rows`
    transforms: tuple[Transform, ...]
    penalizer_state: PenalizerState = PenalizerState()  # at the start of the cycle

    @cached_property
    def temperature_bin(self) -> Tensor:
        """int64 [bs], see `RequestSampling.temperature_bin`."""
        return sum((self.all_temperature >= edge).long() for edge in TEMPERATURE_EDGES)  # type: ignore[return-value]

    @property
    def edits_logits(self) -> bool:
        """Whether transforms or truncation (top-k, top-p, min_p) change logits before the noise is added."""
        return bool(self.transforms) or self.truncated is not None or self.floored is not None

    @classmethod
    def of(cls, settings: Sequence[RequestSampling], device: torch.device, steps: int = 0) -> SamplingBatch:
        """`steps`: the depth of the trees whose rows are drawn; 0: there are only roots."""
        params = [s.params for s in settings]
        stochastic = [i for i, p in enumerate(params) if p.temperature > 0]
        limits = [[p.top_k or NO_TOP_K for p in params], [p.top_p for p in params], [p.min_p for p in params]]
        return cls(
            all_keys=upload([s.key for s in settings], device),
            all_temperature=upload([p.temperature for p in params], device, torch.float32),
            stochastic=_indices(stochastic, device),
            truncated=_indices([i for i in stochastic if params[i].top_k > 0 or params[i].top_p < 1], device),
            floored=_indices([i for i in stochastic if params[i].min_p > 0], device),
            limits=upload(limits, device, torch.float32),
            transforms=transforms_of(settings, device, steps),
        )


def draw(logits: Tensor, positions: Tensor, sampling: SamplingBatch, tree: Tree | None = None) -> tuple[Tensor, Tensor]:
    """One token per row, and its score. The score is not finite if the row has NaN or inf, or allows no token.

    Args:
        logits: float32 or bfloat16 [bs, rows, vocab]. They are not modified, because log-probabilities are read from
            them later. What edits them gives float32.
        positions: int64 [bs, rows], the sequence position of each row's draw. The noise depends on it, so rows with the
            same position in the same request get the same noise.
        tree: the tree whose nodes the rows are. None if there is one row.

    Returns:
        tokens int64 [bs, rows] and scores float32 [bs, rows].
    """
    logits = _truncated(transformed(logits, positions, sampling, tree), sampling).flatten(0, 1)
    tokens, scores = draw_tokens(logits, sampling.all_keys, positions.flatten(), sampling.all_temperature)
    return tokens.view_as(positions), scores.view_as(positions)


def draw_rows(logits: Tensor, positions: Tensor, rows: Tensor, sampling: SamplingBatch) -> tuple[Tensor, Tensor]:
    """`draw` for some of a batch's rows, without transforms and truncation: see `SamplingBatch.edits_logits`.

    Args:
        logits: float32 or bfloat16 [n, vocab].
        positions: int64 [bs, rows of a request], of all rows of the batch.
        rows: int64 [n], the places of the rows of `logits` among the bs * rows of the batch.

    Returns:
        tokens int64 [n] and scores float32 [n].
    """
    requests = torch.div(rows, positions.shape[1], rounding_mode="floor")
    keys, temperature = sampling.all_keys[requests], sampling.all_temperature[requests]
    return draw_tokens(logits, keys, positions.take(rows), temperature)


def sampling_probs(logits: Tensor, positions: Tensor, sampling: SamplingBatch, tree: Tree | None = None) -> Tensor:
    """The probabilities [s, rows, vocab] that `draw` samples from, after all transforms, for the stochastic requests.

    Arguments: see `draw`. At least one request must be stochastic.
    """
    assert sampling.stochastic is not None
    kept = _truncated(transformed(logits, positions, sampling, tree), sampling).float()
    temperature = sampling.all_temperature.index_select(0, sampling.stochastic)
    return (kept.index_select(0, sampling.stochastic) / temperature[:, None, None]).softmax(-1)


def transformed(logits: Tensor, positions: Tensor, sampling: SamplingBatch, tree: Tree | None = None) -> Tensor:
    """The logits after all transforms that come before temperature. The same tensor if no request has any.

    Arguments: see `draw`.
    """
    if not sampling.transforms:
        return logits
    logits, rows = logits.to(torch.float32, copy=True), Rows(positions, tree, sampling.penalizer_state)
    for transform in sampling.transforms:
        transform.apply(logits, rows)
    return logits


def _truncated(logits: Tensor, sampling: SamplingBatch) -> Tensor:
    """The logits with -inf for tokens that top-k, top-p or min_p remove."""
    if sampling.truncated is None and sampling.floored is None:
        return logits
    return truncate_rows(logits, sampling.all_temperature, sampling.limits, sampling.truncated, sampling.floored)


def typical_threshold(probability: Tensor, posterior_threshold: float, posterior_alpha: float) -> Tensor:
    """min(posterior_threshold, posterior_alpha * exp(-H(p))), [..], from probabilities [.., V]."""
    entropy = -(probability * (probability + 1e-5).log()).sum(-1)
    return (posterior_alpha * (-entropy).exp()).clamp(max=posterior_threshold)


def _indices(values: list[int], device: torch.device) -> Tensor | None:
    return upload(values, device) if values else None
