"""EAGLE-1/2/3 and MTP: a feature head drafts a tree in several steps of its best topk nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from eagle_server.attention.interface import AttentionBackend, AttentionPlan, Causal, Layout
from eagle_server.models.drafts.interface import DraftHead
from eagle_server.speculation.accept import Accepted
from eagle_server.speculation.attention_args import batch_arguments
from eagle_server.speculation.candidates import CandidatePool
from eagle_server.speculation.draft_input import EagleDraftInput, Frontier, beam_layout, draft_layout
from eagle_server.speculation.tree import Candidates, EagleVerifyInput
from eagle_server.worker.batch import Carry, DecodeBatch, Prompts
from eagle_server.worker.draft_token_mask import NO_TOKEN_MASK, DraftTokenMask
from eagle_server.worker.graphs import Graphs


class EagleDrafter:
    """Multi-step top-k drafting (EAGLE-2) with any `DraftHead`.

    `beams`: attention computes each node of a step as a decode query of its own, planned for each step.
    """

    feeds = True

    def __init__(  # noqa: PLR0913  the shape of its trees, and what it runs on
        self,
        head: DraftHead,
        attention: AttentionBackend,
        *,
        num_steps: int,
        topk: int,
        draft_token_num: int,
        graphs: Graphs | None = None,
        beams: bool = False,
    ) -> None:
        self.head, self.attention = head, attention
        self.num_steps, self.topk, self.draft_token_num = num_steps, topk, draft_token_num
        self.graphs, self.beams = graphs or Graphs(), beams

    def forget(self, row: int) -> None:
        """Nothing is kept by row but KV, which the next request there writes anew."""

    def prefill(self, prompts: Prompts) -> None:
        """Draft KV of prompt rows, causally."""
        if prompts.pairs is None:
            return
        batch = prompts.pairs.batch
        planned = self.attention.plan(batch.attention.layout).bind(batch.attention)
        self.head(batch.tokens, self.head.combine(prompts.pairs.features), batch.positions, planned)

    def extend(self, batch: DecodeBatch) -> EagleDraftInput:
        """Draft-extend: rewrite the draft KV of accepted tokens from the target's features, causally.

        Every request has `extend_width` rows. Those past its count stand behind the last one that counts, so nothing
        reads them, and they are written again next time.
        """
        width = batch.extend_width
        firsts = zip(batch.seq_lens_host, batch.counts_host, strict=True)
        layout = Layout((width,) * len(batch.counts_host), tuple(n - count + width for n, count in firsts))
        prepared = self.attention.plan(layout)
        function = partial(self._extend, prepared, layout, batch.carry, batch.req_to_token)
        key = None if prepared.graph_key is None else ("extend", prepared.graph_key)
        draft = self.graphs.run(key, function, batch.rows, batch.seq_lens, batch.verified_id, batch.counts)
        if not batch.token_mask.is_active:
            return draft
        assert draft.normed is not None
        logp, tokens = self._best(draft.normed, batch.token_mask)
        return replace(draft, topk_logp=logp, topk_index=tokens)

    def propose(self, draft: EagleDraftInput, batch: DecodeBatch) -> Candidates:
        """num_steps - 1 forwards over the frontier; the first level is what draft-extend already found."""
        lens, steps = batch.seq_lens_host, range(self.num_steps - 1)
        if self.beams:
            layouts = [beam_layout(lens, step, self.topk) for step in steps]
        else:
            layouts = [draft_layout(lens, len(steps), self.topk)] * len(steps)
        distinct = {layout: self.attention.plan(layout) for layout in layouts}
        prepared = [distinct[layout] for layout in layouts]
        keys = tuple(each.graph_key for each in distinct.values())
        key = None if None in keys or not keys or batch.token_mask.is_active else ("propose", keys)
        function = partial(self._propose, prepared, layouts, batch.req_to_token, batch.token_mask)
        inputs = (draft.topk_logp, draft.topk_index, draft.hidden_states, draft.verified_id, draft.accept_length)
        return self.graphs.run(key, function, batch.rows, batch.seq_lens, *inputs)

    def observe(self, batch: DecodeBatch, tree: EagleVerifyInput, accepted: Accepted) -> None:
        """It learns nothing while it serves."""

    def _extend(  # noqa: PLR0913, PLR0917  bound arguments first, then the captured inputs
        self,
        prepared: AttentionPlan,
        layout: Layout,
        carry: Carry,
        req_to_token: Tensor,
        rows: Tensor,
        seq_lens: Tensor,
        verified_id: Tensor,
        counts: Tensor,
    ) -> EagleDraftInput:
        width = layout.q_lens[0]
        tokens, features = carry.take(rows, width)
        first = seq_lens - counts
        positions = (first[:, None] + torch.arange(width, device=rows.device)).view(-1)
        planned = prepared.bind(batch_arguments(rows, first + width, req_to_token, Causal(), layout))
        out = self.head(tokens, self.head.combine(features), positions, planned)
        newest = counts - 1 + torch.arange(0, len(tokens), width, device=rows.device)
        normed = out.normed.index_select(0, newest)
        logp, best = self._best(normed, NO_TOKEN_MASK)
        feedback = out.feedback.index_select(0, newest)
        return EagleDraftInput(logp, best, feedback, verified_id, accept_length=counts, normed=normed)

    def _propose(  # noqa: PLR0913, PLR0917  bound arguments first, then the captured inputs
        self,
        prepared: Sequence[AttentionPlan],
        layouts: Sequence[Layout],
        req_to_token: Tensor,
        token_mask: DraftTokenMask,
        rows: Tensor,
        seq_lens: Tensor,
        *draft: Tensor,
    ) -> Candidates:
        frontier = Frontier.first(EagleDraftInput(*draft))
        pool = CandidatePool(frontier.tokens, frontier.scores)
        if not self.beams:
            self._clear_window(rows, seq_lens, req_to_token)
        chosen: Tensor | None = None
        for step, (ready, layout) in enumerate(zip(prepared, layouts, strict=True)):
            token_mask = token_mask.advance(frontier.tokens, chosen, self.topk)
            planned = ready.bind(frontier.attention_batch(rows, seq_lens, req_to_token, layout))
            positions = (seq_lens + step).repeat_interleave(self.topk)
            out = self.head(frontier.tokens.view(-1), frontier.hidden, positions, planned)
            logp, tokens = self._best(out.normed, token_mask)
            shape = (*frontier.tokens.shape, self.topk)
            scores = frontier.scores[:, :, None] + logp.view(shape)
            pool.add(tokens.view(shape), scores)
            if step < self.num_steps - 2:
                frontier, chosen = frontier.advance(tokens.view(shape), scores, out.feedback)
                pool.expand(chosen)
        best = pool.best(self.draft_token_num - 1)
        assert best.scores is not None
        return replace(best, tokens=token_mask.without_refused(best.tokens, best.scores))

    def _clear_window(self, rows: Tensor, seq_lens: Tensor, req_to_token: Tensor) -> None:
        """Steps read the slots of later steps, masked; whatever freed KV stands there must not be NaN."""
        if self.num_steps > 2:  # noqa: PLR2004  fewer make one forward at most
            later = torch.arange(self.topk, (self.num_steps - 1) * self.topk, device=rows.device)
            slots = req_to_token[rows[:, None], seq_lens[:, None] + later]
            self.attention.pool.clear(slots.view(-1).long())

    def _best(self, normed: Tensor, token_mask: DraftTokenMask) -> tuple[Tensor, Tensor]:
        """Log-probabilities over the draft vocabulary and target ids of the topk children, [rows, topk]."""
        return token_mask.best(self.head.logits(normed), self.topk, self.head.target_ids)
