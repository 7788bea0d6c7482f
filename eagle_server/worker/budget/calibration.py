"""Calibration of acceptance estimates: how often nodes were accepted, by what their drafters estimated. On the
device."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_server.speculation.accept import Accepted
from eagle_server.speculation.merge import REFUSED, UNASKED
from eagle_server.speculation.tree import Tree

_EDGES = (UNASKED / 2, REFUSED, 0.1, 0.3, 0.6, 0.9)  # bins of a source: unasked, refused, then by its estimate
_DEPTHS = 3  # 1, 2, deeper
_PRIOR_COUNT = 4.0  # prior pseudo-count, in accepted nodes
_DECAY = 0.998  # per cycle, of past counts
_LEAST, _MOST = 1e-4, 0.98  # chances stay below 1, so that a child never outranks its parent


class Calibration:
    """Chance of acceptance = estimate * (accepted nodes / expected nodes) of the estimate's bin.

    A bin is the two sources' estimates and the depth. So trees depend on what the server saw before. Texts do not,
    because no sampled token depends on a tree.
    """

    def __init__(self, device: torch.device) -> None:
        self._edges = torch.tensor(_EDGES, device=device)
        bins = _DEPTHS * (len(_EDGES) + 1) ** 2
        self.accepted = torch.zeros(bins, device=device)
        self.expected = torch.zeros(bins, device=device)

    def chances(self, estimates: Tensor, depths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Chances float32 [bs, M] given an accepted parent, and their bins int64 and uncalibrated priors float32.

        estimates float32 [2, bs, M] are those of two sources, as of `join_trees`. depths int64 [bs, M].
        """
        first, second = estimates.clamp(min=0.0)
        # If both propose a node, both are wrong at most half as often as one alone.
        agreed = torch.maximum(first, second)
        agreed = agreed + (1 - agreed) * torch.minimum(first, second) / 2
        contested = (estimates == REFUSED).any(0)
        prior = torch.where(contested, agreed / 2, agreed).clamp(_LEAST, _MOST)
        source_bins = torch.bucketize(estimates, self._edges)
        width = len(_EDGES) + 1
        bins = ((depths.clamp(max=_DEPTHS) - 1) * width + source_bins[0]) * width + source_bins[1]
        ratio = (self.accepted + _PRIOR_COUNT) / (self.expected + _PRIOR_COUNT)
        corrected = prior * ratio.index_select(0, bins.view(-1)).view_as(prior)
        return corrected.clamp(_LEAST, _MOST), bins, prior

    def observe(self, bins: Tensor, priors: Tensor, tree: Tree, accepted: Accepted, count: int) -> None:
        """Count the drafted nodes of the first `count` requests, and which were accepted.

        bins and priors [bs, nodes] are in the order of the proposal.
        """
        if tree.proposed is not None:
            bins, priors = bins.gather(1, tree.proposed), priors.gather(1, tree.proposed)
        path, parents = accepted.path[:count], tree.parents[:count]
        size = parents.shape[1]
        place = torch.where(path < 0, size, path)
        on_path = torch.zeros(count, size + 1, device=path.device).scatter(1, place, 1.0)[:, :size]
        drafted = tree.tokens[:count, 1:] >= 0
        tried = (on_path.gather(1, parents[:, 1:]) * drafted).reshape(-1)
        bins = bins[:count].reshape(-1)
        self.accepted.mul_(_DECAY).index_add_(0, bins, on_path[:, 1:].reshape(-1) * tried)
        self.expected.mul_(_DECAY).index_add_(0, bins, priors[:count].reshape(-1) * tried)
