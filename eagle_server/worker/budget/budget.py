"""The budget of a cycle: which requests draft, how deep, and how many nodes the target verifies.

Drafting and verifying nodes takes time, and each node is accepted with some chance. The budget takes nodes in order of
estimated chance, over all requests of the batch, while the expected number of tokens per second still grows. It decides
before drafting, from the trees of earlier cycles, so that nothing waits for the device:

    tokens per second (steps, nodes) = (requests + sum of the nodes' chances) / (verify + extend + steps * draft step)

No text depends on a budget, because no draw depends on a tree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from eagle_server.plan import Decode
from eagle_server.request import SpeculationState
from eagle_server.worker.budget.cost_model import CostModel, draft_steps
from eagle_server.worker.budget.recent_trees import TREES, Floats, Ints, RecentTrees


@dataclass(frozen=True)
class BudgetPolicy:
    """The numbers of `AdaptiveBudget`. docs/design/adaptive-trees.md says what they do together.

    A cycle is one forward of the target. "Compared": the measured speeds of plain decoding and of drafting.
    """

    early_cycles: int = 500  # cycles in which estimates and costs still move much
    early_hold: int = 8  # cycles that a choice holds in these, and one more for each 4 requests
    hold: int = 32  # cycles that a choice holds later, and one more for each 4 requests
    least_expected: float = 0.8  # of plain decoding's speed: what drafting must promise to be measured at all
    least_measured: float = 0.98  # of plain decoding's speed: with less, drafting has lost
    close: float = 1.3  # of plain decoding's speed: an expected gain below this is compared again and again
    plain_burst: int = 8  # cycles of a period that are plain, to be compared
    plain_period: int = 300  # cycles
    absent: int = 4  # cycles without one of a kind (plain, or with drafts) after which the kind was absent
    cold: int = 3  # cycles of a kind that are not compared after it was absent, because the first are slow
    enough_plain: int = 4  # plain cycles that suffice to compare
    enough_drafted: int = 16  # cycles with drafts that suffice to compare
    learning_cycles: int = 30  # first cycles with drafts: of the largest trees, and not compared
    learners: int = 8  # requests that draft in these
    verdict: int = 500  # cycles that a comparison counts for, then drafting may try again
    outlier: float = 3.0  # times the mean: a cycle counts as no more, because another process had the core
    memory: int = 100  # cycles that a measured speed is the exponential moving average of
    probe_share: float = 0.004  # of the time: for requests to draft of which nothing is expected
    probe_logp: float = math.log(0.5)  # log chance that a node of such drafts must have to be verified


POLICY = BudgetPolicy()


@dataclass(frozen=True)
class CycleBudget:
    """The budget of one cycle.

    drafting: which decodes draft, in order. num_steps: levels of their trees. num_draft_tokens: the most nodes of a
    tree, root included. least_logp: nodes whose path has a smaller chance (its log) are not verified.
    """

    drafting: tuple[int, ...]
    num_steps: int
    num_draft_tokens: int
    least_logp: float = -math.inf


NOTHING = CycleBudget((), 0, 1)


class Budget(Protocol):
    """Chooses the budget of each cycle."""

    def choose(self, decodes: Sequence[Decode], able: Sequence[bool]) -> CycleBudget:
        """The budget of a cycle. `able`: which decodes may draft at all."""
        ...

    def drafted(self, decodes: Sequence[Decode], logp: Floats, depths: Floats) -> None:
        """These requests have drafted trees of n >= 1 nodes, [requests, n] each.

        logp: the log chances of the nodes' paths, -inf for padding. depths: 1 for children of the root.
        """
        ...

    def took(self, requests: int, *, drafted: bool, tokens: int, seconds: float) -> None:
        """The newest cycle took `seconds`, everything but prompts included, and its requests kept `tokens`."""
        ...

    def forget(self, req_pool_index: int) -> None:
        """The request has ended, or was preempted."""
        ...

    def state(self) -> SpeculationState | None:
        """What it chooses now; None: always the same."""
        ...


@dataclass(frozen=True)
class FixedBudget:
    """Every request drafts its largest tree in every cycle."""

    num_steps: int
    num_draft_tokens: int

    def choose(self, decodes: Sequence[Decode], able: Sequence[bool]) -> CycleBudget:
        drafting = tuple(i for i, each in enumerate(able) if each)
        return CycleBudget(drafting, self.num_steps, self.num_draft_tokens)

    def drafted(self, decodes: Sequence[Decode], logp: Floats, depths: Floats) -> None:
        return None

    def took(self, requests: int, *, drafted: bool, tokens: int, seconds: float) -> None:
        return None

    def forget(self, req_pool_index: int) -> None:
        return None

    def state(self) -> None:
        return None


@dataclass(frozen=True)
class _Choice:
    """Steps and least chance with the best expected speed, for a number of requests."""

    requests: int
    until: int = 0  # the cycle of its load in which to choose again
    plain: float = 0.0  # expected tokens per second without drafts
    rate: float = 0.0  # and with the best trees
    num_steps: int = 0
    num_draft_tokens: int = 1
    least_logp: float = POLICY.probe_logp

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_steps, self.num_draft_tokens


@dataclass
class _Speed:
    """A measured speed. Older cycles weigh less in tokens, seconds and weight."""

    policy: BudgetPolicy
    until: int = 0  # the cycle in which it is measured anew
    tokens: float = 0.0
    seconds: float = 0.0
    weight: float = 0.0
    cycles: int = 0

    def add(self, tokens: int, seconds: float) -> None:
        """One more cycle."""
        if self.weight:
            seconds = min(seconds, self.policy.outlier * self.seconds / self.weight)
        kept = 1 - 1 / self.policy.memory
        self.tokens, self.seconds = kept * self.tokens + tokens, kept * self.seconds + seconds
        self.weight, self.cycles = kept * self.weight + 1, self.cycles + 1

    def loses(self, plain: _Speed) -> bool:
        """Whether drafting, measured by this one, was slower beyond doubt."""
        policy = self.policy
        if plain.cycles < policy.enough_plain or self.cycles < policy.enough_drafted:
            return False
        return self.tokens * plain.seconds < policy.least_measured * plain.tokens * self.seconds


class AdaptiveBudget:
    """Maximizes the expected tokens per second of each cycle.

    `forwards(num_steps)` is the number of draft steps that a drafter needs for trees of that depth, after draft-extend.
    `shapes`: pairs (num_steps, num_draft_tokens), if all trees of a cycle must have one of these, as with CUDA graphs;
    then all requests draft, or none. (): any shapes.
    """

    def __init__(
        self,
        trees: RecentTrees,
        costs: CostModel,
        forwards: Callable[[int], int],
        shapes: Sequence[tuple[int, int]] = (),
        policy: BudgetPolicy = POLICY,
    ) -> None:
        self.trees, self.costs, self.shapes, self.policy = trees, costs, tuple(shapes), policy
        self.num_steps, self.num_draft_tokens = trees.num_steps, trees.nodes + 1
        self._forwards = forwards
        self._cycle, self._credit = 0, 0.0
        self._choice = _Choice(0)
        self._choices: dict[tuple[int, int], _Choice] = {}  # by load: reach, and about the number of requests
        self._loads: Counter[tuple[int, int]] = Counter()  # cycles of each
        # By the number of requests and the share that is sampled; those of drafting by reach, too.
        self._speeds: dict[tuple[int, ...], _Speed] = {}
        # Of the newest cycle: the share that is sampled, in halves; levels that its requests may keep, in the mean.
        self._sampled = self._reach = 0
        self._last, self._cold = (
            [-self.policy.absent] * 2,
            [0, 0],
        )  # of each kind: its newest cycle, those that do not count yet
        self._follows = True  # whether the newest cycle does what was chosen: it neither learns nor probes
        self._learned = [0, 0, 0]  # cycles with drafts, by that share
        self._refuted = False  # whether the choice was measured to be slower than plain decoding

    def choose(self, decodes: Sequence[Decode], able: Sequence[bool]) -> CycleBudget:
        self._cycle += 1
        self._follows = True
        requests = len(decodes)
        self._sampled = round(2 * sum(each.sampling.params.temperature > 0 for each in decodes) / requests)
        if not any(able):
            return NOTHING
        candidates, drafters = np.flatnonzero(able), [each for each, may in zip(decodes, able, strict=True) if may]
        # [n, 1, 1], levels that each may keep: one token is drawn without any
        levels = np.array([min(each.tokens_left - 1, self.num_steps) for each in drafters])[:, None, None]
        self._reach = round(float(levels.mean()))
        self._refuted = self._speed(requests, self._reach).loses(self._speed(requests))
        if self._refuted:
            return NOTHING
        kv = float(sum(decode.seq_len for decode in decodes))
        rows = self.trees.rows(drafters)
        load = (self._reach, requests - requests % max(1, requests // 8))
        choice, self._loads[load] = self._choices.get(load), self._loads[load] + 1
        if choice is None or self._loads[load] >= choice.until:
            choice = (self._best_shape if self.shapes else self._best)(rows, levels, requests, kv)
            hold = self.policy.early_hold if self._cycle < self.policy.early_cycles else self.policy.hold
            choice = replace(choice, until=self._loads[load] + hold + requests // 4)
            self._choices[load] = choice
        self._choice = choice
        if self._learned[self._sampled] < self.policy.learning_cycles:
            self._learned[self._sampled] += 1
            self._follows = False
            learners = candidates if self.shapes else candidates[: self.policy.learners]
            return CycleBudget(tuple(map(int, learners)), self.num_steps, self.num_draft_tokens)
        if choice.num_steps and not self._holds(choice, requests):
            return NOTHING
        wanted = (self.trees.best[rows] >= math.exp(choice.least_logp)) & bool(choice.num_steps)
        if self.shapes:
            wanted[:] = wanted.any()
        self._follows = bool(wanted.any())
        self._credit += self.policy.probe_share * self._plain(requests, kv)
        budget = CycleBudget(tuple(map(int, candidates[wanted])), *choice.shape, choice.least_logp)
        return self._probed(budget, candidates[~wanted], rows[~wanted], requests, kv)

    def _holds(self, choice: _Choice, requests: int) -> bool:
        """Whether this cycle shall draft as was chosen.

        The model may be wrong, so plain decoding is measured once whatever it says, and what is close again and again.
        """
        policy = self.policy
        close = choice.rate <= policy.close * choice.plain
        measured = self._speed(requests).cycles >= policy.enough_plain
        if measured and not close:
            return True
        period = policy.plain_period if measured or not close else 2 * policy.plain_burst
        return self._cycle % period >= policy.plain_burst

    def took(self, requests: int, *, drafted: bool, tokens: int, seconds: float) -> None:
        if self._cycle - self._last[drafted] > self.policy.absent:
            self._cold[drafted] = self.policy.cold
        self._last[drafted] = self._cycle
        if self._cold[drafted]:
            self._cold[drafted] -= 1
        elif not drafted:
            self._speed(requests).add(tokens, seconds)
        elif self._follows:
            self._speed(requests, self._reach).add(tokens, seconds)

    def _speed(self, requests: int, *reach: int) -> _Speed:
        """What was measured for about as many requests: of plain decoding, or with drafts of this reach."""
        load = (round(math.log2(requests)), self._sampled, *reach)
        speed = self._speeds.get(load)
        if speed is None or (reach and self._cycle >= speed.until):
            speed = self._speeds[load] = _Speed(self.policy, self._cycle + self.policy.verdict)
        return speed

    def drafted(self, decodes: Sequence[Decode], logp: Floats, depths: Floats) -> None:
        self.trees.add(decodes, logp, depths, self._cycle)

    def forget(self, req_pool_index: int) -> None:
        self.trees.forget(req_pool_index)

    def state(self) -> SpeculationState:
        """The newest choice."""
        choice = self._choice
        drafting = choice.num_steps > 0 and not self._refuted
        requests = f"{choice.requests} request{'' if choice.requests == 1 else 's'}"
        speeds = f"{choice.rate:.0f} tokens/s against {choice.plain:.0f} expected for {requests}"
        if not choice.plain:
            words = "nothing was decoded yet"
        elif drafting:
            words = f"on: {choice.num_steps} steps; {speeds}"
        elif choice.num_steps:
            words = f"off, because it was measured to be slower than plain decoding, although {speeds}"
        else:
            words = f"off, because it would not pay: at best {speeds}"
        return SpeculationState(
            choice=words,
            steps=choice.num_steps if drafting else 0,
            least_chance=math.exp(choice.least_logp) if drafting else 1.0,
            plain_tokens_per_second=choice.plain,
            tokens_per_second=choice.rate,
            costs=self.costs.describe(max(choice.requests, 8) * self.num_draft_tokens),
        )

    def _best(self, rows: Ints, levels: Ints, requests: int, kv: float) -> _Choice:
        """The best number of steps and nodes, if the next trees are like the last ones."""
        logp = self.trees.logp[rows]  # [requests, TREES, n]
        first = np.zeros_like(logp)
        first[:, :, 0] = 1 / TREES
        order = np.argsort(-logp, axis=None)
        logp, first = logp.reshape(-1)[order], first.reshape(-1)[order]
        depths = self.trees.depths[rows]
        depths = np.where(depths <= levels, depths, np.inf).reshape(-1)[order]
        gains, drafting = np.exp(logp) / TREES, np.cumsum(first)
        found = self._no_choice(requests, kv)
        for steps in range(1, self.num_steps + 1):
            reached = depths <= steps
            tokens, nodes = requests + np.cumsum(gains * reached), np.cumsum(reached) / TREES
            rates = tokens / self._seconds(requests, nodes, drafting, steps, kv)
            place = int(np.argmax(rates))
            if rates[place] > found.rate:
                found = replace(found, rate=float(rates[place]), num_steps=steps, least_logp=float(logp[place]))
        return self._if_it_pays(replace(found, num_draft_tokens=self.num_draft_tokens))

    def _best_shape(self, rows: Ints, levels: Ints, requests: int, kv: float) -> _Choice:
        """The best of `shapes`. All requests verify as many rows, whether they draft or not."""
        chances, depths = np.exp(self.trees.logp[rows]), self.trees.depths[rows]  # [requests, TREES, n], best first
        found = self._no_choice(requests, kv)
        for steps, size in self.shapes:
            reached = depths <= np.minimum(levels, steps)
            taken = reached & (reached.cumsum(axis=2) < size)
            nodes, drafting = np.array([requests * (size - 1.0)]), np.array([float(len(rows))])
            tokens = requests + float((chances * taken).sum()) / TREES
            rate = tokens / float(self._seconds(requests, nodes, drafting, steps, kv)[0])
            if rate > found.rate:
                found = replace(found, rate=rate, num_steps=steps, num_draft_tokens=size, least_logp=-math.inf)
        return self._if_it_pays(found)

    def _no_choice(self, requests: int, kv: float) -> _Choice:
        return _Choice(requests, plain=requests / self._plain(requests, kv))

    def _if_it_pays(self, choice: _Choice) -> _Choice:
        pays = choice.rate >= self.policy.least_expected * choice.plain
        return choice if pays else replace(choice, num_steps=0, num_draft_tokens=1, least_logp=self.policy.probe_logp)

    def _plain(self, requests: int, kv: float) -> float:
        """Seconds of a cycle in which nothing is drafted."""
        costs = self.costs
        return costs.speed * costs.verify.at(requests, kv) + costs.between

    def _seconds(self, requests: int, nodes: Floats, drafting: Floats, steps: int, kv: float) -> Floats:
        """Seconds of a cycle in which `drafting` requests draft `steps` levels, and `nodes` of theirs are verified."""
        costs = self.costs
        # Draft-extend has as many rows for each request as the one with most accepted tokens needs.
        width = 1 + np.minimum(steps, 1.5 + 0.5 * np.log2(np.maximum(drafting, 1.0)))
        drafts = costs.extend.predict(width * drafting)
        drafts = drafts + draft_steps(self._forwards(steps)) * costs.step.predict(drafting)
        return costs.speed * (costs.verify.predict(requests + nodes, kv) + drafts) + costs.between

    def _probed(self, budget: CycleBudget, others: Ints, rows: Ints, requests: int, kv: float) -> CycleBudget:
        """The budget with one more request, if there is time to see whether its drafts pay: who drafted longest ago."""
        if not len(others):
            return budget
        drafting = float(len(budget.drafting))
        steps, size = self.shapes[-1] if self.shapes else (budget.num_steps or self.num_steps, self.num_draft_tokens)
        # In one of the shapes, all requests verify as many rows.
        nodes, after = np.full(1, requests * (size - 1.0) if self.shapes else 0.0), np.array([drafting + 1])
        before = self._seconds(requests, nodes, after - 1, steps, kv) if drafting else self._plain(requests, kv)
        price = float((self._seconds(requests, nodes, after, steps, kv) - before)[0])
        if self._credit < price:
            return budget
        self._credit = 0.0
        longest = int(others[np.argmin(self.trees.last[rows])])
        if drafting:
            return replace(budget, drafting=tuple(sorted([*budget.drafting, longest])))
        return CycleBudget((longest,), steps, size, -math.inf if self.shapes else self.policy.probe_logp)
