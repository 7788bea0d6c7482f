"""What whole trees of every request would have given, from which a budget predicts the next ones. On the host."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from eagle_server.plan import TEMPERATURE_BINS, Decode, TreeShape
from eagle_server.worker.budget.outcome import LessonOutcome
from eagle_server.worker.budget.policy import POLICY, BudgetPolicy

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Prospects:
    """Exponential moving averages over lessons, by option and by least chance of a node that is verified.

    An option is a shape of trees. A lesson whose trees have a smaller shape says nothing of it.

    `tokens` [rows, options, chances]: the sum of the verified nodes' chances. `nodes`: how many these are. `drafts`
    [rows, chances]: how often there is any. `best` [rows]: the best node's chance. `last` [rows]: the cycle of the
    newest lesson. A request has the row of its req_pool_index once it has drafted. The last rows are those of all
    requests of a temperature bin. `lessons` counts.
    """

    def __init__(
        self, requests: int, options: Sequence[TreeShape], least_logp: Floats, policy: BudgetPolicy = POLICY
    ) -> None:
        self.options, self.least_logp, self.lessons = tuple(options), least_logp, 0
        self._policy, self._requests = policy, requests
        self._steps, self._most, self._widths = np.array(options, dtype=float).T[:, :, None]
        self._widths = np.where(self._widths > 0, self._widths, np.inf)
        chain = np.arange(1, max(steps for steps, *_ in options) + 1)
        prior = self.evaluate(chain[None] * np.log(policy.first_chance), chain[None] - 1)
        rows = requests + TEMPERATURE_BINS
        self.tokens, self.nodes, self.drafts = (np.tile(each, (rows,) + (1,) * (each.ndim - 1)) for each in prior[:3])
        self.best: list[float] = [policy.first_chance] * rows
        self.last: list[int] = [0] * rows
        self._counts, self._last = np.zeros((2, rows, len(self.options)))
        self._known = [False] * rows

    def rows(self, decodes: Sequence[Decode]) -> list[int]:
        """The row of each request; before it has drafted, that of its temperature bin."""
        return [
            decode.req_pool_index
            if self._known[decode.req_pool_index]
            else self._requests + decode.sampling.temperature_bin
            for decode in decodes
        ]

    def within(self, most_steps: Sequence[int]) -> Ints:
        """For requests that may keep so many levels: what stands for each option, [requests, options].

        It is the option with no more levels, or the same one if there is none.
        """
        numbers = {shape: number for number, shape in enumerate(self.options)}
        kept = {
            most: [numbers.get(shape._replace(steps=min(shape.steps, most)), own) for shape, own in numbers.items()]
            for most in set(most_steps)
        }
        return np.array([kept[most] for most in most_steps])

    def trees(self, shape: TreeShape) -> list[int]:
        """How many lessons of this shape, or of larger ones, each temperature bin has had."""
        return [int(count) for count in self._counts[self._requests :, self._told_by(shape)].min(axis=1)]

    def forget(self, req_pool_index: int) -> None:
        """The request has ended, or was preempted."""
        self._known[req_pool_index] = False

    def _told_by(self, shape: TreeShape) -> NDArray[np.bool_]:
        """The options that are parts of this shape, [options]."""
        widest = shape.topk or math.inf
        told: NDArray[np.bool_] = (self._steps <= shape.steps) & (self._most <= shape.nodes) & (self._widths <= widest)
        return told[:, 0]

    def learn(self, trees: LessonOutcome, cycle: int) -> None:
        """Let the trees of this cycle count."""
        decodes = [trees.decodes[number] for number in trees.drafting]
        told = self._told_by(trees.shape)
        seen = self.evaluate(np.nan_to_num(trees.logp.astype(float), nan=-np.inf, neginf=-np.inf), trees.parents)
        bins = [self._requests + decode.sampling.temperature_bin for decode in decodes]
        decoding = Counter(self._requests + decode.sampling.temperature_bin for decode in trees.decodes)
        for shared in set(bins):
            own = [n for n, each in enumerate(bins) if each == shared]
            means = [each[own].mean(axis=0, keepdims=True) for each in seen]
            self._move([shared], means, cycle, told, len(own) / decoding[shared])
        rows = [decode.req_pool_index for decode in decodes]
        new = [n for n, row in enumerate(rows) if not self._known[row]]
        to, of = [rows[n] for n in new], [bins[n] for n in new]
        for row, shared in zip(to, of, strict=True):
            self._known[row], self.best[row], self.last[row] = True, self.best[shared], self.last[shared]
        for array in (self.tokens, self.nodes, self.drafts, self._counts, self._last):
            array[to] = array[of]
        self._move(rows, seen, cycle, told)
        self.lessons += 1

    def _move(
        self, rows: Sequence[int], seen: Sequence[Floats], cycle: int, told: NDArray[np.bool_], share: float = 1.0
    ) -> None:
        """Let a new tree of each row count for the cycles since its last one, in the options that it tells of.

        seen: [rows, ..] each, as `evaluate` returns them. No row occurs twice. share: of the requests that a row stands
        for; a probe drafts for one of them, and one tree must not count as much as those of all.
        """
        self._counts[rows] += told
        passed = -np.expm1((self._last[rows] - cycle) / self._policy.forgetting)
        weights = np.where(told, np.maximum(1 / (self._counts[rows] + 1), share * passed), 0.0)  # [rows, options]
        self._last[rows] = np.where(told, cycle, self._last[rows])
        least = weights[:, told].min(axis=1, initial=1.0)
        tokens, nodes, drafts, best = seen
        self.tokens[rows] += weights[:, :, None] * (tokens - self.tokens[rows])
        self.nodes[rows] += weights[:, :, None] * (nodes - self.nodes[rows])
        self.drafts[rows] += least[:, None] * (drafts - self.drafts[rows])
        for row, weight, chance in zip(rows, map(float, least), map(float, best), strict=True):
            self.last[row] = cycle
            self.best[row] += weight * (chance - self.best[row])

    def evaluate(self, logp: Floats, parents: Ints) -> tuple[Floats, Floats, Floats, Floats]:
        """Tokens, nodes, drafts and the best chance of trees [requests, n]."""
        depths, widths = shapes(logp, parents)
        order = np.argsort(-logp, axis=1, kind="stable")
        logp, depths, widths = (np.take_along_axis(each, order, axis=1)[:, None] for each in (logp, depths, widths))
        reached = (depths <= self._steps) & (widths <= self._widths) & (logp > -np.inf)  # [requests, options, n]
        reached &= np.cumsum(reached, axis=2) < self._most
        verified = (logp[:, 0, :, None] >= self.least_logp).astype(float)  # [requests, n, chances]
        chances = np.exp(logp)
        return (reached * chances) @ verified, reached @ verified, verified[:, 0], chances[:, 0, 0]


def shapes(logp: Floats, parents: Ints) -> tuple[Floats, Floats]:
    """Depths and widths of nodes [requests, n], given the log chances of their paths.

    parents: node numbers, 0 for the root and i + 1 for entry i. A draft step with topk K feeds the K best nodes of a
    level, and takes K children of each. So a node needs K > its number among its siblings, K > its parent's number in
    its level, best first, and what its parent needs.
    """
    requests, count = parents.shape
    depths, widths = np.ones((requests, count + 1)), np.ones((requests, count + 1))
    depths[:, 0] = 0
    every_row = np.arange(requests)[:, None]
    while True:
        deeper = depths[every_row, parents] + 1
        if (deeper == depths[:, 1:]).all():
            break
        depths[:, 1:] = deeper
    earlier = np.tri(count, k=-1, dtype=bool)
    siblings = ((parents[:, :, None] == parents[:, None, :]) & earlier).sum(axis=2)
    above = (logp[:, None, :] > logp[:, :, None]) | ((logp[:, None, :] == logp[:, :, None]) & earlier)
    ranks = np.zeros((requests, count + 1))
    ranks[:, 1:] = ((deeper[:, :, None] == deeper[:, None, :]) & above).sum(axis=2)  # in the level
    needed = np.maximum(siblings, ranks[every_row, parents]) + 1
    for _ in range(int(deeper.max(initial=0))):
        widths[:, 1:] = np.maximum(needed, widths[every_row, parents])
    return deeper, widths[:, 1:]
