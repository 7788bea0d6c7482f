"""Medusa's typical acceptance: a draft is accepted if the target finds it likely enough. LOSSY above temperature 0.

This is the only rule that changes the distribution of the output; `accept.Lossless` is the default. It works with the
trees of every drafter.

Source: Medusa (arXiv 2401.10774), section 2.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from eagle_server.ops.tree.accept import path_to
from eagle_server.speculation.accept import Accepted, drafted_of, draw_nodes, padded_logits
from eagle_server.speculation.sampling import SamplingBatch, sampling_probs, typical_threshold
from eagle_server.speculation.tree import Tree

_ROWS = 64  # rows of probabilities at a time, because the entropy takes two copies of them


@dataclass(frozen=True)
class Typical:
    """A child is acceptable if p(child) > min(posterior_threshold, posterior_alpha * exp(-H(p))).

    p is the target's distribution at the parent, after all transforms. The longest acceptable path is accepted; if
    there are several, the most probable of them. The bonus is a draw from the target at the path's last node. Requests
    with temperature 0 are lossless.
    """

    posterior_threshold: float
    posterior_alpha: float
    lossy: ClassVar[str] = "typical"

    def accept(self, tree: Tree, target_logits: Tensor, sampling: SamplingBatch) -> Accepted:
        """As `Lossless.accept`, except that `tokens` are the path's drafted tokens, then one drawn bonus."""
        drawn, scores = draw_nodes(tree, target_logits, sampling)
        tokens, parents = tree.tokens, tree.parents[:, 1:]
        agrees = tokens[:, 1:] == drawn.gather(1, parents)  # [bs, D - 1], the rule of greedy requests
        logp = torch.zeros_like(agrees, dtype=torch.float32)
        if sampling.stochastic is not None:
            some = sampling.stochastic
            p = sampling_probs(padded_logits(tree, target_logits), tree.positions + 1, sampling, drafted_of(tree))
            likely = self._likely(p, tokens[some], parents[some])
            agrees, logp = (old.index_copy(0, some, new) for old, new in zip((agrees, logp), likely, strict=True))
        last = _best_end(tree, agrees, logp)
        path, on_path = path_to(last, tree.depths, tree.mask, tree.steps)
        following = torch.cat([path[:, 1:], torch.full_like(path[:, :1], -1)], dim=1)
        drafts, draws = tokens.gather(1, following.clamp(min=0)), drawn.gather(1, path.clamp(min=0))
        emitted = torch.where(path < 0, -1, torch.where(following < 0, draws, drafts))
        finite = (scores.isfinite() | ~on_path).all(dim=1)
        return Accepted(path, (path >= 0).sum(1) - 1, emitted, (tokens >= 0).sum(1) - 1, finite, scores)

    def _likely(self, probability: Tensor, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        """Whether drafted nodes [s, D - 1] are acceptable, and their log-probabilities at their parents.

        probability [s, D, V], tokens [s, D], parents [s, D - 1]. Tokens that the transforms exclude have probability 0,
        so they are never above the threshold.
        """
        drafts = tokens[:, 1:]
        places = parents * probability.shape[2] + drafts.clamp(min=0)
        p = probability.flatten(1).gather(1, places)
        rows = probability.flatten(0, 1).split(_ROWS)
        thresholds = [typical_threshold(row, self.posterior_threshold, self.posterior_alpha) for row in rows]
        needed = torch.cat(thresholds).view(tokens.shape).gather(1, parents)
        return (p > needed) & (drafts >= 0), p.log()


def _best_end(tree: Tree, agrees: Tensor, logp: Tensor) -> Tensor:
    """The last node int64 [bs] of the longest path of acceptable nodes; of several, the most probable one."""
    above = tree.mask[:, :, 1:]  # [bs, D, D - 1]
    reached = ~(above & ~agrees[:, None]).any(dim=2)
    depth = tree.depths.masked_fill(~reached, -1)
    likelihood = torch.where(above, logp[:, None], 0.0).sum(2)
    longest = depth == depth.amax(dim=1, keepdim=True)
    return likelihood.masked_fill(~longest, float("-inf")).argmax(dim=1)
