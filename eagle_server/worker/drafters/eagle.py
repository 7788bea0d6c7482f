"""EAGLE-1/2/3: a feature head drafts a tree in several steps of its best topk nodes."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_server.attention.interface import AttentionBackend
from eagle_server.models.draft import DraftHead
from eagle_server.speculation.candidates import CandidatePool
from eagle_server.speculation.draft_input import EagleDraftInput, Frontier
from eagle_server.speculation.tree import Candidates
from eagle_server.worker.batch import DecodeBatch, ExtendBatch


class EagleDrafter:
    """Multi-step top-k drafting (EAGLE-2) with any `DraftHead`."""

    feeds = True

    def __init__(
        self, head: DraftHead, attention: AttentionBackend, *, num_steps: int, topk: int, draft_token_num: int
    ) -> None:
        self.head, self.attention = head, attention
        self.num_steps, self.topk, self.draft_token_num = num_steps, topk, draft_token_num

    def extend(self, work: ExtendBatch | None, batch: DecodeBatch | None) -> EagleDraftInput | None:
        """Draft-extend: rewrite the draft KV of accepted tokens from the target's features, causally."""
        if work is None:
            return None
        hidden = self.head.combine(work.features)
        out = self.head(work.tokens, hidden, work.positions, self.attention.plan(work.attention))
        if batch is None:
            return None
        logp, tokens = self._best(out.normed.index_select(0, work.last_rows))
        counts = torch.tensor(work.counts[: len(batch.seq_lens_host)], device=tokens.device)
        feedback = out.feedback.index_select(0, work.last_rows)
        return EagleDraftInput(logp, tokens, feedback, batch.verified_id, accept_length=counts)

    def propose(self, draft: EagleDraftInput | None, batch: DecodeBatch) -> Candidates:
        """num_steps - 1 forwards over the frontier; the first level is what draft-extend already found."""
        assert draft is not None
        frontier = Frontier.first(draft)
        pool = CandidatePool(frontier.tokens, frontier.scores)
        for step in range(self.num_steps - 1):
            plan = self.attention.plan(frontier.attention_batch(batch.rows, batch.seq_lens_host, batch.req_to_token))
            positions = (batch.seq_lens + step).repeat_interleave(self.topk)
            out = self.head(frontier.tokens.view(-1), frontier.hidden, positions, plan)
            logp, tokens = self._best(out.normed)
            shape = (*frontier.tokens.shape, self.topk)
            scores = frontier.scores[:, :, None] + logp.view(shape)
            pool.add(tokens.view(shape), scores)
            if step < self.num_steps - 2:
                frontier, chosen = frontier.advance(tokens.view(shape), scores, out.feedback)
                pool.expand(chosen)
        return pool.best(self.draft_token_num - 1)

    def _best(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities over the draft vocabulary and target ids of the topk children, [rows, topk]."""
        logits = self.head.logits(normed)
        best, ids = logits.topk(self.topk, dim=-1)
        return best - logits.logsumexp(-1, keepdim=True), self.head.target_ids(ids)
