"""EAGLE-1/2/3 and MTP: a feature head drafts a tree in several steps of its best topk nodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from eagle_server.attention.batches import (
    draft_decode_layout,
    draft_layout,
    draft_step_batch,
    extend_batch,
    extend_layout,
)
from eagle_server.attention.interface import AttentionBatch, AttentionPlan, Layout, PagedRequests
from eagle_server.attention.spec_info import DraftWindow, EagleDraftInput
from eagle_server.models.drafts.interface import DraftHead
from eagle_server.ops.indices import window_slots
from eagle_server.ops.native_drafting import DraftRequests, NativeHead
from eagle_server.speculation.accept import Accepted
from eagle_server.speculation.candidates import Children, organize_draft_results, selected_tree
from eagle_server.speculation.tree import Tree
from eagle_server.worker.batch.accepted_tokens import AcceptedTokens
from eagle_server.worker.batch.batch import DecodeBatch, Prompts
from eagle_server.worker.batch.draft_ranking import DraftRanking
from eagle_server.worker.drafters.interface import DrafterSetup


class EagleDrafter:
    """Multi-step top-k drafting (EAGLE-2) with any `DraftHead`."""

    uses_features = extends_ahead = True

    def __init__(self, head: DraftHead, setup: DrafterSetup) -> None:
        tree = setup.tree
        self.head, self.attention = head, setup.attention(self.graph_rows(setup))
        self.num_steps, self.topk, self.num_draft_tokens = tree.num_steps, tree.topk, tree.num_draft_tokens
        self.window = (tree.num_steps - 1) * tree.topk  # slots of all draft steps
        self.first_rows = tree.topk  # and of the first one
        self.graphs, self.per_node = setup.graphs, setup.per_node
        self._draft_window = DraftWindow.of(tree.topk, self.window, setup.device)
        own = torch.arange(head.draft_vocab_size, device=setup.device)
        ids = head.target_ids(own)
        self.vocabulary = None if ids.equal(own) else ids  # int64 [draft vocabulary], target ids
        self._native = self._native_head()

    def graph_rows(self, setup: DrafterSetup) -> Collection[int]:
        """Rows per request of draft-extend and of a draft step."""
        return setup.tree.depth + 1, setup.tree.topk

    def forget(self, req_pool_index: int) -> None:
        """The only state is KV, which the next request overwrites."""

    def prefill(self, prompts: Prompts) -> None:
        """Draft KV of prompt rows, causally."""
        if prompts.pairs is None:
            return
        batch, features = prompts.pairs.batch, prompts.pairs.features
        bound = self.attention.plan(batch.attention.layout).bind(batch.attention)
        if self._native is not None and bound.native_rows is not None:
            self._native.prefill(batch.tokens, features, batch.positions, bound.native_rows)
        else:
            self.head(batch.tokens, self.head.combine(features), batch.positions, bound)

    def extend(self, batch: DecodeBatch) -> EagleDraftInput:
        """Draft-extend: rewrite the draft KV of accepted tokens from the target's features, causally.

        Every request has `extend_width` rows. Rows past its accepted tokens come last, so no row that counts reads
        them, and the next cycle overwrites their KV.
        """
        if self._native is not None and batch.ranking.is_plain:
            feedback, logp, tokens = self._native.extend(_requests(batch), *batch.accepted_tokens.storage)
            hidden = feedback.repeat_interleave(self.topk, dim=0)
            return EagleDraftInput.first(logp, tokens, hidden, self._draft_window)
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
        """num_steps - 1 forwards over the best nodes. Draft-extend has already found the first level."""
        lens, steps = batch.seq_lens_host, range(batch.num_steps - 1)
        if self._native is not None and batch.ranking.is_plain:
            return self._propose_native(self._native, draft, batch)
        if self.per_node:
            layouts = [draft_decode_layout(lens, step, self.topk) for step in steps]
        else:
            layouts = [draft_layout(lens, self.num_steps - 1, self.topk)] * len(steps)
        distinct = {layout: self.attention.plan(layout) for layout in dict.fromkeys(layouts)}
        plans = [distinct[layout] for layout in layouts]
        keys = tuple(each.graph_key for each in distinct.values())
        shape = (batch.num_steps, batch.num_draft_tokens)
        key = None if None in keys or not keys or batch.ranking.has_grammars else ("propose", keys, shape)
        function = partial(self._propose, plans, layouts, batch.num_draft_tokens)
        first = replace(draft, normed=None)
        return self.graphs.run(key, function, first, batch.verified_id, batch.requests, batch.ranking)

    def forwards(self, num_steps: int) -> int:
        """Draft-extend finds the first level."""
        return max(0, num_steps - 1)

    def observe(self, batch: DecodeBatch, tree: Tree, accepted: Accepted) -> None:
        """Heads do not learn while serving."""

    def _native_head(self) -> NativeHead | None:
        """Native kernels draft with this head over this pool; None: they do not."""
        attention, head = self.attention, self.head
        caches = attention.native_caches
        weights = head.native_weights()
        return None if caches is None or weights is None else NativeHead(weights, caches, self.topk, self.vocabulary)

    def _propose_native(self, native: NativeHead, draft: EagleDraftInput, batch: DecodeBatch) -> Tree:
        """`_propose` in one call."""
        ranking, steps = batch.ranking, max(0, batch.num_steps - 1)
        correction = None
        if ranking.estimates is not None and ranking.temperature_bin is not None:
            correction = ranking.estimates.correction(ranking.temperature_bin)
        level = (draft.topk_logp, draft.topk_index, draft.hidden_states)
        count = batch.num_draft_tokens - 1
        best, parents = native.steps(_requests(batch), correction, steps, count, batch.least_logp, *level)
        topk, depth = (self.topk, steps + 1) if best.tokens.shape[1] else (1, 0)
        tree = selected_tree(batch.verified_id, batch.seq_lens, best, parents, topk, depth)
        return replace(tree, is_cut=True)

    def _extend(  # noqa: PLR0913, PLR0917
        self,
        plan: AttentionPlan,
        layout: Layout,
        accepted: AcceptedTokens,
        requests: PagedRequests,
        extend_lens: Tensor,
        ranking: DraftRanking,
    ) -> EagleDraftInput:
        width = layout.q_lens[0]
        tokens, features = accepted.take(requests.req_pool_indices, width)
        first = requests.seq_lens - extend_lens
        positions = (first[:, None] + torch.arange(width, device=first.device)).view(-1)
        bound = plan.bind(extend_batch(requests, first, layout))
        out = self.head(tokens, self.head.combine(features), positions, bound)
        newest = extend_lens - 1 + torch.arange(0, len(tokens), width, device=first.device)
        normed = out.normed.index_select(0, newest)
        logp, best = self._best(normed, ranking)
        hidden = out.feedback.index_select(0, newest).repeat_interleave(self.topk, dim=0)
        return EagleDraftInput.first(logp, best, hidden, self._draft_window, normed)

    def _propose(  # noqa: PLR0913, PLR0917
        self,
        plans: Sequence[AttentionPlan],
        layouts: Sequence[Layout],
        num_draft_tokens: int,
        draft: EagleDraftInput,
        verified_id: Tensor,
        requests: PagedRequests,
        ranking: DraftRanking,
    ) -> Tree:
        seq_lens, guesses = requests.seq_lens, draft.topk_logp
        draft = replace(draft, topk_logp=ranking.chances(guesses))
        levels, expanded = [Children(draft.topk_index, draft.topk_logp, guesses)], list[Tensor]()
        slots = window_slots(requests.req_to_token, requests.req_pool_indices, seq_lens, self.window)
        if plans and not self.per_node:
            self._clear(slots)
        rows = slots.unflatten(1, (-1, self.topk)).transpose(0, 1).flatten(1)  # [steps, bs * topk]
        steps = torch.arange(len(plans), device=seq_lens.device)[:, None, None]
        positions = (seq_lens[:, None] + steps).expand(-1, -1, self.topk).flatten(1).contiguous()  # [steps, bs * topk]
        attention: AttentionBatch | None = None
        for step, (plan, layout) in enumerate(zip(plans, layouts, strict=True)):
            fed = draft.cut((step + 1) * self.topk) if self.per_node else draft
            ranking = ranking.advance(draft.topk_index, expanded[-1] if expanded else None, self.topk)
            attention = draft_step_batch(fed, rows[step], requests, layout, attention)
            bound = plan.bind(attention)
            out = self.head(draft.topk_index.view(-1), draft.hidden_states, positions[step], bound)
            logp, tokens = self._best(out.normed, ranking)
            shape = (*draft.topk_index.shape, self.topk)
            scores = draft.topk_logp[:, :, None] + ranking.chances(logp).view(shape)
            levels.append(Children(tokens.view(shape), scores, logp.view(shape)))
            if step < len(plans) - 1:
                draft, chosen = draft.advance(tokens.view(shape), scores, out.feedback)
                expanded.append(chosen)
        tree = organize_draft_results(verified_id, seq_lens, levels, expanded, num_draft_tokens)
        return ranking.without_refused(tree)

    def _clear(self, slots: Tensor) -> None:
        """Each step reads the slots of later steps, masked. Freed KV that stands there must not be NaN.

        slots: int64 [bs, window].
        """
        if self.window > self.first_rows:
            self.attention.pool.clear(slots[:, self.first_rows :].reshape(-1))

    def _best(self, normed: Tensor, ranking: DraftRanking) -> tuple[Tensor, Tensor]:
        """Scores and target ids of the topk children, [rows, topk]."""
        return ranking.best(self.head.logits(normed), self.topk, self.vocabulary)


def _requests(batch: DecodeBatch) -> DraftRequests:
    own = (batch.seq_lens, batch.extend_lens, batch.req_pool_indices, batch.req_to_token)
    noise = batch.ranking.noise
    if noise is None:
        return DraftRequests(*own)
    return DraftRequests(*own, noise.keys, batch.ranking.positions, noise.temperature)
