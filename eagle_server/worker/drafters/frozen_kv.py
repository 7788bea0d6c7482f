"""Gemma 4's assistant: draft steps that attend to the target's KV as it is.

All nodes stand at the position of the root and see the committed prefix alone, so every row of a step is a request
of its own with one query. The ancestors of a node reach it by token and feedback.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from eagle_server.attention.batches import prefill_batch
from eagle_server.attention.interface import BoundAttention, Causal, Layout
from eagle_server.attention.spec_info import DraftWindow, EagleDraftInput
from eagle_server.models.drafts.gemma4_assistant import Gemma4Assistant
from eagle_server.ops.tree.candidates import CandidatePool, Children
from eagle_server.plan import TreeShape
from eagle_server.speculation.candidates import organize_draft_results
from eagle_server.speculation.tree import Tree
from eagle_server.worker.batch.batch import DecodeBatch
from eagle_server.worker.drafters.feature import FeatureProposer, NewestFeature
from eagle_server.worker.drafters.interface import DrafterSetup, ModelDrafter, vocabulary_of


def frozen_kv_drafter(head: Gemma4Assistant, setup: DrafterSetup) -> ModelDrafter[Tensor]:
    return ModelDrafter(NewestFeature(), FrozenKVSteps(head, setup))


class FrozenKVSteps(FeatureProposer):
    """Multi-step top-k drafting without KV of its own."""

    def __init__(self, head: Gemma4Assistant, setup: DrafterSetup) -> None:
        super().__init__(setup)
        tree = setup.tree
        self.head, self.attention = head, setup.attention(())
        self.steps, self.topk = tree.model_steps, tree.topk
        self.vocabulary = vocabulary_of(head, setup.device)
        self._window = DraftWindow.of(tree.topk, (tree.model_steps - 1) * tree.topk, setup.device)

    def forwards(self, shape: TreeShape) -> tuple[int, int]:
        return shape.steps, self.topk

    def propose(self, draft: Tensor, batch: DecodeBatch) -> Tree:
        """`steps` forwards: the root, then the best nodes of each level."""
        ranking, topk, seq_lens = batch.ranking, self.topk, batch.seq_lens
        out = self.head(batch.verified_id, draft, seq_lens, self._bound(batch, 1))
        guesses, tokens = ranking.best(self.head.logits(out.normed), topk, self.vocabulary)
        hidden = out.feedback.repeat_interleave(topk, dim=0)
        nodes = EagleDraftInput.first(guesses, tokens, hidden, self._window)
        nodes = replace(nodes, topk_logp=ranking.chances(guesses))
        steps = batch.steps - 1
        pool = CandidatePool.empty(Children(tokens, nodes.topk_logp, guesses), steps)
        bound, positions = (self._bound(batch, topk) if steps else None), seq_lens.repeat_interleave(topk)
        for step in range(steps):
            assert bound is not None
            ranking = ranking.advance(nodes.topk_index, pool.fed(step) if step else None, topk)
            out = self.head(nodes.topk_index.view(-1), nodes.parent_states, positions, bound)
            logits, level = self.head.logits(out.normed), pool.level(step)
            children = ranking.children(logits, nodes.topk_logp, level, self.vocabulary)
            if step < steps - 1:
                nodes, _ = nodes.advance(children.tokens, children.scores, out.feedback, pool.fed(step + 1))
        tree = organize_draft_results(batch.verified_id, seq_lens, pool, batch.nodes)
        return ranking.without_refused(tree)

    def _bound(self, batch: DecodeBatch, rows: int) -> BoundAttention:
        """Attention of `rows` rows per request to its committed prefix."""
        lens = tuple(length for length in batch.seq_lens_host for _ in range(rows))
        layout = Layout((1,) * len(lens), lens)
        indices, kv_lens = (x.repeat_interleave(rows) for x in (batch.req_pool_indices, batch.seq_lens))
        attention = prefill_batch(indices, kv_lens, batch.req_to_token, Causal(), layout)
        return self.attention.plan(layout).bind(attention)
