"""Drafting in a cycle: the requests that the budget chose draft, and the nodes that are worth their time are kept."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from eagle_server.ops.device import upload
from eagle_server.plan import Decode, SequenceOutput, TreeShape
from eagle_server.speculation.tree import Tree, root_alone, spread, without
from eagle_server.speculation.tree_config import fitting
from eagle_server.worker.ahead import ForwardAhead
from eagle_server.worker.batch.batch import Batches, DecodeBatch
from eagle_server.worker.budget.budget import Budget, CycleBudget
from eagle_server.worker.budget.outcome import LessonOutcome, Outcome
from eagle_server.worker.clock import READ, StageClock
from eagle_server.worker.cycle import Cycle
from eagle_server.worker.drafters.interface import Drafter
from eagle_server.worker.first_drafts import FirstDrafts

_BACKLOG_ROWS = 512  # of backlogs that one cycle computes, about


class TreeDrafting:
    """A drafter under a budget.

    first_drafts: None: there is no draft model.
    Its estimates are those of `batches`; the budget teaches them.
    """

    def __init__(
        self,
        drafter: Drafter[Any],
        batches: Batches,
        budget: Budget,
        *,
        first_drafts: FirstDrafts | None = None,
    ) -> None:
        self.drafter, self.batches, self.budget, self.estimates = drafter, batches, budget, batches.estimates
        self.extends_ahead, self.first_drafts = drafter.extends_ahead, first_drafts
        self.extended: ForwardAhead[Any] = ForwardAhead()  # of the drafter's State
        self.proposed: ForwardAhead[Tree] = ForwardAhead()  # from that state
        self._extended_rows = 0  # of the draft-extend that ran ahead
        self._proposed_shape = TreeShape(0, 1)  # that the trees were drafted with
        self._ended = 0.0  # when the last cycle ended

    def forget(self, released: Sequence[int]) -> None:
        """These requests have ended, or were preempted."""
        self.extended.forget(released)
        self.proposed.forget(released)
        for req_pool_index in released:
            self.drafter.forget(req_pool_index)
            self.budget.forget(req_pool_index)

    @property
    def measures_next(self) -> bool:
        """Whether the stages of the next cycle with decodes are measured on a GPU."""
        return self.budget.lessons.measures_next

    def draft(self, cycle: Cycle) -> None:
        """Trees for all requests of the batch. Those that do not draft have the root alone."""
        batch, clock = cycle.batch, cycle.clock
        with clock.stage("budget"):
            cycle.budget = self._choose(cycle)
        with clock.stage("extend"):
            # A lesson is about all nodes.
            cycle.draft_batch = drafting = self.batches.draft_batch(batch, cycle.budget, cut=not cycle.budget.is_lesson)
        if drafting is None:
            cycle.tree = root_alone(batch.verified_id, batch.seq_lens)
            return
        if self.batches.has_backlog:
            with clock.stage(READ):
                backlog = self.batches.backlog(drafting.decodes)
                if backlog is not None:
                    cycle.read = sum(backlog.rows.counts)
                    self.drafter.prefill(backlog)
        with clock.stage("extend"):
            state = self._take_extended(drafting, clock)
            is_ahead = state is not None
            cycle.extended = self._extended_rows if is_ahead else drafting.extend_rows
            if not is_ahead:
                state = self.drafter.extend(drafting)
            for decode in drafting.decodes:
                self.batches.accepted_tokens.taken(decode.req_pool_index)
        with clock.stage("propose"):
            tree = self._take_proposed(drafting, cycle) if is_ahead else None
            if tree is None:
                tree = self.drafter.propose(state, drafting)
        with clock.stage("build_tree"):
            if self.estimates is not None and tree.scores is not None:
                assert drafting.ranking.temperature_bin is not None
                cycle.estimated = self.estimates.estimate(tree, drafting.ranking.temperature_bin)
                tree = self._without_unlikely(cycle, cycle.estimated)
            tree = _within_reach(tree, drafting)
            if len(cycle.budget.drafting) < len(batch.decodes):
                requests = upload(cycle.budget.drafting, batch.seq_lens.device)
                tree = spread(tree, requests, batch.verified_id, batch.seq_lens)
        cycle.tree = tree

    def _without_unlikely(self, cycle: Cycle, tree: Tree) -> Tree:
        """The trees without nodes that are not worth the time of verifying them."""
        least_logp, logp = cycle.budget.least_logp, tree.scores
        assert logp is not None
        if least_logp == -math.inf or (tree.is_cut and not cycle.budget.is_lesson):
            return tree
        unlikely = logp < least_logp
        if cycle.budget.is_lesson and self._is_unjudged:  # the likeliest node is verified, whatever is expected of it
            unlikely &= logp < logp.amax(dim=1, keepdim=True)
        return without(tree, unlikely)

    def run_ahead(self, cycle: Cycle) -> None:
        """Draft-extend for the next cycle, and its trees. They need nothing from the host if all requests go on
        drafting.

        The device runs it while the host reads this cycle's results and plans the next. If the next cycle has requests
        that it was not computed for, the cycle's own forwards write the same KV again. The trees are of this cycle's
        shape: if the next one's differs, only they are computed again.
        """
        batch = cycle.draft_batch
        if batch is None or not self.extends_ahead or len(batch.decodes) < len(cycle.plan.decodes):
            return
        if max(decode.tokens_left for decode in batch.decodes) - 1 < self._least_left and not cycle.joining:
            return
        after = cycle.after(batch, self.batches)
        if not after.ranking.is_plain:
            return
        clock, size = StageClock(self.batches.device, measured=self.measures_next), after.size
        requests = [(decode.req_pool_index, decode.seq_len) for decode in batch.decodes]
        requests += [(chunk.req_pool_index, chunk.end - 1) for chunk in cycle.joining]
        with clock.stage("extend"):
            state, self._extended_rows = self.drafter.extend(after), after.extend_rows
        self.extended.put(state, requests, size, clock)
        shape = cycle.budget.shape  # graphs exist for those that the budget may choose
        is_captured = size in self.batches.sizes and shape in (fitting(self.budget.shapes, size) or (shape,))
        if self.drafter.proposes_ahead and is_captured and not cycle.budget.is_lesson:
            clock = StageClock(self.batches.device, measured=self.measures_next)
            with clock.stage("propose"):
                tree, self._proposed_shape = self.drafter.propose(state, after), shape
            self.proposed.put(tree, requests, size, clock)

    def discard(self, clock: StageClock) -> None:
        """Drop what ran ahead and was not taken, and add its time to `clock` as unused."""
        self.extended.discard(clock)
        self.proposed.discard(clock)

    def _take_extended(self, batch: DecodeBatch, clock: StageClock) -> Any:
        """The state of the draft-extend that has run for these requests; None: there is none."""
        if not batch.ranking.is_plain:
            return None
        return self.extended.take(_began(batch), batch.size, clock)

    def _take_proposed(self, batch: DecodeBatch, cycle: Cycle) -> Tree | None:
        """The trees that were drafted from that state; None: there are none of the cycle's shape."""
        if cycle.budget.shape != self._proposed_shape:
            return None
        return self.proposed.take(_began(batch), batch.size, cycle.clock)

    @property
    def _least_left(self) -> int:
        """A request drafts if it may still get at least this many tokens.

        2: the last token needs no draft. 1 with captured graphs and a fixed budget: then all requests draft.
        """
        return 1 if self.batches.sizes and not self.budget.is_adaptive else 2

    def _choose(self, cycle: Cycle) -> CycleBudget:
        batch = cycle.batch
        if cycle.plan.warm_up is not None:
            shape = cycle.plan.warm_up
            return CycleBudget(tuple(range(len(batch.decodes))), shape.steps, shape.nodes, shape.topk)
        for decode in batch.decodes:
            if not decode.speculative:
                self.batches.accepted_tokens.give_up(decode)
        may_draft = zip(batch.decodes, self.batches.can_draft(batch.decodes), strict=True)
        least = self._least_left
        able = [may and each.tokens_left >= least for each, may in may_draft]
        budget = self.budget.choose(batch.decodes, able)
        if budget.drafting and self.batches.has_backlog:
            budget = replace(budget, drafting=self._with_room(batch, budget))
        if self.batches.sizes or budget.is_lesson or not budget.drafting:
            return budget  # captured drafters have the depths of their graphs only
        reach = max((batch.decodes[i].tokens_left - 1 for i in budget.drafting), default=0)
        return budget if reach >= budget.steps else replace(budget, steps=reach)

    def _with_room(self, batch: DecodeBatch, budget: CycleBudget) -> tuple[int, ...]:
        """The requests whose backlogs are computed in this cycle. Others draft in later cycles; none if all together
        have more to read than their drafts will save.
        """
        lengths = {i: self.batches.backlog_length(batch.decodes[i]) for i in budget.drafting}
        if sum(lengths.values()) > budget.most_read * sum(batch.decodes[i].tokens_left for i in lengths):
            return ()
        room, kept = _BACKLOG_ROWS, list[int]()
        for i, length in lengths.items():
            if length <= room or not kept:
                kept.append(i)
                room -= length
        return tuple(kept)

    def learn(self, cycle: Cycle, decodes: Sequence[SequenceOutput]) -> None:
        """Learn from a cycle whose results are on the host, and say in its record what was expected."""
        ended, self._ended = self._ended, time.perf_counter()
        if cycle.plan.warm_up is not None or not cycle.plan.decodes or not cycle.budget.is_observed:
            return
        if cycle.estimated is not None:
            logp = cycle.host.array("estimates")[: len(cycle.budget.drafting)]
            cycle.expected = float(np.exp(logp[logp >= cycle.budget.least_logp]).sum())
            self._count_accepted(cycle)
        if cycle.draft_batch is not None and self._is_unjudged:
            self._count_first_drafts(cycle, decodes)
        if self.budget.is_adaptive or (cycle.budget.is_lesson and cycle.estimated is not None):
            cycle.predicted_seconds = self.budget.learn(self._outcome(cycle, decodes, self._ended - ended))

    def computed_tokens(self, decodes: Sequence[Decode]) -> tuple[int, ...]:
        """`CycleResult.draft_computed_tokens` of these decodes."""
        if not self.drafter.uses_features:
            return ()
        return tuple(self.batches.accepted_tokens.start(decode) for decode in decodes)

    @property
    def _is_unjudged(self) -> bool:
        return self.first_drafts is not None and self.first_drafts.is_open

    def _count_first_drafts(self, cycle: Cycle, decodes: Sequence[SequenceOutput]) -> None:
        """The cycle's greedy trees."""
        first = self.first_drafts
        assert first is not None
        for number in cycle.budget.drafting:
            decode, output = cycle.plan.decodes[number], decodes[number]
            if first.is_open and output.drafted and decode.sampling.params.temperature == 0:
                first.count(accepted=len(output.tokens) > 1)

    def _count_accepted(self, cycle: Cycle) -> None:
        """What was accepted of a cycle's trees corrects the next guesses. Lessons are learned from with the budget."""
        drafted, drafting = cycle.estimated, cycle.budget.drafting
        assert drafted is not None and self.estimates is not None and cycle.draft_batch is not None
        if cycle.budget.is_lesson or not self.estimates.counts_all:
            return
        bins = cycle.draft_batch.ranking.temperature_bin
        assert bins is not None
        self.estimates.count(drafted, cycle.tree, cycle.accepted.path, bins, drafting)

    def _outcome(self, cycle: Cycle, decodes: Sequence[SequenceOutput], seconds: float) -> Outcome:
        """The cycle for the budget. `seconds`: since the last one ended."""
        plan, drafted, is_lesson = cycle.plan, cycle.draft_batch, cycle.budget.is_lesson
        forwards, rows = (0, 0) if drafted is None else self.drafter.forwards(cycle.budget.shape)
        stages, measured = cycle.clock.seconds(), cycle.clock.is_measured
        # Without its stages' times: until it began.
        waited = seconds - sum(stages.values()) if measured else cycle.began - (self._ended - seconds)
        has_trees = is_lesson and cycle.estimated is not None
        make, trees = (LessonOutcome, _lesson_trees(cycle)) if has_trees else (Outcome, {})
        return make(
            plan.decodes,
            () if drafted is None else cycle.budget.drafting,
            sum(map(Decode.kept, plan.decodes, (output.tokens for output in decodes))),
            seconds,
            waited,
            stages,
            is_measured=measured,
            rows=cycle.rows,
            joined=cycle.joined,
            read=cycle.read,
            extended=cycle.extended,
            forwards=forwards,
            fed=0 if drafted is None else rows * drafted.size,
            has_prompts=bool(plan.chunks),
            is_lesson=is_lesson,
            **trees,
        )


def _began(batch: DecodeBatch) -> list[tuple[int, int]]:
    """Each request, and the length of its text before the last cycle, without padding."""
    lens = zip(batch.decodes, batch.extend_lens_host, strict=False)
    return [(decode.req_pool_index, decode.seq_len - count) for decode, count in lens]


def _lesson_trees(cycle: Cycle) -> dict[str, Any]:
    """The trees of a lesson, on the host, as `LessonOutcome` has them."""
    host, drafting = cycle.host, list(cycle.budget.drafting)
    batch = slice(len(drafting))  # without padding
    logp, above, guesses = (host.array(each)[batch] for each in ("estimates", "above", "guesses"))
    if "proposed" in host:
        guesses = np.take_along_axis(guesses, host.array("proposed")[drafting], axis=1)
    nodes, parents, depths, path = (host.array(each)[drafting] for each in ("nodes", "parents", "depths", "path"))
    of_verified = {"verified_parents": parents[:, 1:], "depths": depths[:, 1:], "is_node": nodes[:, 1:] >= 0}
    of_drafted = {"shape": cycle.budget.shape, "logp": logp, "parents": above[:, 1:], "guesses": guesses}
    return {**of_drafted, **of_verified, "path": path}


def _within_reach(tree: Tree, batch: DecodeBatch) -> Tree:
    """The trees without the nodes that their requests could not keep: each level is one token more."""
    left = [decode.tokens_left for decode in batch.decodes]
    if min(left) > tree.steps:
        return tree
    left += [1] * (len(tree.depths) - len(left))  # padding
    reach = upload([min(each, tree.steps + 1) for each in left], tree.depths.device)
    return without(tree, tree.depths[:, 1:] >= reach[:, None])
