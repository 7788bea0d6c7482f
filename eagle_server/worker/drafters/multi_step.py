"""Proposes trees in several steps of their best topk nodes, each a forward of the head (EAGLE-2)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from eagle_server.attention.batches import draft_decode_layout, draft_step_batch, window_layout
from eagle_server.attention.interface import AttentionBackend, AttentionBatch, AttentionPlan, Layout, PagedRequests
from eagle_server.attention.spec_info import EagleDraftInput
from eagle_server.ops.kv.indices import draft_slots
from eagle_server.ops.tree.candidates import CandidatePool, Children
from eagle_server.plan import TreeShape
from eagle_server.speculation.candidates import organize_draft_results
from eagle_server.speculation.tree import Tree, selected_tree
from eagle_server.speculation.tree_config import TreeConfig
from eagle_server.worker.batch.batch import DecodeBatch
from eagle_server.worker.batch.draft_ranking import DraftRanking
from eagle_server.worker.drafters.interface import DrafterSetup
from eagle_server.worker.drafters.pairs import NativePairReader, PairReader, native_requests


class MultiStep:
    """Proposes from what a `PairReader` found."""

    def __init__(self, reader: PairReader, setup: DrafterSetup) -> None:
        self.reader, self.head, self.attention, self.graphs = reader, reader.head, reader.attention, setup.graphs
        self.steps, self.topk, self.per_node = setup.tree.model_steps, setup.tree.topk, setup.per_node
        self.widest = self.topk
        self.proposes_ahead = self.attention.plans_on_device and not setup.per_node

    @staticmethod
    def step_rows(tree: TreeConfig) -> Collection[int]:
        """Rows per request of its forwards."""
        return {shape.topk or tree.topk for shape in tree.shapes(tree.topk)}

    def propose(self, draft: EagleDraftInput, batch: DecodeBatch) -> Tree:
        """`steps` - 1 forwards over the best nodes. Draft-extend has already found the first level."""
        lens, steps, topk = batch.seq_lens_host, range(batch.steps - 1), batch.topk or self.topk
        if self.per_node:
            layouts = [draft_decode_layout(lens, step, topk) for step in steps]
        else:  # one for all steps
            layouts = [window_layout(lens, topk, (self.steps - 1) * topk)][: len(steps)]
        plans = [self.attention.plan(layout) for layout in layouts]
        keys = tuple(plan.graph_key for plan in plans)
        if not self.per_node:
            plans, layouts = plans * len(steps), layouts * len(steps)
        shape = (batch.steps, batch.nodes, topk)
        key = None if None in keys or not keys or batch.ranking.has_grammars else ("propose", keys, shape)
        function = partial(self._propose, plans, layouts, batch.nodes, topk)
        first = replace(draft, normed=None)
        return self.graphs.run(key, function, first, batch.verified_id, batch.requests, batch.ranking)

    def forwards(self, shape: TreeShape) -> tuple[int, int]:
        """Draft-extend finds the first level."""
        return max(0, shape.steps - 1), shape.topk or self.widest

    def _propose(
        self,
        plans: Sequence[AttentionPlan],
        layouts: Sequence[Layout],
        nodes: int,
        topk: int,
        draft: EagleDraftInput,
        verified_id: Tensor,
        requests: PagedRequests,
        ranking: DraftRanking,
    ) -> Tree:
        draft = self.narrowed(draft, topk)
        seq_lens, guesses = requests.seq_lens, draft.topk_logp
        draft = replace(draft, topk_logp=ranking.chances(guesses))
        pool = CandidatePool.empty(Children(draft.topk_index, draft.topk_logp, guesses), len(plans))
        table, indices = requests.req_to_token, requests.req_pool_indices
        slots, positions = draft_slots(table, indices, seq_lens, self.steps - 1, topk)  # [steps, bs * topk]
        if plans and not self.per_node:
            clear_later(self.attention, slots[1:])
        attention: AttentionBatch | None = None
        for step, (plan, layout) in enumerate(zip(plans, layouts, strict=True)):
            fed = draft.cut((step + 1) * topk) if self.per_node else draft
            ranking = ranking.advance(draft.topk_index, pool.fed(step) if step else None, topk)
            attention = draft_step_batch(fed, slots[step], requests, layout, attention)
            bound = plan.bind(attention)
            fed_nodes = (draft.topk_index.view(-1), draft.hidden_states, positions[step], bound, draft.parents)
            out = self.head.step(step + 1, *fed_nodes, is_last=step == len(plans) - 1)
            logits, above = self.head.logits(out.normed), draft.topk_logp
            children = ranking.children(logits, above, pool.level(step), self.reader.vocabulary)
            if step < len(plans) - 1:
                draft, _ = draft.advance(children.tokens, children.scores, out.feedback, pool.fed(step + 1))
        tree = organize_draft_results(verified_id, seq_lens, pool, nodes)
        return ranking.without_refused(tree)

    def narrowed(self, draft: EagleDraftInput, topk: int) -> EagleDraftInput:
        """The best `topk` nodes of the first level."""
        return draft if topk == self.topk else draft.narrowed(self.reader.windows[topk])


class NativeMultiStep(MultiStep):
    """By native kernels, one call for all steps. Grammars and sampling parameters take the torch road."""

    def __init__(self, reader: NativePairReader, setup: DrafterSetup) -> None:
        super().__init__(reader, setup)
        self.native = reader.native

    def propose(self, draft: EagleDraftInput, batch: DecodeBatch) -> Tree:
        """All steps in one call."""
        if not batch.ranking.is_plain:
            return super().propose(draft, batch)
        draft = self.narrowed(draft, batch.topk or self.topk)
        ranking, later = batch.ranking, max(0, batch.steps - 1)
        corrected = None
        if ranking.estimates is not None and ranking.temperature_bin is not None:
            corrected = ranking.estimates.native_correction(ranking.temperature_bin)
        level = (draft.topk_logp, draft.topk_index, draft.hidden_states)
        count = batch.nodes - 1
        best, parents = self.native.steps(native_requests(batch), corrected, later, count, batch.least_logp, *level)
        topk, steps = (draft.topk_index.shape[1], later + 1) if best.tokens.shape[1] else (1, 0)
        tree = selected_tree(batch.verified_id, batch.seq_lens, best, parents, topk, steps)
        return replace(tree, is_cut=True)


def clear_later(attention: AttentionBackend, slots: Tensor) -> None:
    """Each step reads the slots of later steps, masked. Freed KV that stands there must not be NaN."""
    if slots.numel():
        attention.pool.clear(slots.reshape(-1))
