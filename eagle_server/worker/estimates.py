"""Estimated acceptance: the chance of each drafted node, calibrated by what was accepted before.

A drafter's score is its own guess of the chance. How good the guess is depends on the depth and on whether the request
is sampled, and it changes with the text. So guesses are corrected by counts of what was accepted. The counts are the
server's: which nodes are verified depends on earlier requests, but no text does, because no draw depends on a tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle_server.ops.upload import upload
from eagle_server.speculation.tree import EagleVerifyInput

_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96)
_BINS = len(_EDGES) + 1
_DEPTHS = 8  # deeper nodes count as this deep
_PRIOR = 4.0  # prior pseudo-count of a bin, in expected acceptances
_MEMORY = 400.0  # expected acceptances in a bin after which older ones count half
_LEAST, _MOST = 1e-4, 0.995  # chances stay below 1, so that a child never outranks its parent


@dataclass(frozen=True)
class Estimates:
    """The estimates of one batch of trees, without the root: guesses and corrected chances.

    `bins` int64 [bs, n]; `guesses` float32 [bs, n], the drafter's, given that the parent is accepted; `path_logp`
    float32 [bs, n], log of the corrected chance of the whole path, -inf for padding; `depths` int64 [bs, n].
    """

    bins: Tensor
    guesses: Tensor
    path_logp: Tensor
    depths: Tensor


class AcceptanceEstimates:
    """Corrected chance = guess * (accepted nodes / expected nodes) of the guess's bin.

    A bin is (greedy or sampled, depth, guess). Bins with few counts take the ratio of all depths together.
    """

    def __init__(self, device: torch.device) -> None:
        self._edges = torch.tensor(_EDGES, device=device)
        self._accepted = np.zeros((2, _DEPTHS, _BINS))
        self._expected = np.zeros((2, _DEPTHS, _BINS))
        self._ratios = torch.ones(2 * _DEPTHS * _BINS, device=device)  # captured graphs read it, so it stays in place

    def corrected(self, logp: Tensor, sampled: Tensor, level: int) -> Tensor:
        """Corrected log chances of the children of a level's nodes, given that these are accepted.

        Args:
            logp: float32 [bs * nodes, k], the drafter's guesses. -inf stays.
            sampled: int64 [bs], 1 for requests with temperature > 0.
            level: 0 for the children of the root.
        """
        guesses = logp.exp()
        depths = min(level, _DEPTHS - 1) + _DEPTHS * sampled.repeat_interleave(len(logp) // len(sampled))
        _, chances = self._chances(guesses, depths[:, None])
        return chances.log_().masked_fill_(logp.isneginf(), float("-inf"))

    def of(self, tree: EagleVerifyInput, guesses: Tensor | None, sampled: Tensor) -> Estimates:
        """The estimates of trees with scores.

        Args:
            guesses: float32 [bs, n], logarithms, if the scores are corrected already; None: as the scores say.
            sampled: int64 [bs], 1 for requests with temperature > 0.
        """
        assert tree.scores is not None, "a budget needs the drafter's scores"
        depths = tree.depths[:, 1:]
        of_bins = depths.clamp(max=_DEPTHS) - 1 + _DEPTHS * sampled[:, None]
        if guesses is None:
            scores, parents = tree.scores, tree.parents[:, 1:]
            above = torch.cat([torch.zeros_like(scores[:, :1]), scores], dim=1).gather(1, parents)
            own = (scores - above).exp().nan_to_num_(nan=0.0).clamp_(max=1.0)
            bins, chances = self._chances(own, of_bins)
            path_logp = (tree.custom_mask[:, 1:, 1:] * chances.log_()[:, None]).sum(-1)
        else:
            own, path_logp = guesses.exp(), tree.scores
            bins = self._bins(own, of_bins)
        padding = tree.draft_token.view_as(tree.parents)[:, 1:] < 0
        return Estimates(bins, own, path_logp.masked_fill(padding, float("-inf")), depths)

    def _bins(self, guesses: Tensor, depths: Tensor) -> Tensor:
        return torch.bucketize(guesses, self._edges) + _BINS * depths

    def _chances(self, guesses: Tensor, depths: Tensor) -> tuple[Tensor, Tensor]:
        """Bins of guesses, and corrected chances. `depths` of sampled requests count on after those of greedy ones."""
        bins = self._bins(guesses, depths)
        ratios = self._ratios.index_select(0, bins.view(-1)).view_as(guesses)
        return bins, (guesses * ratios).clamp_(_LEAST, _MOST)

    def observe(self, bins: NDArray[np.int64], guesses: NDArray[np.float32], accepted: NDArray[np.bool_]) -> None:
        """Nodes whose parents were accepted: their bins, guesses, and whether they were accepted, [nodes] each."""
        if not len(bins):
            return
        np.add.at(self._accepted.reshape(-1), bins, accepted)
        np.add.at(self._expected.reshape(-1), bins, guesses)
        full = self._expected > _MEMORY
        self._accepted[full] /= 2
        self._expected[full] /= 2
        whole = [np.sum(counts, axis=1, keepdims=True) for counts in (self._accepted, self._expected)]
        prior = (whole[0] + _PRIOR) / (whole[1] + _PRIOR)
        ratios = (self._accepted + _PRIOR * prior) / (self._expected + _PRIOR)
        self._ratios.copy_(upload(ratios.reshape(-1), self._ratios.device, torch.float32), non_blocking=True)
