"""The budget of a cycle: which requests draft, how deep, and how many nodes the target verifies.

Drafting and verifying nodes takes time, and each node is accepted with some chance. The budget takes nodes in order of
estimated chance, over all requests of the batch, while the expected number of tokens per second still grows. It decides
before drafting, from the trees of earlier cycles, so that nothing waits for the device:

    tokens per second (steps, nodes) = (requests + sum of the nodes' chances) / (verify + extend + steps * draft step)

No text depends on a budget, because no draw depends on a tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from eagle_server.plan import Decode
from eagle_server.request import SpeculationState
from eagle_server.worker.cost_model import CostModel

Floats = NDArray[np.float64]

_TREES = 16  # newest trees of a request, from which the next one is predicted
_EVERY = 4  # cycles that a choice holds, and one more for each of as many requests
_GAIN = 1.01  # drafting must promise this many times the speed of plain decoding
_PROBE_SHARE = 0.004  # part of the time that requests may draft although nothing is expected of it
_PROBED = math.log(0.5)  # what a request must expect of a node to verify it, while drafting does not pay
_EXTENDED = 2.5  # rows of draft-extend per request, about
_FIRST_GUESS = 0.7  # chance of the best child of an accepted node, before anything was observed
_FORGET = 0.05  # weight of a new tree in the mean shape


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

    def drafted(self, decode: Decode, logp: Floats, depths: Floats) -> None:
        """A request has drafted n >= 1 nodes: the log chances of their paths, -inf for padding, and their depths."""
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

    def drafted(self, decode: Decode, logp: Floats, depths: Floats) -> None:
        return None

    def forget(self, req_pool_index: int) -> None:
        return None

    def state(self) -> None:
        return None


@dataclass
class _Trees:
    """The newest trees of a request, a ring: log chances of the nodes' paths [_TREES, n], best first, and their depths.

    `last`: the cycle in which it drafted last.
    """

    logp: Floats
    depths: Floats
    next: int = 0
    last: int = 0

    def add(self, logp: Floats, depths: Floats) -> None:
        """Replace the oldest tree."""
        self.logp[self.next], self.depths[self.next] = logp, depths
        self.next = (self.next + 1) % _TREES

    @property
    def best(self) -> float:
        """Mean chance of the best nodes."""
        return float(np.exp(self.logp[:, 0]).mean())


@dataclass(frozen=True)
class _Choice:
    """Steps and least chance with the best expected speed, for a number of requests."""

    requests: int
    until: int  # the cycle in which to choose again
    plain: float = 0.0  # expected tokens per second without drafts
    rate: float = 0.0  # and with the best trees
    num_steps: int = 0
    num_draft_tokens: int = 1
    least_logp: float = _PROBED


class AdaptiveBudget:
    """Maximizes the expected tokens per second of each cycle.

    `forwards(num_steps)` is the number of draft steps that a drafter needs for trees of that depth, after draft-extend.
    `shapes`: pairs (num_steps, num_draft_tokens), if all trees of a cycle must have one of these, as with CUDA graphs;
    then all requests draft, or none. (): any shapes.
    """

    def __init__(
        self,
        num_steps: int,
        num_draft_tokens: int,
        costs: CostModel,
        forwards: Callable[[int], int],
        shapes: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.num_steps, self.num_draft_tokens, self.costs = num_steps, num_draft_tokens, costs
        self.shapes, self._forwards = tuple(shapes), forwards
        self._trees: dict[int, _Trees] = {}
        self._shapes = [_Shape(num_steps, num_draft_tokens - 1) for _ in range(2)]
        self._recent = [_first_trees(num_steps, num_draft_tokens - 1) for _ in range(2)]
        self._cycle, self._credit = 0, 0.0
        self._choice = _Choice(0, 0)

    def choose(self, decodes: Sequence[Decode], able: Sequence[bool]) -> CycleBudget:
        self._cycle += 1
        candidates = [i for i, each in enumerate(able) if each]
        if not candidates:
            return NOTHING
        kv, requests = float(sum(decode.seq_len for decode in decodes)), len(decodes)
        known = [self._known(decodes[i]) for i in candidates]
        choice = self._choice
        if self._cycle >= choice.until or abs(requests - choice.requests) > requests // _EVERY:
            choice = self._choice = (self._best_shape if self.shapes else self._best)(known, requests, kv)
        wanted = list[int]()
        if choice.num_steps:
            least = math.exp(choice.least_logp)
            wanted = [i for i, trees in zip(candidates, known, strict=True) if trees.best >= least]
        if self.shapes:
            wanted = candidates if wanted else wanted
        self._credit += _PROBE_SHARE * self._plain(requests, kv)
        probed = self._probe(decodes, sorted(set(candidates).difference(wanted)), len(wanted), choice.num_steps, kv)
        if probed is None:
            return CycleBudget(tuple(wanted), choice.num_steps, choice.num_draft_tokens, choice.least_logp)
        if not choice.num_steps:
            least = -math.inf if self.shapes else choice.least_logp
            return CycleBudget((probed,), self.num_steps, self.num_draft_tokens, least)
        drafting = tuple(sorted([*wanted, probed]))
        return CycleBudget(drafting, choice.num_steps, choice.num_draft_tokens, choice.least_logp)

    def drafted(self, decode: Decode, logp: Floats, depths: Floats) -> None:
        sampled = decode.sampling.params.temperature > 0
        logp, depths = self._shapes[sampled].completed(logp, depths)
        trees = self._trees.get(decode.req_pool_index)
        if trees is None:
            recent = self._recent[sampled]
            trees = self._trees[decode.req_pool_index] = _Trees(recent.logp.copy(), recent.depths.copy())
        trees.last = self._cycle
        trees.add(logp, depths)
        self._recent[sampled].add(logp, depths)

    def forget(self, req_pool_index: int) -> None:
        self._trees.pop(req_pool_index, None)

    def _known(self, decode: Decode) -> _Trees:
        """The request's newest trees; those of other requests before it has drafted."""
        trees = self._trees.get(decode.req_pool_index)
        return self._recent[decode.sampling.params.temperature > 0] if trees is None else trees

    def state(self) -> SpeculationState:
        """The newest choice."""
        choice = self._choice
        drafting = choice.rate >= _GAIN * choice.plain > 0
        speeds = f"{choice.rate:.0f} tokens/s against {choice.plain:.0f} expected for {choice.requests} requests"
        if not choice.plain:
            words = "nothing was decoded yet"
        elif drafting:
            words = f"on: {choice.num_steps} steps; {speeds}"
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

    def _best(self, known: Sequence[_Trees], requests: int, kv: float) -> _Choice:
        """The best number of steps and nodes, if the next trees are like the last ones."""
        logp = np.stack([trees.logp for trees in known])  # [requests, _TREES, n]
        first = np.zeros_like(logp)
        first[:, :, 0] = 1 / _TREES
        order = np.argsort(-logp, axis=None, kind="stable")
        logp, first = logp.reshape(-1)[order], first.reshape(-1)[order]
        depths = np.stack([trees.depths for trees in known]).reshape(-1)[order]
        gains, drafting = np.exp(logp) / _TREES, np.cumsum(first)
        found = self._no_choice(requests, kv)
        for steps in range(1, self.num_steps + 1):
            reached = depths <= steps
            tokens, nodes = requests + np.cumsum(gains * reached), np.cumsum(reached) / _TREES
            rates = tokens / self._seconds(requests, nodes, drafting, steps, kv)
            place = int(np.argmax(rates))
            if rates[place] > found.rate:
                found = replace(found, rate=float(rates[place]), num_steps=steps, least_logp=float(logp[place]))
        return self._if_it_pays(replace(found, num_draft_tokens=self.num_draft_tokens))

    def _best_shape(self, known: Sequence[_Trees], requests: int, kv: float) -> _Choice:
        """The best of `shapes`. All requests verify as many rows, whether they draft or not."""
        chances = np.exp(np.stack([trees.logp for trees in known]))  # [requests, _TREES, n], best first
        depths = np.stack([trees.depths for trees in known])
        found = self._no_choice(requests, kv)
        for steps, size in self.shapes:
            reached = depths <= steps
            taken = reached & (reached.cumsum(axis=2) < size)
            rows, drafting = np.array([requests * (size - 1.0)]), np.array([float(len(known))])
            tokens = requests + float((chances * taken).sum()) / _TREES
            rate = tokens / float(self._seconds(requests, rows, drafting, steps, kv)[0])
            if rate > found.rate:
                found = replace(found, rate=rate, num_steps=steps, num_draft_tokens=size, least_logp=-math.inf)
        return self._if_it_pays(found)

    def _no_choice(self, requests: int, kv: float) -> _Choice:
        return _Choice(requests, self._cycle + _EVERY + requests // _EVERY, requests / self._plain(requests, kv))

    @staticmethod
    def _if_it_pays(choice: _Choice) -> _Choice:
        pays = choice.rate >= _GAIN * choice.plain
        return choice if pays else replace(choice, num_steps=0, num_draft_tokens=1, least_logp=_PROBED)

    def _plain(self, requests: int, kv: float) -> float:
        """Seconds of a cycle in which nothing is drafted."""
        costs = self.costs
        return costs.speed * float(costs.verify.predict(requests, kv)) + costs.between

    def _seconds(self, requests: int, nodes: Floats, drafting: Floats, steps: int, kv: float) -> Floats:
        """Seconds of a cycle in which `drafting` requests draft `steps` levels, and `nodes` of theirs are verified."""
        costs = self.costs
        drafts = costs.extend.predict(_EXTENDED * drafting) + self._forwards(steps) * costs.step.predict(drafting)
        return costs.speed * (costs.verify.predict(requests + nodes, kv) + drafts) + costs.between

    def _probe(
        self, decodes: Sequence[Decode], candidates: Sequence[int], drafting: int, steps: int, kv: float
    ) -> int | None:
        """One more request that drafts, the one that did so longest ago, if there is time to see whether that pays."""
        if not candidates:
            return None
        nothing, after = np.zeros(1), np.array([drafting + 1.0])
        price = float(self._seconds(len(decodes), nothing, after, steps or self.num_steps, kv)[0])
        if steps:
            price -= float(self._seconds(len(decodes), nothing, after - 1, steps, kv)[0])
        else:
            price -= self._plain(len(decodes), kv)
        if self._credit < price:
            return None
        self._credit = 0.0
        known = [self._trees.get(decodes[i].req_pool_index) for i in candidates]
        last = [0 if trees is None else trees.last for trees in known]
        return candidates[last.index(min(last))]


class _Shape:
    """How fast chances fall with depth: used to guess the levels that a shallower tree did not draft."""

    def __init__(self, num_steps: int, nodes: int) -> None:
        self.num_steps, self.nodes = num_steps, nodes
        self._falls = np.full(num_steps + 1, _FIRST_GUESS)  # best chance of a level to that of the level above

    def completed(self, logp: Floats, depths: Floats) -> tuple[Floats, Floats]:
        """The best `nodes` nodes, in order, with one guessed node for each level that was not drafted."""
        drafted = int(depths.max())
        best = [0.0, *(float(logp[depths == depth].max(initial=-math.inf)) for depth in range(1, drafted + 1))]
        for depth in range(1, drafted + 1):
            if best[depth - 1] > _PROBED:  # unlikely nodes have unlike children
                fall = math.exp(best[depth] - best[depth - 1])
                self._falls[depth] += _FORGET * (fall - self._falls[depth])
        guessed = best[-1] + np.cumsum(np.log(self._falls[drafted + 1 :] + 1e-9))
        logp = np.concatenate([logp, guessed])
        depths = np.concatenate([depths, np.arange(drafted + 1, self.num_steps + 1)])
        order = np.argsort(-logp, kind="stable")[: self.nodes]
        missing = self.nodes - len(order)
        return (
            np.pad(logp[order], (0, missing), constant_values=-math.inf),
            np.pad(depths[order].astype(float), (0, missing), constant_values=self.num_steps),
        )


def _first_trees(num_steps: int, nodes: int) -> _Trees:
    """Chains of hopeful drafts."""
    logp, depths = _Shape(num_steps, nodes).completed(np.array([math.log(_FIRST_GUESS)]), np.ones(1))
    return _Trees(np.tile(logp, (_TREES, 1)), np.tile(depths, (_TREES, 1)))
