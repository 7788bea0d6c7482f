"""The budget of a cycle: which requests draft, how deep, how wide, and how many nodes the target verifies.

Drafting and verifying nodes takes time, and each node is accepted with some chance. The budget takes nodes in order of
estimated chance, over all requests of the batch, while the expected number of tokens per second still grows. It decides
before drafting, from the trees of earlier cycles, so that nothing waits for the device:

    tokens per second (steps, width, nodes) = (requests + sum of the nodes' chances)
                                              / (verify + extend + steps * draft step of that width)

No text depends on a budget, because no draw depends on a tree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar, Protocol

import numpy as np

from eagle_server.plan import Decode, TreeShape
from eagle_server.request import SpeculationState
from eagle_server.speculation.tree_config import fitting
from eagle_server.worker.budget.cost_model import LONGEST_WAIT, CostModel
from eagle_server.worker.budget.estimates import AcceptanceEstimates
from eagle_server.worker.budget.outcome import LessonOutcome, Outcome
from eagle_server.worker.budget.policy import POLICY, BudgetPolicy
from eagle_server.worker.budget.prospects import Floats, Prospects
from eagle_server.worker.budget.speed import MeasuredSpeed
from eagle_server.worker.clock import PREFILL
from eagle_server.worker.first_drafts import FirstDrafts

_LEAST_LOGP = np.linspace(math.log(0.95), math.log(0.005), 24)  # to choose from


@dataclass(frozen=True)
class CycleBudget:
    """The budget of one cycle.

    drafting: which decodes draft, in order. steps: levels of their trees. nodes: the most nodes of a tree, root
    included. topk: nodes that each draft step feeds; 0: as many as the flags say. least_logp: nodes whose path has a
    smaller chance (its log) are not verified. is_lesson: whole trees are drafted, and estimates and budget learn.
    most_read: rows that a request may have to read before it drafts, for each token that it may get. is_observed: the
    budget learns from the cycle.
    """

    drafting: tuple[int, ...]
    steps: int
    nodes: int
    topk: int = 0
    least_logp: float = -math.inf
    is_lesson: bool = False
    most_read: float = math.inf
    is_observed: bool = True

    @property
    def shape(self) -> TreeShape:
        return TreeShape(self.steps, self.nodes, self.topk)


NOTHING = CycleBudget((), 0, 1)
_UNOBSERVED = replace(NOTHING, is_observed=False)


class Budget(Protocol):
    """Chooses the budget of each cycle. `is_adaptive`: it learns from all cycles, else from lessons with drafts."""

    @property
    def is_adaptive(self) -> bool: ...

    @property
    def lessons(self) -> Lessons: ...

    @property
    def shapes(self) -> Mapping[int, Sequence[TreeShape]]: ...

    def choose(self, decodes: Sequence[Decode], able: Sequence[bool]) -> CycleBudget:
        """The budget of the next cycle. `able`: which decodes may draft at all."""
        ...

    def learn(self, outcome: Outcome) -> float:
        """The newest cycle is over. Returns the seconds that decoding was predicted to take; 0: nothing was."""
        ...

    def forget(self, req_pool_index: int) -> None:
        """The request has ended, or was preempted."""
        ...

    def state(self) -> SpeculationState | None:
        """What it chooses now; None: always the same."""
        ...


class Lessons:
    """Counts cycles and says which are lessons: the first ones of each kind, and later one of each period.

    A kind is a temperature bin and the largest trees that a cycle may draft. One cycle of `measured_every` is measured.
    """

    def __init__(self, policy: BudgetPolicy = POLICY) -> None:
        self.policy, self.cycle, self.measured_every = policy, 0, policy.observed_every
        self._given: Counter[tuple[int, TreeShape]] = Counter()

    def next(self, decodes: Sequence[Decode], largest: TreeShape) -> bool:
        """Whether the next cycle is a lesson."""
        self.cycle += 1
        bins = {decode.sampling.temperature_bin for decode in decodes if decode.speculative}
        kinds = {(each, largest) for each in bins}
        is_lesson = any(self._given[kind] < self.policy.first_lessons for kind in kinds)
        is_lesson = is_lesson or self.cycle % self.policy.lesson_period == 0
        self._given.update(kinds if is_lesson else ())
        return is_lesson

    @property
    def is_measured(self) -> bool:
        """Whether the costs of the newest cycle are observed, if it is no lesson."""
        return self.cycle % self.measured_every == 0

    @property
    def measures_next(self) -> bool:
        """Whether the stages of the next cycle are measured where that costs time."""
        return (self.cycle + 1) % self.measured_every == 0


@dataclass(frozen=True)
class FixedBudget:
    """Every request drafts its largest tree in every cycle. Estimates, if there are any, learn from lessons."""

    steps: int
    nodes: int
    topk: int = 0
    estimates: AcceptanceEstimates | None = None
    lessons: Lessons = field(default_factory=Lessons)
    shapes: ClassVar[Mapping[int, Sequence[TreeShape]]] = MappingProxyType({})  # all have the same trees

    is_adaptive = False

    def choose(self, decodes: Sequence[Decode], able: Sequence[bool]) -> CycleBudget:
        drafting = tuple(i for i, each in enumerate(able) if each)
        largest = TreeShape(self.steps, self.nodes, self.topk)
        is_lesson = self.lessons.next(decodes, largest) and self.estimates is not None
        return CycleBudget(drafting, *largest, is_lesson=is_lesson)

    def learn(self, outcome: Outcome) -> float:
        if self.estimates is not None and isinstance(outcome, LessonOutcome):
            self.estimates.learn(outcome)
        return 0.0

    def forget(self, req_pool_index: int) -> None:
        return None

    def state(self) -> None:
        return None


@dataclass(frozen=True)
class _Choice:
    """Steps, width and least chance with the best expected speed, for a number of requests."""

    requests: int
    lessons: int = 0  # how many had been learned
    plain: float = 0.0  # expected tokens per second without drafts
    rate: float = 0.0  # and with the best trees
    steps: int = 0
    nodes: int = 1
    topk: int = 0
    least_logp: float = 0.0
    most_read: float = math.inf
    seconds: float = 0.0  # that its cycles are expected to take, by the cost model alone


class AdaptiveBudget:
    """Maximizes the expected tokens per second of each cycle.

    `forwards` and `widest` are the drafter's, see there. `largest`: steps and nodes of the flags' tree. `shapes`, if
    all trees of a cycle must have one shape, as with CUDA graphs: those that so many requests may have, the largest
    first, by the sizes of batches. Then all requests draft, or none. Empty: any shapes. `first_drafts`: while they are
    not judged, greedy requests draft in lessons, whatever is expected. The policy is that of `costs`.
    """

    def __init__(
        self,
        requests: int,
        largest: tuple[int, int],
        costs: CostModel,
        estimates: AcceptanceEstimates,
        forwards: Callable[[TreeShape], tuple[int, int]],
        widest: int = 1,
        shapes: Mapping[int, Sequence[TreeShape]] = MappingProxyType({}),
        first_drafts: FirstDrafts | None = None,
    ) -> None:
        policy = costs.policy
        self.costs, self.estimates, self.first_drafts = costs, estimates, first_drafts
        self.shapes, self.policy, self.lessons = dict(sorted(shapes.items())), policy, Lessons(policy)
        (self.steps, self.nodes), self.widest = largest, widest
        widths = sorted({1 << power for power in range(widest.bit_length())} | {widest})
        ladder = list(dict.fromkeys(shape for each in self.shapes.values() for shape in each))
        options = ladder or [
            TreeShape(steps, self.nodes, width) for steps in range(1, self.steps + 1) for width in widths
        ]
        self.prospects = Prospects(requests, options, np.array([-math.inf]) if shapes else _LEAST_LOGP, policy)
        # Of the options, each [options, 1].
        self._steps, self._sizes, widths = np.array(options, dtype=float).T[:, :, None]
        self._are_chains = widths == 1
        self._forwards, self._fed = np.array([forwards(shape) for shape in options], dtype=float).T[:, :, None]
        self._credit = 0.0  # seconds that probes may take
        self._choice = _Choice(0)
        self._choices: dict[tuple[int, int, int], _Choice] = {}  # by load
        self._speeds: dict[tuple[int, ...], tuple[MeasuredSpeed, MeasuredSpeed]] = {}  # by load without the levels
        # Of the newest cycle: size of the batch (requests beyond the largest; without sizes round(2 log2(requests))),
        # round(2 * share sampled), mean levels that a request may keep.
        self._load = (0, 0, 0)
        self._measured = self._speeds_of(0)  # for its load, with drafts and plain
        # How many times the expected seconds cycles took, by size of the batch: of trees that branch, and of chains.
        self._slowness: dict[int, list[float]] = {}
        self._probes = False  # whether it lets a request draft of which nothing is expected
        self._refuted = False  # whether the choice was measured to be slower than plain decoding

    is_adaptive = True

    def choose(self, decodes: Sequence[Decode], able: Sequence[bool]) -> CycleBudget:
        lesson = self.lessons.next(decodes, self.largest(len(decodes)))
        budget = self._chosen(decodes, able, lesson=lesson)
        if lesson:
            return replace(budget, is_lesson=True)
        return (
            budget
            if budget.drafting or self.lessons.is_measured or not self._measured[1].is_plain_known
            else _UNOBSERVED
        )

    def _chosen(self, decodes: Sequence[Decode], able: Sequence[bool], *, lesson: bool) -> CycleBudget:
        """What is best for these requests. A lesson has the largest trees."""
        requests = len(decodes)
        sampled = round(2 * sum(each.sampling.params.temperature > 0 for each in decodes) / requests)
        candidates = [number for number, may in enumerate(able) if may]
        # What each may keep: one token is drawn without any level.
        left, steps = [decodes[number].tokens_left - 1 for number in candidates], self.steps
        most_steps = [steps if each > steps else each for each in left]
        reach = round(sum(most_steps) / len(most_steps)) if most_steps else 0
        beyond = requests if self.shapes else round(2 * math.log2(requests))
        batch = next((size for size in self.shapes if size >= requests), beyond)
        self._load = batch, sampled, reach
        measured, plain = self._measured = self._speeds_of(*self._load[:2])
        if not candidates:
            return NOTHING
        rows = self.prospects.rows([decodes[number] for number in candidates])
        choice = self._choices.get(self._load)
        if choice is None or choice.lessons < self.prospects.lessons:
            kv = float(sum(decode.seq_len for decode in decodes))
            choice = self._choices[self._load] = self._best(rows, most_steps, requests, kv)
        self._choice = choice
        whole = 0 if measured.is_lost else sum(decode.tokens_left for decode in decodes)  # lost for now: believe that
        lost = choice.rate * measured.share(whole) < self.policy.least_measured * choice.plain * plain.share(whole)
        self._refuted = bool(choice.steps) and lost
        if self._refuted:
            measured.lose(self.lessons.cycle)
            return NOTHING
        if choice.steps and measured.is_enough and not plain.is_plain_known and not lesson:
            return NOTHING  # the model may be wrong, so plain decoding is measured whatever it says
        least, best = math.exp(choice.least_logp), self.prospects.best
        wanted = [n for n, row in zip(candidates, rows, strict=True) if choice.steps and best[row] >= least]
        if self.shapes and wanted:
            wanted = candidates
        if not lesson:
            shape = choice.steps, choice.nodes, choice.topk
            return CycleBudget(tuple(wanted), *shape, choice.least_logp, most_read=choice.most_read)
        # Until the first lessons are over there is a prior only, so all draft, whatever is expected.
        largest, first = self.largest(requests), self.policy.first_lessons
        is_new = [trees < first for trees in self.prospects.trees(largest)]
        new, taken = [n for n in candidates if is_new[decodes[n].sampling.temperature_bin]], set(wanted)
        others = [(self.prospects.last[row], n) for n, row in zip(candidates, rows, strict=True) if n not in taken]
        if self.first_drafts is not None and self.first_drafts.is_open and not wanted and not new:
            new = [n for _, n in others if decodes[n].sampling.params.temperature == 0]
        self._probes = bool(others and not new) and self._credit > 0
        if self._probes:  # the request whose last draft is the oldest drafts once, to measure it
            new = [min(others)[1]]
        wanted = sorted(taken.union(new))
        least_logp = choice.least_logp if choice.steps or self.shapes else math.log(self.policy.probe_chance)
        return CycleBudget(tuple(wanted), largest.steps, largest.nodes, largest.topk, least_logp)

    def largest(self, requests: int) -> TreeShape:
        """The largest trees that so many requests may draft: those of a lesson."""
        return next(iter(fitting(self.shapes, requests)), TreeShape(self.steps, self.nodes))

    def learn(self, outcome: Outcome) -> float:
        if isinstance(outcome, LessonOutcome):
            self.prospects.learn(outcome, self.lessons.cycle)
            self.estimates.learn(outcome)
        is_observed = outcome.is_measured and (outcome.is_lesson or self.lessons.is_measured)
        predicted = self.costs.learn(outcome) if is_observed else 0.0
        if outcome.waited < LONGEST_WAIT and (self.costs.joins.is_known or not outcome.joined):
            self._compare(outcome)
        return predicted

    def _compare(self, outcome: Outcome) -> None:
        """Measure the speed of this cycle without its prompts."""
        seconds = outcome.seconds - outcome.stages.get(PREFILL, 0.0) - self.costs.joining(outcome)
        (drafts, plain), choice, requests = self._measured, self._choice, len(outcome.decodes)
        if not outcome.drafting:
            stands_for = self.policy.observed_every if plain.is_plain_known and not outcome.is_lesson else 1
            self._credit += self.policy.probe_share * seconds * stands_for
            if choice.plain:
                plain.add(requests, outcome.tokens, choice.plain, seconds)
        elif not outcome.is_lesson:
            if choice.steps:
                drafts.add(requests, outcome.tokens, choice.rate, seconds)
                self._notice(choice, seconds)
        elif self._probes and not choice.steps:  # what it took longer than a plain cycle
            self._credit -= max(0.0, seconds - requests / choice.plain)

    def _notice(self, choice: _Choice, seconds: float) -> None:
        """A cycle of this choice took so long. The cost model knows no masks, and of numbers of rows only the mean."""
        slowness, kind = self._slowness.setdefault(self._load[0], [1.0, 1.0]), int(choice.topk == 1)
        found = min(seconds / choice.seconds, self.policy.outlier)
        slowness[kind] += self.policy.slowness_rate * (found - slowness[kind])

    def _speeds_of(self, *load: int) -> tuple[MeasuredSpeed, MeasuredSpeed]:
        """What was measured for such a load, with drafts and plain."""
        cycle, (drafts, plain) = self.lessons.cycle, self._speeds.get(load, (None, None))
        if drafts is None or cycle >= drafts.until:
            drafts = MeasuredSpeed.after(drafts, self.policy, cycle)
        if plain is None or cycle >= plain.until:
            plain = MeasuredSpeed.after(plain, self.policy, cycle)
        self._speeds[load] = drafts, plain
        return drafts, plain

    def forget(self, req_pool_index: int) -> None:
        self.prospects.forget(req_pool_index)

    def state(self) -> SpeculationState:
        """The newest choice."""
        choice = self._choice
        drafting = choice.steps > 0 and not self._refuted
        requests = f"{choice.requests} request{'' if choice.requests == 1 else 's'}"
        speeds = f"{choice.rate:.0f} tokens/s against {choice.plain:.0f} expected for {requests}"
        if not choice.plain:
            words = "nothing was decoded yet"
        elif drafting:
            words = f"on: {choice.steps} steps of {choice.topk or self.widest}; {speeds}"
        elif choice.steps:
            words = f"off, because it was measured to be slower than plain decoding, although {speeds}"
        else:
            words = f"off, because it would not pay: at best {speeds}"
        return SpeculationState(
            choice=words,
            steps=choice.steps if drafting else 0,
            least_chance=math.exp(choice.least_logp) if drafting else 1.0,
            plain_tokens_per_second=choice.plain,
            tokens_per_second=choice.rate,
            costs=self.costs.describe(max(choice.requests, 8) * self.nodes),
        )

    def _best(self, rows: Sequence[int], most_steps: Sequence[int], requests: int, kv: float) -> _Choice:
        """The best option and least chance, if the next trees are like the last ones."""
        seen, costs = self.prospects, self.costs
        plain = requests / (costs.speed * costs.verify.at(requests, kv) + costs.between)
        of = np.array(rows)[:, None], seen.within(most_steps)
        tokens, nodes = requests + seen.tokens[of].sum(axis=0), seen.nodes[of].sum(axis=0)  # [options, chances]
        drafting = seen.drafts[rows].sum(axis=0)
        if self.shapes:  # all requests verify as many rows, whether they draft or not
            nodes, drafting = requests * (self._sizes - 1), np.array([float(len(rows))])
        seconds = self._seconds(requests, nodes, drafting, kv)
        branched, chain = self._slowness.get(self._load[0], (1.0, 1.0))
        # More than chains do: what all drafts take longer, `MeasuredSpeed` knows.
        rates = tokens / (seconds * np.where(self._are_chains, 1.0, max(1.0, branched / chain)))
        if allowed := fitting(self.shapes, requests):
            rates[[shape not in allowed for shape in seen.options]] = 0.0
        option, place = np.unravel_index(int(np.argmax(rates)), rates.shape)
        shape = seen.options[option]
        choice = _Choice(requests, seen.lessons, plain, float(rates[option, place]))
        if choice.rate <= plain:
            return choice
        least_logp, saved = float(seen.least_logp[place]), 1 / plain - 1 / choice.rate
        most_read = saved / costs.reading if costs.reading else math.inf
        expected = float(np.broadcast_to(seconds, rates.shape)[option, place])
        return replace(choice, **shape._asdict(), least_logp=least_logp, most_read=most_read, seconds=expected)

    def _seconds(self, requests: int, nodes: Floats, drafting: Floats, kv: float) -> Floats:
        """Seconds of cycles in which `drafting` [chances] requests draft, by every option, and `nodes` [options,
        chances] of theirs are verified."""
        kv_cost = self.costs.kv_cost(kv, 1 + nodes / requests)
        return self.costs.cycle(requests + nodes, drafting, self._steps, self._forwards, self._fed, kv_cost)
