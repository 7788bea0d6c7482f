"""Drafting in a cycle: the requests that the budget chose draft, and the nodes that are worth their time are kept."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from eagle_server.ops.upload import upload
from eagle_server.plan import CycleDrafting, CyclePlan, CycleResult, Decode
from eagle_server.speculation.accept import Accepted
from eagle_server.speculation.tree import Tree, root_alone, spread, without
from eagle_server.worker.ahead import UNUSED, ForwardAhead
from eagle_server.worker.batch.batch import Batches, DecodeBatch
from eagle_server.worker.batch.draft_tree import with_steps
from eagle_server.worker.budget.budget import Budget, CycleBudget
from eagle_server.worker.budget.cost_model import LONGEST_WAIT, CostModel, StageTimes, draft_steps
from eagle_server.worker.budget.estimates import Estimates
from eagle_server.worker.budget.policy import POLICY, BudgetPolicy
from eagle_server.worker.clock import StageClock
from eagle_server.worker.drafters.interface import Drafter
from eagle_server.worker.first_drafts import TREES, FirstDrafts

_BACKLOG_ROWS = 512  # of backlogs that one cycle computes, about


@dataclass(frozen=True)
class Drafts:
    """The trees of a cycle, and what is needed to learn from them.

    batch: the requests that drafted; None: none did. requests: int64 [m], their numbers among all; None: all drafted.
    extended: rows of their draft-extend, with their backlogs. fed: nodes that each draft step feeds. lesson: whether
    estimates and budget learn from this cycle.
    """

    tree: Tree
    budget: CycleBudget
    batch: DecodeBatch | None = None
    requests: Tensor | None = None
    estimates: Estimates | None = None
    extended: int = 0
    fed: int = 0
    lesson: bool = False

    def to_copy(self, tree: Tree, accepted: Accepted) -> tuple[Tensor, ...]:
        """What `TreeDrafting.finish` reads on the host. `tree` and `accepted` are those of `batch`, as verified."""
        if self.estimates is None:
            return ()
        if not self.lesson:
            return (self.estimates.path_logp,)
        estimates, guesses = self.estimates, self.estimates.guesses
        if tree.proposed is not None:
            guesses = guesses.gather(1, tree.proposed)
        verified = (tree.depths[:, 1:], tree.tokens, tree.parents, accepted.path)
        return (estimates.path_logp, estimates.parents, guesses, *verified)


class TreeDrafting:
    """A drafter under a budget.

    `estimates`, if there are any, learn from cycles that drafted. `costs` belong to an adaptive budget; None: it is
    fixed.
    """

    def __init__(self, drafter: Drafter[Any], batches: Batches, budget: Budget, policy: BudgetPolicy = POLICY) -> None:
        self.drafter, self.batches, self.budget, self.policy = drafter, batches, budget, policy
        self.estimates = batches.estimates
        self.costs: CostModel | None = None
        self.extends_ahead = False  # whether draft-extend may run before the next cycle's window is allocated
        self.extended: ForwardAhead[Any] = ForwardAhead()  # of the drafter's State
        self._cycles = 0  # how many there were
        self._lessons: Counter[int] = Counter()  # of each temperature bin
        self._ended = 0.0  # when the last one ended
        self.first_drafts: FirstDrafts | None = None  # None: there is no draft model
        self.observers: list[Callable[[Tree, Accepted, int], None]] = []  # get trees, paths, requests

    def adapt(self, budget: Budget, costs: CostModel) -> None:
        """Go on with an adaptive budget."""
        self.budget, self.costs = budget, costs

    def forget(self, released: Sequence[int]) -> None:
        """These requests have ended, or were preempted."""
        self.extended.forget(released)
        for req_pool_index in released:
            self.drafter.forget(req_pool_index)
            self.budget.forget(req_pool_index)

    def draft(self, batch: DecodeBatch, clock: StageClock) -> Drafts:
        """Trees for all requests of the batch. Those that do not draft have the root alone."""
        self._cycles += 1
        served = all(decode.all_tokens for decode in batch.decodes)  # warm-up has no text
        lesson = served and self._is_lesson(batch.decodes)
        with clock.stage("budget"):
            budget = self._choose(batch, lesson=lesson)
        with clock.stage("extend"):
            drafting = self.batches.drafting(batch, budget, cut=not lesson)  # a lesson is about all nodes
        if drafting is None:
            return Drafts(root_alone(batch.verified_id, batch.seq_lens), budget)
        with clock.stage("extend"):
            extended = len(drafting.seq_lens_host) * drafting.extend_width
            backlog = self.batches.backlog(drafting.decodes)
            if backlog is not None:
                extended += sum(backlog.rows.counts)
                self.drafter.prefill(backlog)
            state = self._take_extended(drafting, clock)
            if state is None:
                state = self.drafter.extend(drafting)
            for decode in drafting.decodes:
                self.batches.accepted_tokens.taken(decode.req_pool_index)
        with clock.stage("propose"):
            tree = self.drafter.propose(state, drafting)
        with clock.stage("build_tree"):
            estimates = None
            if self.estimates is not None and tree.scores is not None:
                assert drafting.ranking.temperature_bin is not None
                estimates = self.estimates.estimate(tree, drafting.ranking.temperature_bin)
                tree = replace(tree, scores=estimates.path_logp)
                if budget.least_logp > -math.inf and (lesson or not tree.is_cut):
                    unlikely = estimates.path_logp < budget.least_logp
                    if lesson and self._is_unjudged:  # the likeliest node is verified, whatever is expected of it
                        unlikely &= estimates.path_logp < estimates.path_logp.amax(dim=1, keepdim=True)
                    tree = without(tree, unlikely)
            tree = _within_reach(tree, drafting)
            requests = None
            if len(budget.drafting) < len(batch.decodes):
                requests = upload(budget.drafting, batch.seq_lens.device)
                tree = spread(tree, requests, batch.verified_id, batch.seq_lens)
        fed = len(drafting.seq_lens_host) * (budget.topk or self.drafter.widest)
        return Drafts(tree, budget, drafting, requests, estimates, extended, fed, lesson)

    def extend_ahead(self, drafts: Drafts, accepted: Accepted) -> None:
        """Draft-extend for the next cycle. It needs nothing from the host if all requests go on drafting.

        The device runs it while the host reads this cycle's results and plans the next. If the next cycle has requests
        that it was not computed for, the cycle's own draft-extend writes the same KV again.
        """
        batch = drafts.batch
        if batch is None or not self.extends_ahead or drafts.requests is not None or not batch.ranking.is_plain:
            return
        if max(decode.tokens_left for decode in batch.decodes) - 1 < self._least_left:
            return
        clock = StageClock(self.batches.device)
        with clock.stage("extend"):
            state = self.drafter.extend(batch.after(accepted))
        requests = [(decode.req_pool_index, decode.seq_len) for decode in batch.decodes]
        self.extended.put(state, requests, len(batch.seq_lens_host), clock)

    def _take_extended(self, batch: DecodeBatch, clock: StageClock) -> Any:
        """The state of the draft-extend that has run for these requests; None: there is none."""
        if not batch.ranking.is_plain:
            return None
        lens = zip(batch.decodes, batch.extend_lens_host, strict=False)  # without padding
        requests = [(decode.req_pool_index, decode.seq_len - count) for decode, count in lens]
        return self.extended.take(requests, len(batch.seq_lens_host), clock)

    @property
    def _least_left(self) -> int:
        """Tokens that a request must still get to draft. 1: graphs of a fixed budget are of whole trees only."""
        return 1 if self.batches.sizes and self.costs is None else 2

    def _is_lesson(self, decodes: Sequence[Decode]) -> bool:
        """Whether estimates and budget learn from this cycle."""
        bins = {decode.sampling.temperature_bin for decode in decodes if decode.speculative}
        lesson = any(self._lessons[temperature_bin] < self.policy.first_lessons for temperature_bin in bins)
        lesson = lesson or self._cycles % self.policy.lesson_period == 0
        self._lessons.update(bins if lesson else ())
        return lesson

    def _choose(self, batch: DecodeBatch, *, lesson: bool) -> CycleBudget:
        for decode in batch.decodes:
            if not decode.speculative:
                self.batches.accepted_tokens.give_up(decode)
        may_draft = zip(batch.decodes, self.batches.can_draft(batch.decodes), strict=True)
        least = self._least_left
        able = [may and each.tokens_left >= least for each, may in may_draft]
        budget = self.budget.choose(batch.decodes, able, lesson=lesson)
        kept = self._with_room(batch, budget.drafting)
        if len(kept) < len(budget.drafting):
            budget = replace(budget, drafting=kept)
        reach = max((batch.decodes[i].tokens_left - 1 for i in kept), default=0)
        if self.batches.sizes or lesson or reach >= budget.steps:
            return budget  # captured drafters have the depths of their graphs only
        return replace(budget, steps=reach)

    def _with_room(self, batch: DecodeBatch, drafting: Sequence[int]) -> tuple[int, ...]:
        """The requests whose backlogs are computed in this cycle. The others draft in later cycles."""
        room, kept = _BACKLOG_ROWS, list[int]()
        for i in drafting:
            length = self.batches.accepted_tokens.backlog_length(batch.decodes[i].req_pool_index)
            if length <= room or not kept:
                kept.append(i)
                room -= length
        return tuple(kept)

    def observe(self, batch: DecodeBatch, drafts: Drafts, tree: Tree, accepted: Accepted) -> tuple[Tensor, ...]:
        """What `finish` must have on the host. `tree` is the one that was verified for `batch`."""
        for observe in self.observers:
            observe(tree, accepted, len(batch.decodes))
        if drafts.batch is None:
            return ()
        if drafts.requests is not None:
            tree, accepted = tree.rows_of(drafts.requests), accepted.rows_of(drafts.requests)
        return drafts.to_copy(tree, accepted)

    def finish(
        self, plan: CyclePlan, result: CycleResult, drafts: Drafts | None, estimates: Sequence[NDArray[Any]], rows: int
    ) -> CycleResult:
        """Learn from a cycle, and say in its result what was drafted.

        estimates: what `observe` returned, on the host. rows: of the verify forward.
        """
        if drafts is None:
            self._ended = time.perf_counter()
            return result
        expected = 0.0
        if estimates:
            logp = estimates[0][: len(drafts.budget.drafting)]
            expected = float(np.exp(logp[logp >= drafts.budget.least_logp]).sum())
        if drafts.lesson and estimates:
            self._learn(drafts, estimates)
        if self._is_unjudged and drafts.batch is not None:
            self._count_first_drafts(plan, result, drafts.budget.drafting)
        steps = drafts.budget.steps if drafts.batch else 0
        drafting = CycleDrafting(
            steps=steps,
            requests=len(drafts.budget.drafting),
            rows=rows,
            expected=expected,
            predicted_seconds=self._time(plan, result, drafts, rows),
        )
        accepted = self.batches.accepted_tokens
        computed = tuple(accepted.start(decode) for decode in plan.decodes) if self.drafter.uses_features else ()
        decodes = with_steps(result.decodes, steps, drafts.budget.drafting)
        return replace(result, decodes=decodes, drafting=drafting, draft_computed_tokens=computed)

    @property
    def _is_unjudged(self) -> bool:
        return self.first_drafts is not None and self.first_drafts.is_open

    def _count_first_drafts(self, plan: CyclePlan, result: CycleResult, drafting: Sequence[int]) -> None:
        """The cycle's greedy trees. Warm-up has no text."""
        first = self.first_drafts
        assert first is not None
        for number in drafting:
            decode, output = plan.decodes[number], result.decodes[number]
            if decode.all_tokens and output.drafted and decode.sampling.params.temperature == 0:
                first.trees += 1
                first.accepted += len(output.tokens) > 1
        if first.trees >= TREES:
            first.judge()

    def _learn(self, drafts: Drafts, values: Sequence[NDArray[Any]]) -> None:
        """Update budget and estimates."""
        assert drafts.batch is not None and self.estimates is not None
        decodes = drafts.batch.decodes
        logp, drafted_parents, guesses, depths, tokens, parents, path = (each[: len(decodes)] for each in values)
        self.budget.saw_trees(decodes, logp.astype(float), drafted_parents)
        verified = tokens[:, 1:] >= 0
        reached = np.zeros((len(tokens), tokens.shape[1] + 1), dtype=np.bool_)
        np.put_along_axis(reached, path, values=True, axis=1)  # the padding, -1, is the spare last column
        tried = np.take_along_axis(reached, parents[:, 1:], axis=1) & verified
        temperature_bin = np.array([[decode.sampling.temperature_bin] for decode in decodes])
        temperature_bins = np.broadcast_to(temperature_bin, tried.shape)[tried]
        same = parents[:, 1:, None] == parents[:, None, 1:]
        later = (same & np.tri(same.shape[1], k=-1, dtype=np.bool_)).any(axis=2)[tried].astype(np.int64)
        self.estimates.observe(guesses[tried], (temperature_bins, depths[tried], later), reached[:, 1:-1][tried])

    def _time(self, plan: CyclePlan, result: CycleResult, drafts: Drafts, rows: int) -> float:
        """Update the cost model by the stages' seconds. Returns what it had predicted for decoding, in seconds."""
        costs, now, stages = self.costs, time.perf_counter(), result.stage_seconds
        ended, self._ended = self._ended, now
        waited = now - ended - sum(stages.values())
        if costs is None:
            return 0.0
        loaded = waited < LONGEST_WAIT
        if loaded:
            tokens = sum(map(Decode.kept, plan.decodes, (output.tokens for output in result.decodes)))
            seconds = now - ended - stages.get("prefill", 0.0)
            self.budget.took(len(plan.decodes), has_drafted=drafts.batch is not None, tokens=tokens, seconds=seconds)
        if not drafts.lesson and self._cycles % (self.policy.lesson_period // 2):
            return 0.0
        if drafts.batch is None:
            costs.wait(waited)
        kv = float(sum(decode.seq_len for decode in plan.decodes))
        forwards = self.drafter.forwards(drafts.budget.steps) if drafts.batch is not None else 0
        times = StageTimes.of(stages, forwards)
        predicted = costs.observe(costs.verify, rows, kv, times.verify)
        if drafts.batch is not None:
            if times.step is not None:
                predicted += float(draft_steps(forwards)) * costs.observe(costs.step, drafts.fed, 0.0, times.step)
            # In between lessons, because these take time themselves: the rest is to commit more tokens.
            later = waited - costs.between if loaded and not plan.chunks and not drafts.lesson else 0.0
            predicted += costs.observe(costs.extend, drafts.extended, 0.0, times.extend + max(0.0, later))
        costs.compare(predicted, sum(seconds for stage, seconds in stages.items() if stage not in ("prefill", UNUSED)))
        return predicted


def _within_reach(tree: Tree, batch: DecodeBatch) -> Tree:
    """The trees without the nodes that their requests could not keep: each level is one token more."""
    left = [decode.tokens_left for decode in batch.decodes]
    if min(left) > tree.steps:
        return tree
    left += [1] * (len(tree.depths) - len(left))  # padding
    reach = upload([min(each, tree.steps + 1) for each in left], tree.depths.device)
    return without(tree, tree.depths[:, 1:] >= reach[:, None])
