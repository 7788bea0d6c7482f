"""Estimated acceptance: the chance of each drafted node, calibrated by what was accepted before.

A drafter's score is its own guess of the chance. How good the guess is depends on the depth and on the request's
temperature, and it changes with the text. So guesses are corrected by counts of what was accepted. The counts are the
server's: which nodes are verified depends on earlier requests, but no text does, because no draw depends on a tree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle_server.ops.correction import correct_guesses
from eagle_server.ops.native_drafting import Correction
from eagle_server.ops.upload import upload
from eagle_server.plan import TEMPERATURE_BINS
from eagle_server.speculation.tree import Tree

_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96)
_BINS = len(_EDGES) + 1
_DEPTHS = 8  # deeper nodes count as this deep
_PRIOR = 4.0  # prior pseudo-count of a bin, in expected acceptances
_MEMORY = 400.0  # expected acceptances in a bin after which older ones count half
_LEAST, _MOST = math.log(1e-4), math.log(0.995)  # chances stay below 1, so that a child never outranks its parent


@dataclass(frozen=True)
class Estimates:
    """The estimates of one batch of trees, without the root, as logarithms, float32 [bs, n].

    guesses: the drafter's chance of a node, given that its parent is accepted. path_logp: the corrected chance of the
    whole path, -inf for padding. depths: int64 [bs, n].
    """

    guesses: Tensor
    path_logp: Tensor
    depths: Tensor


class AcceptanceEstimates:
    """Corrected chance = guess * (accepted nodes / expected nodes) of the guess's bin.

    A bin is (temperature, depth, guess). Bins with few counts take the ratio of all depths together.
    """

    def __init__(self, device: torch.device) -> None:
        self._edges = torch.tensor(_EDGES, device=device).log()
        self._accepted = np.zeros((TEMPERATURE_BINS, _DEPTHS, _BINS))
        self._expected = np.zeros((TEMPERATURE_BINS, _DEPTHS, _BINS))
        # Logarithms. Captured graphs read them, so they stay in place.
        self._ratios = torch.zeros(TEMPERATURE_BINS * _DEPTHS * _BINS, device=device)

    def corrected(self, logp: Tensor, temperature_bin: Tensor, level: int) -> Tensor:
        """Corrected log chances of the children of a level's nodes, given that these are accepted.

        Args:
            logp: float32 [bs * nodes, k], the drafter's guesses. -inf stays.
            temperature_bin: int64 [bs], see `RequestSampling.temperature_bin`.
            level: 0 for the children of the root.
        """
        ratios = self._ratios.view(TEMPERATURE_BINS, _DEPTHS, _BINS)
        guesses = logp.view(len(temperature_bin), -1)
        found = correct_guesses(guesses, ratios, self._edges, temperature_bin, min(level, _DEPTHS - 1), _MOST)
        return found.view_as(logp)

    def correction(self, temperature_bin: Tensor) -> Correction:
        """`corrected` for the native kernels."""
        return Correction(self._ratios, self._edges, temperature_bin, _DEPTHS, _MOST)

    def of(self, tree: Tree, temperature_bin: Tensor) -> Estimates:
        """The estimates of trees with scores. With guesses the scores are corrected already.

        temperature_bin int64 [bs]: see `RequestSampling.temperature_bin`.
        """
        assert tree.scores is not None, "a budget needs the drafter's scores"
        depths, path_logp, guesses = tree.depths[:, 1:], tree.scores, tree.guesses
        if guesses is None:
            above = torch.cat([torch.zeros_like(path_logp[:, :1]), path_logp], dim=1).gather(1, tree.parents[:, 1:])
            guesses = (path_logp - above).nan_to_num_(nan=_LEAST).clamp_(_LEAST, 0.0)
            chances = self._corrected(guesses, depths.clamp(max=_DEPTHS) - 1 + _DEPTHS * temperature_bin[:, None])
            path_logp = (tree.mask[:, 1:, 1:] * chances[:, None]).sum(-1)
        padding = tree.tokens[:, 1:] < 0
        return Estimates(guesses, path_logp.masked_fill(padding, float("-inf")), depths)

    def _corrected(self, guesses: Tensor, groups: Tensor) -> Tensor:
        """Log chances [bs, n]. groups int64 [bs, 1 or n]: depth, and temperature bin times _DEPTHS."""
        bins = torch.bucketize(guesses, self._edges) + groups * _BINS
        return (self._ratios[bins] + guesses).clamp_(max=_MOST)

    def observe(
        self,
        guesses: NDArray[np.float32],
        depths: NDArray[np.int64],
        temperature_bin: NDArray[np.int64],
        accepted: NDArray[np.bool_],
    ) -> None:
        """Nodes whose parents were accepted, [nodes] each: log guesses, depths from 1 on, temperature_bin, outcome."""
        finite = np.isfinite(guesses)
        guesses, depths, temperature_bin, accepted = (
            guesses[finite],
            depths[finite],
            temperature_bin[finite],
            accepted[finite],
        )
        places = temperature_bin, np.minimum(depths, _DEPTHS) - 1, np.digitize(np.exp(guesses), _EDGES)
        np.add.at(self._accepted, places, accepted)
        np.add.at(self._expected, places, np.exp(guesses))
        full = self._expected > _MEMORY
        self._accepted[full] /= 2
        self._expected[full] /= 2
        whole = [np.sum(counts, axis=1, keepdims=True) for counts in (self._accepted, self._expected)]
        prior = (whole[0] + _PRIOR) / (whole[1] + _PRIOR)
        ratios = np.log((self._accepted + _PRIOR * prior) / (self._expected + _PRIOR))
        self._ratios.copy_(upload(ratios.reshape(-1), self._ratios.device, torch.float32), non_blocking=True)
