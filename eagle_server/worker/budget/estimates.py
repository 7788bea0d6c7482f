"""Estimated acceptance: the chance of each drafted node, corrected by what was accepted before.

A drafter's score is its own guess of the chance. How good the guess is depends on the depth, on the request's
temperature and on whether the node is its parent's first child, and it changes with the text. So guesses are corrected
by counts of what was accepted. The counts are the server's: which nodes are verified depends on earlier requests, but
no text does, because no draw depends on a tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle_server.ops.device import upload
from eagle_server.ops.native.drafting import correction, count_accepted
from eagle_server.ops.native.library import available
from eagle_server.ops.native.structs import CountsStruct, EstimatesStruct
from eagle_server.ops.sampling.correction import Correction, correct_guesses, corrected
from eagle_server.plan import TEMPERATURE_BINS
from eagle_server.speculation.tree import Tree
from eagle_server.worker.budget.outcome import LessonOutcome
from eagle_server.worker.budget.policy import POLICY, BudgetPolicy

_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96)
_BINS = len(_EDGES) + 1
_DEPTHS = 8  # deeper nodes count as this deep
_RANKS = 2  # the first child of a node; the others
_LEAST, _MOST = math.log(1e-4), math.log(0.995)  # chances stay below 1, so that a child never outranks its parent


class AcceptanceEstimates:
    """Corrected chance = guess * (accepted nodes / expected nodes) of the guess's bin.

    A bin is (temperature, depth, rank, guess). Bins with few counts take the ratio of all depths together.
    `counts_all`: every cycle is counted, and not lessons alone. Where native kernels count, that costs microseconds.
    """

    def __init__(self, device: torch.device, policy: BudgetPolicy = POLICY) -> None:
        self._policy = policy
        self._edges = torch.tensor(_EDGES, device=device).log()
        self._accepted = np.zeros((TEMPERATURE_BINS, _DEPTHS, _RANKS, _BINS))
        self._expected = np.zeros((TEMPERATURE_BINS, _DEPTHS, _RANKS, _BINS))
        # Logarithms. Captured graphs read them, so they stay in place.
        self._ratios = torch.zeros(TEMPERATURE_BINS, _DEPTHS, _RANKS, _BINS, device=device)
        self.counts_all = available(device, torch.float32)
        self._counts = CountsStruct(
            *(self._accepted.ctypes.data, self._expected.ctypes.data, self._ratios.data_ptr(), self._edges.data_ptr()),
            *(_DEPTHS, len(_EDGES), policy.memory, policy.prior),
        )

    def corrected(self, logp: Tensor, temperature_bin: Tensor, level: int) -> Tensor:
        """Corrected log chances of the children of a level's nodes, given that these are accepted.

        Args:
            logp: float32 [bs * nodes, k], the drafter's guesses, best first. -inf stays.
            temperature_bin: int64 [bs], see `RequestSampling.temperature_bin`.
            level: 0 for the children of the root.
        """
        guesses = logp.view(len(temperature_bin), -1, logp.shape[1])
        return correct_guesses(guesses, self.correction(temperature_bin, level)).view_as(logp)

    def correction(self, temperature_bin: Tensor, level: int) -> Correction:
        """What `corrected` does, for the kernels that rank the children."""
        return Correction(self._ratios, self._edges, temperature_bin, min(level, _DEPTHS - 1), _MOST)

    def native_correction(self, temperature_bin: Tensor) -> EstimatesStruct:
        """`corrected` for the native kernels."""
        return correction(self._ratios, self._edges, temperature_bin, _MOST)

    def estimate(self, tree: Tree, temperature_bin: Tensor) -> Tree:
        """The trees with corrected scores, -inf for padding, and with guesses. With guesses they are corrected already.

        temperature_bin int64 [bs]: see `RequestSampling.temperature_bin`.
        """
        assert tree.scores is not None, "a budget needs the drafter's scores"
        depths, path_logp, guesses = tree.depths[:, 1:], tree.scores, tree.guesses
        if guesses is None:
            above = torch.cat([torch.zeros_like(path_logp[:, :1]), path_logp], dim=1).gather(1, tree.parents[:, 1:])
            guesses = (path_logp - above).nan_to_num_(nan=_LEAST).clamp_(_LEAST, 0.0)
            group = temperature_bin[:, None], depths.clamp(max=_DEPTHS) - 1, later_siblings(tree.parents[:, 1:])
            chances = corrected(guesses, self._ratios, self._edges, group, _MOST)
            path_logp = (tree.mask[:, 1:, 1:] * chances[:, None]).sum(-1)
        padding = tree.tokens[:, 1:] < 0
        return replace(tree, scores=path_logp.masked_fill(padding, float("-inf")), guesses=guesses)

    def count(
        self, drafted: Tree, verified: Tree, path: Tensor, temperature_bin: Tensor, numbers: Sequence[int]
    ) -> None:
        """Observe the trees of a cycle that is no lesson. Only if `counts_all`.

        Args:
            drafted: as `estimate` returns them. verified: of all requests.
            path: int64 [bs, steps + 1], the numbers of the accepted nodes.
            temperature_bin: int64 [drafted]. numbers: of the requests that drafted.
        """
        assert drafted.guesses is not None
        nodes = verified.tokens, verified.parents, verified.depths
        guesses, own = drafted.guesses[: len(numbers)], numbers if len(numbers) < len(path) else None
        count_accepted(self._counts, nodes, path, guesses, temperature_bin, own, verified.proposed)

    def learn(self, trees: LessonOutcome) -> None:
        """Observe the nodes that were tried: their parents were accepted."""
        parents = trees.verified_parents
        reached = np.zeros((len(parents), parents.shape[1] + 2), dtype=np.bool_)
        np.put_along_axis(reached, trees.path, values=True, axis=1)  # the padding, -1, is the spare last column
        tried = np.take_along_axis(reached, parents, axis=1) & trees.is_node
        temperature_bin = np.array([[trees.decodes[n].sampling.temperature_bin] for n in trees.drafting])
        temperature_bins = np.broadcast_to(temperature_bin, tried.shape)[tried]
        same = parents[:, :, None] == parents[:, None, :]
        later = (same & np.tri(same.shape[1], k=-1, dtype=np.bool_)).any(axis=2)[tried].astype(np.int64)
        self.observe(trees.guesses[tried], (temperature_bins, trees.depths[tried], later), reached[:, 1:-1][tried])

    def observe(
        self,
        guesses: NDArray[np.float32],
        places: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
        accepted: NDArray[np.bool_],
    ) -> None:
        """Nodes whose parents were accepted, [nodes] each.

        guesses: logarithms. places: temperature bins, depths from 1 on, and 1 for later siblings, 0 for first ones.
        """
        finite = np.isfinite(guesses)
        chances, accepted = np.exp(guesses[finite]), accepted[finite]
        temperature_bin, depths, later = (each[finite] for each in places)
        bins = temperature_bin, np.minimum(depths, _DEPTHS) - 1, later, np.digitize(chances, _EDGES)
        np.add.at(self._accepted, bins, accepted)
        np.add.at(self._expected, bins, chances)
        full, prior_count = self._expected > self._policy.memory, self._policy.prior
        self._accepted[full] /= 2
        self._expected[full] /= 2
        whole = [np.sum(counts, axis=1, keepdims=True) for counts in (self._accepted, self._expected)]
        prior = (whole[0] + prior_count) / (whole[1] + prior_count)
        ratios = np.log((self._accepted + prior_count * prior) / (self._expected + prior_count))
        self._ratios.copy_(upload(ratios, self._ratios.device, torch.float32), non_blocking=True)


def later_siblings(parents: Tensor) -> Tensor:
    """1 for nodes that are not the first with their parent, else 0: int64 [bs, n], from parents int64 [bs, n]."""
    same = parents[:, :, None] == parents[:, None, :]
    return same.tril(-1).any(dim=2).long()
