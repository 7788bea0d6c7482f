"""EAGLE-1/2/3 and MTP: a feature head drafts a tree in several steps of its best topk nodes."""

from __future__ import annotations

from collections.abc import Sequence
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
from eagle_server.attention.interface import AttentionBackend, AttentionBatch, AttentionPlan, Layout
from eagle_server.attention.native import BoundNative
from eagle_server.attention.torch_native import TorchNativeAttention
from eagle_server.models.drafts.interface import DraftHead, NativeDraftHead
from eagle_server.ops.indices import window_slots
from eagle_server.ops.native_drafting import DraftRequests, NativeHead
from eagle_server.speculation.accept import Accepted
from eagle_server.speculation.candidates import CandidatePool
from eagle_server.speculation.draft_input import DraftWindow, EagleDraftInput, Frontier
from eagle_server.speculation.tree import Candidates, EagleVerifyInput
from eagle_server.worker.accepted_tokens import AcceptedTokens
from eagle_server.worker.batch import DecodeBatch, Prompts
from eagle_server.worker.draft_ranking import DraftRanking
from eagle_server.worker.graphs import Graphs


class EagleDrafter:
    """Multi-step top-k drafting (EAGLE-2) with any `DraftHead`.

    `per_node`: attention computes each node of a step as a decode query of its own, and every step is planned.
    """

    uses_features = extends_ahead = True

    def __init__(  # noqa: PLR0913  the shape of its trees, and what it runs on
        self,
        head: DraftHead,
        attention: AttentionBackend,
        *,
        num_steps: int,
        topk: int,
        num_draft_tokens: int,
        graphs: Graphs | None = None,
        per_node: bool = False,
    ) -> None:
        self.head, self.attention = head, attention
        self.num_steps, self.topk, self.num_draft_tokens = num_steps, topk, num_draft_tokens
        self.window, self.first_rows = (num_steps - 1) * topk, topk  # slots of all draft steps, and of the first one
        self.graphs, self.per_node = graphs or Graphs(), per_node
        device = attention.pool.keys[0].device
        self._draft_window = DraftWindow.of(topk, self.window, device)
        own = torch.arange(head.draft_vocab_size, device=device)
        ids = head.target_ids(own)
        self.vocabulary = None if ids.equal(own) else ids  # int64 [draft vocabulary], target ids
        self._native = self._native_head()

    def forget(self, req_pool_index: int) -> None:
        """The only state is KV, which the next request overwrites."""

    def prefill(self, prompts: Prompts) -> None:
        """Draft KV of prompt rows, causally."""
        if prompts.pairs is None:
            return
        batch, features = prompts.pairs.batch, prompts.pairs.features
        bound = self.attention.plan(batch.attention.layout).bind(batch.attention)
        if self._native is not None and isinstance(bound, BoundNative):
            self._native.prefill(batch.tokens, features, batch.positions, bound.rows)
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
            return EagleDraftInput(batch.verified_id, batch.extend_lens, frontier=self._first(logp, tokens, hidden))
        layout = extend_layout(batch.seq_lens_host, batch.extend_lens_host, batch.extend_width)
        plan = self.attention.plan(layout)
        ranking = batch.ranking.without_grammars()
        function = partial(self._extend, plan, layout, batch.accepted_tokens, batch.req_to_token, ranking)
        key = None if plan.graph_key is None else ("extend", plan.graph_key)
        inputs = (batch.req_pool_indices, batch.seq_lens, batch.verified_id, batch.extend_lens)
        draft = self.graphs.run(key, function, *inputs, *ranking.tensors)
        if not batch.ranking.has_grammars:
            return draft
        assert draft.normed is not None and draft.frontier is not None
        logp, tokens = self._best(draft.normed, batch.ranking)
        return replace(draft, frontier=replace(draft.frontier, topk_logp=logp, topk_index=tokens))

    def propose(self, draft: EagleDraftInput, batch: DecodeBatch) -> Candidates:
        """num_steps - 1 forwards over the frontier. Draft-extend has already found the first level."""
        frontier, lens, steps = draft.frontier, batch.seq_lens_host, range(batch.num_steps - 1)
        assert frontier is not None
        if self._native is not None and batch.ranking.is_plain:
            return self._propose_native(self._native, frontier, batch)
        if self.per_node:
            layouts = [draft_decode_layout(lens, step, self.topk) for step in steps]
        else:
            layouts = [draft_layout(lens, self.num_steps - 1, self.topk)] * len(steps)
        distinct = {layout: self.attention.plan(layout) for layout in dict.fromkeys(layouts)}
        plans = [distinct[layout] for layout in layouts]
        keys = tuple(each.graph_key for each in distinct.values())
        shape = (batch.num_steps, batch.num_draft_tokens)
        key = None if None in keys or not keys or batch.ranking.has_grammars else ("propose", keys, shape)
        function = partial(self._propose, plans, layouts, batch.num_draft_tokens, batch.req_to_token, batch.ranking)
        inputs = (batch.req_pool_indices, batch.seq_lens, draft.verified_id, draft.extend_lens)
        tensors = (frontier.topk_logp, frontier.topk_index, frontier.hidden_states)
        return self.graphs.run(key, function, *inputs, *tensors, *batch.ranking.tensors)

    def forwards(self, num_steps: int) -> int:
        """Draft-extend finds the first level."""
        return max(0, num_steps - 1)

    def observe(self, batch: DecodeBatch, tree: EagleVerifyInput, accepted: Accepted) -> None:
        """Heads do not learn while serving."""

    def _native_head(self) -> NativeHead | None:
        """Native kernels draft with this head over this pool; None: they do not."""
        attention, head = self.attention, self.head
        caches = attention.caches if isinstance(attention, TorchNativeAttention) else None
        weights = head.native_weights() if isinstance(head, NativeDraftHead) else None
        return None if caches is None or weights is None else NativeHead(weights, caches, self.topk, self.vocabulary)

    def _propose_native(self, native: NativeHead, frontier: Frontier, batch: DecodeBatch) -> Candidates:
        """`_propose` in one call."""
        ranking, steps = batch.ranking, max(0, batch.num_steps - 1)
        correction = None
        if ranking.estimates is not None and ranking.temperature_bin is not None:
            correction = ranking.estimates.correction(ranking.temperature_bin)
        level = (frontier.topk_logp, frontier.topk_index, frontier.hidden_states)
        found = native.steps(_requests(batch), correction, steps, batch.num_draft_tokens - 1, batch.least_logp, *level)
        tokens, selected, parents, scores, guesses = found
        topk, depth = (self.topk, steps + 1) if tokens.shape[1] else (1, 0)
        return Candidates(tokens, selected, parents, topk, depth, scores, guesses, is_cut=True)

    def _extend(  # noqa: PLR0913, PLR0917  bound arguments first, then the captured inputs
        self,
        plan: AttentionPlan,
        layout: Layout,
        accepted: AcceptedTokens,
        req_to_token: Tensor,
        ranking: DraftRanking,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        verified_id: Tensor,
        extend_lens: Tensor,
        *of_ranking: Tensor,
    ) -> EagleDraftInput:
        width = layout.q_lens[0]
        draft = EagleDraftInput(verified_id, extend_lens, width)
        tokens, features = accepted.take(req_pool_indices, width)
        first = seq_lens - extend_lens
        positions = (first[:, None] + torch.arange(width, device=first.device)).view(-1)
        bound = plan.bind(extend_batch(draft, first, req_pool_indices, req_to_token, layout))
        out = self.head(tokens, self.head.combine(features), positions, bound)
        newest = extend_lens - 1 + torch.arange(0, len(tokens), width, device=first.device)
        normed = out.normed.index_select(0, newest)
        logp, best = self._best(normed, ranking.with_tensors(*of_ranking))
        hidden = out.feedback.index_select(0, newest).repeat_interleave(self.topk, dim=0)
        return replace(draft, frontier=self._first(logp, best, hidden), normed=normed)

    def _propose(  # noqa: PLR0913, PLR0917  bound arguments first, then the captured inputs
        self,
        plans: Sequence[AttentionPlan],
        layouts: Sequence[Layout],
        num_draft_tokens: int,
        req_to_token: Tensor,
        ranking: DraftRanking,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        verified_id: Tensor,
        extend_lens: Tensor,
        topk_logp: Tensor,
        topk_index: Tensor,
        hidden_states: Tensor,
        *of_ranking: Tensor,
    ) -> Candidates:
        ranking = ranking.with_tensors(*of_ranking)
        frontier = self._first(ranking.chances(topk_logp), topk_index, hidden_states)
        pool = CandidatePool(frontier.topk_index, frontier.topk_logp, topk_logp)
        slots = window_slots(req_to_token, req_pool_indices, seq_lens, self.window)
        if plans and not self.per_node:
            self._clear(slots)
        rows = slots.unflatten(1, (-1, self.topk)).transpose(0, 1).flatten(1)  # [steps, bs * topk]
        steps = torch.arange(len(plans), device=seq_lens.device)[:, None, None]
        positions = (seq_lens[:, None] + steps).expand(-1, -1, self.topk).flatten(1).contiguous()  # [steps, bs * topk]
        attention: AttentionBatch | None = None
        chosen: Tensor | None = None
        for step, (plan, layout) in enumerate(zip(plans, layouts, strict=True)):
            fed = frontier.cut((step + 1) * self.topk) if self.per_node else frontier
            draft = EagleDraftInput(verified_id, extend_lens, frontier=fed)
            ranking = ranking.advance(frontier.topk_index, chosen, self.topk)
            own = (req_pool_indices, seq_lens, req_to_token)
            attention = draft_step_batch(draft, rows[step], *own, layout, attention)
            bound = plan.bind(attention)
            out = self.head(frontier.topk_index.view(-1), frontier.hidden_states, positions[step], bound)
            logp, tokens = self._best(out.normed, ranking)
            shape = (*frontier.topk_index.shape, self.topk)
            scores = frontier.topk_logp[:, :, None] + ranking.chances(logp).view(shape)
            pool.add(tokens.view(shape), scores, logp.view(shape))
            if step < len(plans) - 1:
                frontier, chosen = frontier.advance(tokens.view(shape), scores, out.feedback)
                pool.expand(chosen)
        best = pool.best(num_draft_tokens - 1)
        assert best.scores is not None
        return replace(best, tokens=ranking.without_refused(best.tokens, best.scores))

    def _first(self, topk_logp: Tensor, topk_index: Tensor, hidden_states: Tensor) -> Frontier:
        return Frontier.first(topk_logp, topk_index, hidden_states, self._draft_window)

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
