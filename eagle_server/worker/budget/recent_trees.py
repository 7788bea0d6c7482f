"""The newest drafted trees of every request, from which a budget predicts the next ones. On the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from eagle_server.plan import TEMPERATURE_BINS, Decode

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TREES = 16  # newest trees of a request
_FIRST_GUESS = 0.7  # chance of the best child of an accepted node, before anything was observed
_LIKELY = 0.5  # unlikely nodes have unlike children
_FORGET = 0.05  # weight of a new tree in the mean fall of chances


class RecentTrees:
    """Nodes by request, best first: log chances of their paths, -inf for padding, and their depths.

    `logp` and `depths` are [rows, TREES, nodes], `best` is the mean chance of the trees' best nodes, and `last` the
    cycle in which a request drafted last. A request has the row of its req_pool_index once it has drafted. The last
    rows hold the newest trees of any request of each temperature bin.
    """

    def __init__(self, requests: int, num_steps: int, nodes: int) -> None:
        self.num_steps, self.nodes = num_steps, nodes
        self._requests = requests
        chain = np.arange(1.0, num_steps + 1)
        logp, depths = _padded(chain[None] * np.log(_FIRST_GUESS), chain[None], nodes, num_steps)
        self.logp: Floats = np.tile(logp, (requests + TEMPERATURE_BINS, TREES, 1))
        self.depths: Floats = np.tile(depths, (requests + TEMPERATURE_BINS, TREES, 1))
        self.best: Floats = np.full(requests + TEMPERATURE_BINS, _FIRST_GUESS)
        self.last: Ints = np.zeros(requests + TEMPERATURE_BINS, dtype=np.int64)
        self._next: Ints = np.zeros(requests + TEMPERATURE_BINS, dtype=np.int64)
        self._known = np.zeros(requests + TEMPERATURE_BINS, dtype=np.bool_)
        # best chance of a level to that of the level above it, by temperature bin
        self._falls: Floats = np.full((TEMPERATURE_BINS, num_steps + 1), _FIRST_GUESS)

    def rows(self, decodes: Sequence[Decode]) -> Ints:
        """The row of each request; before it has drafted, that of others of its temperature bin."""
        own, temperature_bins = _indices(decodes)
        return np.where(self._known[own], own, self._requests + temperature_bins)

    def forget(self, req_pool_index: int) -> None:
        """The request has ended, or was preempted."""
        self._known[req_pool_index] = False

    def add(self, decodes: Sequence[Decode], logp: Floats, depths: Floats, cycle: int) -> None:
        """Each request has drafted a tree, [requests, any number of nodes], in any order."""
        own, temperature_bins = _indices(decodes)
        logp, depths = self._completed(np.nan_to_num(logp, nan=-np.inf, neginf=-np.inf), depths, temperature_bins)
        fresh = ~self._known[own]
        for array in (self.logp, self.depths):
            array[own[fresh]] = array[self._requests + temperature_bins[fresh]]
        self._next[own[fresh]] = 0
        self._known[own], self.last[own] = True, cycle
        self._put(own, self._next[own], logp, depths)
        for temperature_bin in range(TEMPERATURE_BINS):
            newest = np.flatnonzero(temperature_bins == temperature_bin)[-TREES:]
            row, count = self._requests + temperature_bin, len(newest)
            self._put(np.full(count, row), self._next[row] + np.arange(count), logp[newest], depths[newest])

    def _put(self, rows: Ints, places: Ints, logp: Floats, depths: Floats) -> None:
        """Replace the oldest trees of rows."""
        self.logp[rows, places % TREES], self.depths[rows, places % TREES] = logp, depths
        self._next[rows] = (places + 1) % TREES
        self.best[rows] = np.exp(self.logp[rows, :, 0]).mean(axis=1)

    def _completed(self, logp: Floats, depths: Floats, temperature_bins: Ints) -> tuple[Floats, Floats]:
        """The best nodes of each tree, in order, with one guessed node for each level that was not drafted."""
        drafted = int(depths.max())
        best = np.zeros((drafted + 1, len(logp)))
        for depth in range(1, drafted + 1):
            best[depth] = logp.max(axis=1, where=depths == depth, initial=-np.inf)
            self._learn(depth, best[depth - 1], best[depth], temperature_bins)
        falls = np.log(self._falls[temperature_bins, drafted + 1 :] + 1e-9)
        later = np.broadcast_to(np.arange(drafted + 1.0, self.num_steps + 1), falls.shape)
        guessed = best[drafted][:, None] + falls.cumsum(axis=1)
        logp, depths = np.concatenate([logp, guessed], axis=1), np.concatenate([depths, later], axis=1)
        order = np.argsort(-logp, axis=1, kind="stable")[:, : self.nodes]
        logp, depths = np.take_along_axis(logp, order, axis=1), np.take_along_axis(depths, order, axis=1)
        return _padded(logp, depths, self.nodes, self.num_steps)

    def _learn(self, depth: int, above: Floats, best: Floats, temperature_bins: Ints) -> None:
        """Move the mean falls from one level to the next."""
        likely = above > np.log(_LIKELY)
        for temperature_bin in range(TEMPERATURE_BINS):
            chosen = likely & (temperature_bins == temperature_bin)
            if count := int(chosen.sum()):
                fall = float(np.exp(best[chosen] - above[chosen]).mean())
                self._falls[temperature_bin, depth] += (1 - (1 - _FORGET) ** count) * (
                    fall - self._falls[temperature_bin, depth]
                )


def _indices(decodes: Sequence[Decode]) -> tuple[Ints, Ints]:
    """req_pool_indices and temperature bins."""
    own = np.array([decode.req_pool_index for decode in decodes])
    return own, np.array([decode.sampling.temperature_bin for decode in decodes])


def _padded(logp: Floats, depths: Floats, nodes: int, num_steps: int) -> tuple[Floats, Floats]:
    """Trees [n, nodes]."""
    missing = ((0, 0), (0, max(0, nodes - logp.shape[1])))
    logp, depths = logp[:, :nodes], depths[:, :nodes]
    return np.pad(logp, missing, constant_values=-np.inf), np.pad(depths, missing, constant_values=num_steps)
