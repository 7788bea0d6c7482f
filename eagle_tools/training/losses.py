"""Losses of draft heads, and what they predict about acceptance.

p is the target's distribution of a token and q the draft's, both at one temperature. p may be restricted to a draft
vocabulary: its mass outside is not rescaled, so it counts as lost. A = sum min(p, q) = 1 - TV(p, q) is the overlap.

    kl       -sum p log q                   the cross-entropy: KL(p, q) plus a constant
    tv       1 - A                          the total variation distance
    kl+tv    w * kl + (1 - w) * tv, w = exp(-3 A) without gradient, A the (weighted) mean over rows
    coupled  P(the draft's best k tokens miss y), y from p, ranked with the noise of the draw y; mean over k = 1..4
    dspark   0.1 * kl + 1.8 * tv            DSpark's 0.1 CE + 0.9 |p - q|, with p in the place of the token that came

kl+tv is the hybrid LK loss (arXiv 2602.23881): it starts as kl, because the gradient of tv is small where q is far from
p. tv is about one draft token, and neglects the tail of q; coupled is about the children of a tree's node. It draws one
y per row. See `coupled_acceptance`; with a = P of that, the chance that k tokens miss y is (1 - a)^k, if the many
tokens that may come before y are taken as a Poisson process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from eagle_tools.training.recipes import LossName

_HYBRID_DECAY = 3.0
_CHILDREN = 4
_GOLDEN = 0.6180339887498949


def draft_loss(name: LossName, probs: Tensor, logits: Tensor, weights: Tensor | None = None) -> Tensor:
    """The mean loss over rows of the draft's `logits` [.., Vd] against the target's `probs` [.., Vd]; a scalar.

    probs: float32, the target's probabilities of the draft vocabulary. They sum to 1, or less if it is reduced.
    weights: of the rows, [..]; None: all are equal.
    """
    values = row_losses(name, probs, logits)
    return combined_loss(name, torch.stack([weighted_mean(term, weights) for term in values.unbind(-1)]))


def row_losses(name: LossName, probs: Tensor, logits: Tensor, places: Tensor | None = None) -> Tensor:
    """The terms of a loss for each row, [.., terms], of which `combined_loss` takes the means.

    places: the number of each row, int64 [..], by which `coupled` draws; None: they are counted here.
    """
    logp = logits.log_softmax(-1)
    if name == "coupled":
        return _coupled(probs, logp, places)[..., None]
    return torch.stack([term(probs, logp) for term in _TERMS[name]], dim=-1)


def combined_loss(name: LossName, means: Tensor) -> Tensor:
    """The loss, a scalar, of the means [terms] of `row_losses`."""
    if name == "kl+tv":
        weight = torch.exp(_HYBRID_DECAY * (means[1].detach() - 1))
        return weight * means[0] + (1 - weight) * means[1]
    if name == "dspark":
        return 0.1 * means[0] + 1.8 * means[1]
    return means[0]


def weighted_mean(values: Tensor, weights: Tensor | None) -> Tensor:
    """The mean of values [..] with weights [..]; None: all are equal."""
    return values.mean() if weights is None else (values * weights).sum() / weights.sum()


def overlap(probs: Tensor, draft: Tensor) -> Tensor:
    """sum of min(p, q) over the last dimension: 1 - TV(p, q), also where `probs` lacks mass outside the vocabulary."""
    return torch.minimum(probs, draft).sum(-1)


def coupled_acceptance(probs: Tensor, draft: Tensor, drawn: Tensor) -> Tensor:
    """P(the draft is y | the target draws y), if both are the argmax of log-probabilities + the same Gumbel noise.

    With E(v) independent Exp(1), y = argmin E(v) / p(v) and the draft is argmin E(v) / q(v), over one E. Given y, its
    E(y) / p(y) is Exp(1), and each other E(v) exceeds p(v) E(y) / p(y) by a new Exp(1). So

        P = 1 / (1 + sum over v of max(0, q(v) p(y) / q(y) - p(v))),

    and its mean over y from p is at least (1 - TV) / (1 + TV) (Daliri, Musco, Suresh 2024, arXiv 2408.07978).

    Args:
        probs, draft: p and q, float32 [.., Vd].
        drawn: y as an index of the draft vocabulary, int64 [..]. Vd stands for any token outside; P is 0 there.

    Returns:
        float32 [..]
    """
    outside = drawn == probs.shape[-1]
    place = drawn.masked_fill(outside, 0)[..., None]
    odds = probs.gather(-1, place) / draft.gather(-1, place).clamp_min(1e-8)  # gradients stay finite
    excess = torch.relu(draft * odds - probs).sum(-1)
    return (1 / (1 + excess)).masked_fill(outside, 0.0)


def _cross_entropy(probs: Tensor, logp: Tensor) -> Tensor:
    return -(probs * logp).sum(-1)


def _total_variation(probs: Tensor, logp: Tensor) -> Tensor:
    return 1 - overlap(probs, logp.exp())


def _coupled(probs: Tensor, logp: Tensor, places: Tensor | None) -> Tensor:
    missed = 1 - coupled_acceptance(probs, logp.exp(), spread_draws(probs, places))
    return torch.stack([missed**children for children in range(1, _CHILDREN + 1)]).mean(0)


def spread_draws(probs: Tensor, places: Tensor | None = None) -> Tensor:
    """One draw from `probs` [.., Vd] per row, by evenly spread quantiles: int64 [..], Vd for the mass outside.

    Row i, or the row with place i, has the quantile i * 0.618.. mod 1. No random state is needed, so a resumed training
    draws the same.
    """
    if places is None:
        places = torch.arange(probs.shape[:-1].numel(), device=probs.device)
    quantiles = (places.double() * _GOLDEN) % 1.0
    reached = probs.cumsum(-1) <= quantiles.float().view(*probs.shape[:-1], 1)
    return reached.sum(-1)


_TERMS: Mapping[LossName, tuple[Callable[[Tensor, Tensor], Tensor], ...]] = {
    "kl": (_cross_entropy,),
    "tv": (_total_variation,),
    "kl+tv": (_cross_entropy, _total_variation),
    "dspark": (_cross_entropy, _total_variation),
}
