"""EAGLE-1/2/3 and MTP: a feature head drafts a tree in several steps of its best topk nodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from eagle_server.attention.batches import (
    draft_decode_layout,
    draft_layout,
    draft_step_batch,
    extend_batch,
    extend_layout,
    pieces_batch,
)
from eagle_server.attention.interface import AttentionBatch, AttentionPlan, Layout, PagedRequests
from eagle_server.attention.spec_info import DraftWindow, EagleDraftInput
from eagle_server.models.drafts.interface import DraftHead
from eagle_server.ops.device import upload
from eagle_server.ops.kv.indices import draft_slots
from eagle_server.ops.native.drafting import DraftRequests, NativeHead
from eagle_server.ops.tree.accepted import newest_rows
from eagle_server.ops.tree.candidates import CandidatePool, Children
from eagle_server.plan import TreeShape
from eagle_server.speculation.candidates import organize_draft_results
from eagle_server.speculation.tree import Tree, selected_tree
from eagle_server.speculation.tree_config import extend_widths
from eagle_server.worker.batch.accepted_tokens import AcceptedTokens
from eagle_server.worker.batch.batch import DecodeBatch, PromptPieces, Prompts
from eagle_server.worker.batch.draft_ranking import DraftRanking
from eagle_server.worker.drafters.interface import DrafterSetup
from eagle_server.worker.drafters.row_states import RowStates


class EagleDrafter:
    """Multi-step top-k drafting (EAGLE-2) with any `DraftHead`."""

    uses_features = extends_ahead = reads_late = True

    def __init__(self, head: DraftHead, setup: DrafterSetup) -> None:
        tree = setup.tree
        self.head, self.attention = head, setup.attention(self.graph_rows(setup))
        self.proposes_ahead = self.attention.plans_on_device and not setup.per_node
        self.steps = tree.model_steps
        self.topk = self.widest = tree.topk
        self.graphs, self.per_node = setup.graphs, setup.per_node
        self._windows = {
            topk: DraftWindow.of(topk, (tree.model_steps - 1) * topk, setup.device) for topk in range(1, tree.topk + 1)
        }
        draft_ids = torch.arange(head.draft_vocab_size, device=setup.device)
        ids = head.target_ids(draft_ids)
        self.vocabulary = None if ids.equal(draft_ids) else ids  # int64 [draft vocabulary], target ids
        self._native = self._native_head()
        rows = (setup.requests, tree.steps + 1)
        self._states = None if head.num_layers == 1 else RowStates(head, *rows, setup.device)
        self.reads_late = self.reads_late and self._states is None

    def graph_rows(self, setup: DrafterSetup) -> Collection[int]:
        """Rows per request of draft-extend and of draft steps."""
        tree = setup.tree
        return *extend_widths(tree.steps), *{shape.topk or tree.topk for shape in tree.shapes(tree.topk)}

    def forget(self, req_pool_index: int) -> None:
        """The next request overwrites the KV."""
        if self._states is not None:
            self._states.forget(req_pool_index)

    def prefill(self, prompts: Prompts) -> None:
        """Draft KV of prompt rows, causally. Few rows are one captured forward, as they are in verification."""
        features = prompts.features
        if features is not None and prompts.pieces is not None and self._has_read(*prompts.pieces, features):
            return
        if prompts.pairs is None or features is None:
            return
        batch = prompts.pairs
        bound = self.attention.plan(batch.attention.layout).bind(batch.attention)
        if self._native is not None and bound.native_rows is not None:
            self._native.prefill(batch.tokens, features, batch.positions, bound.native_rows)
        else:
            before = None if self._states is None else self._states.reading(batch)
            self.head.extend(batch.tokens, features, batch.positions, bound, before)

    def _has_read(self, pieces: PromptPieces, req_to_token: Tensor, features: Tensor) -> bool:
        """Read the prompts in a captured forward; False: none is captured."""
        layout = replace(pieces.layout, chunks=len(pieces.layout.q_lens))
        key = self.attention.key_of(layout) if self._states is None and self.graphs.captures else None
        if key is None:
            return False
        source = np.zeros(sum(layout.q_lens), dtype=np.int64)  # padding may be any row
        source[pieces.places] = np.arange(len(features))
        numbers = upload(np.concatenate([pieces.numbers, source]), features.device)
        rows, count = len(source), len(layout.q_lens)
        fixed, indices, kv_lens, of_rows = numbers.split_with_sizes([4 * rows, count, count, rows])
        requests = PagedRequests(indices, kv_lens, req_to_token)
        function = partial(self._read_pieces, self.attention.plan(layout), pieces.layout)
        self.graphs.run(("read", key), function, requests, fixed, features.index_select(0, of_rows))
        return True

    def _read_pieces(
        self, plan: AttentionPlan, layout: Layout, requests: PagedRequests, numbers: Tensor, features: Tensor
    ) -> None:
        """numbers: the first four of `PromptPieces`, each of all rows."""
        tokens, positions, slots, row_slots = numbers.view(4, -1)
        bound = plan.bind(pieces_batch(requests, slots, row_slots, layout))
        self.head.extend(tokens, features, positions, bound)

    def extend(self, batch: DecodeBatch) -> EagleDraftInput:
        """Draft-extend: rewrite the draft KV of accepted tokens from the target's features, causally.

        Every request has `extend_width` rows. Rows past its accepted tokens come last, so no row that counts reads
        them, and the next cycle overwrites their KV.
        """
        if self._native is not None and batch.ranking.is_plain:
            feedback, logp, tokens = self._native.extend(_requests(batch), *batch.accepted_tokens.storage)
            hidden = feedback.repeat_interleave(self.topk, dim=0)
            return EagleDraftInput.first(logp, tokens, hidden, self._windows[self.topk])
        layout = extend_layout(batch.seq_lens_host, batch.extend_lens_host, batch.extend_width)
        plan = self.attention.plan(layout)
        ranking = batch.ranking.without_grammars()
        function = partial(self._extend, plan, layout, batch.accepted_tokens)
        key = None if plan.graph_key is None else ("extend", plan.graph_key)
        draft = self.graphs.run(key, function, batch.requests, batch.extend_lens, ranking)
        if not batch.ranking.has_grammars:
            return draft
        assert draft.normed is not None
        logp, tokens = self._best(draft.normed, batch.ranking)
        return replace(draft, topk_logp=logp, topk_index=tokens)

    def propose(self, draft: EagleDraftInput, batch: DecodeBatch) -> Tree:
        """`steps` - 1 forwards over the best nodes. Draft-extend has already found the first level."""
        lens, steps, topk = batch.seq_lens_host, range(batch.steps - 1), batch.topk or self.topk
        if self._native is not None and batch.ranking.is_plain:
            return self._propose_native(self._native, self._narrowed(draft, topk), batch)
        if self.per_node:
            layouts = [draft_decode_layout(lens, step, topk) for step in steps]
        else:  # one for all steps
            layouts = [draft_layout(lens, self.steps - 1, topk)][: len(steps)]
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

    def _native_head(self) -> NativeHead | None:
        """Native kernels draft with this head over this pool; None: they do not."""
        attention, head = self.attention, self.head
        caches = attention.native_caches
        weights = head.native_weights()
        return None if caches is None or weights is None else NativeHead(weights, caches, self.topk, self.vocabulary)

    def _propose_native(self, native: NativeHead, draft: EagleDraftInput, batch: DecodeBatch) -> Tree:
        """`_propose` in one call."""
        ranking, later = batch.ranking, max(0, batch.steps - 1)
        corrected = None
        if ranking.estimates is not None and ranking.temperature_bin is not None:
            corrected = ranking.estimates.native_correction(ranking.temperature_bin)
        level = (draft.topk_logp, draft.topk_index, draft.hidden_states)
        count = batch.nodes - 1
        best, parents = native.steps(_requests(batch), corrected, later, count, batch.least_logp, *level)
        topk, steps = (draft.topk_index.shape[1], later + 1) if best.tokens.shape[1] else (1, 0)
        tree = selected_tree(batch.verified_id, batch.seq_lens, best, parents, topk, steps)
        return replace(tree, is_cut=True)

    def _extend(
        self,
        plan: AttentionPlan,
        layout: Layout,
        accepted: AcceptedTokens,
        requests: PagedRequests,
        extend_lens: Tensor,
        ranking: DraftRanking,
    ) -> EagleDraftInput:
        width = layout.q_lens[0]
        tokens, features, positions, first = accepted.extend_rows(requests, extend_lens, width)
        bound = plan.bind(extend_batch(requests, first, layout))
        before = None if self._states is None else self._states.extending(requests.req_pool_indices, first, width)
        out = self.head.extend(tokens, features, positions, bound, before)
        normed, hidden = newest_rows(out.normed, out.feedback, extend_lens, self.topk)
        logp, best = self._best(normed, ranking)
        return EagleDraftInput.first(logp, best, hidden, self._windows[self.topk], normed)

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
        draft = self._narrowed(draft, topk)
        seq_lens, guesses = requests.seq_lens, draft.topk_logp
        draft = replace(draft, topk_logp=ranking.chances(guesses))
        pool = CandidatePool.empty(Children(draft.topk_index, draft.topk_logp, guesses), len(plans))
        table, indices = requests.req_to_token, requests.req_pool_indices
        slots, positions = draft_slots(table, indices, seq_lens, self.steps - 1, topk)  # [steps, bs * topk]
        if plans and not self.per_node:
            self._clear(slots[1:])
        attention: AttentionBatch | None = None
        for step, (plan, layout) in enumerate(zip(plans, layouts, strict=True)):
            fed = draft.cut((step + 1) * topk) if self.per_node else draft
            ranking = ranking.advance(draft.topk_index, pool.fed(step) if step else None, topk)
            attention = draft_step_batch(fed, slots[step], requests, layout, attention)
            bound = plan.bind(attention)
            fed_nodes = (draft.topk_index.view(-1), draft.hidden_states, positions[step], bound, draft.parents)
            out = self.head.step(step + 1, *fed_nodes, is_last=step == len(plans) - 1)
            logits, above = self.head.logits(out.normed), draft.topk_logp
            children = ranking.children(logits, above, pool.level(step), self.vocabulary)
            if step < len(plans) - 1:
                draft, _ = draft.advance(children.tokens, children.scores, out.feedback, pool.fed(step + 1))
        tree = organize_draft_results(verified_id, seq_lens, pool, nodes)
        return ranking.without_refused(tree)

    def _narrowed(self, draft: EagleDraftInput, topk: int) -> EagleDraftInput:
        return draft if topk == self.topk else draft.narrowed(self._windows[topk])

    def _clear(self, slots: Tensor) -> None:
        """Each step reads the slots of later steps, masked. Freed KV that stands there must not be NaN.

        slots: int64 [steps behind the first one, bs * topk].
        """
        if len(slots):
            self.attention.pool.clear(slots.reshape(-1))

    def _best(self, normed: Tensor, ranking: DraftRanking) -> tuple[Tensor, Tensor]:
        """Scores and target ids of the topk children, [rows, topk]."""
        return ranking.best(self.head.logits(normed), self.topk, self.vocabulary)


def _requests(batch: DecodeBatch) -> DraftRequests:
    fields = (batch.seq_lens, batch.extend_lens, batch.req_pool_indices, batch.req_to_token)
    noise = batch.ranking.noise
    if noise is None:
        return DraftRequests(*fields)
    return DraftRequests(*fields, noise.keys, batch.ranking.positions, noise.temperature)
