"""ReDrafter: beam search with a recurrent head, the beams packed to a prefix tree."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from eagle_server.models.drafts.redrafter import RedrafterHead
from eagle_server.plan import TreeShape
from eagle_server.speculation.prefix_tree import beam_tree
from eagle_server.speculation.tree import Tree
from eagle_server.worker.batch.batch import DecodeBatch
from eagle_server.worker.batch.draft_ranking import BY_PROBABILITY, DraftRanking
from eagle_server.worker.drafters.feature import FeatureProposer, NewestFeature
from eagle_server.worker.drafters.interface import DrafterSetup, ModelDrafter, vocabulary_of


def redrafter_drafter(head: RedrafterHead, setup: DrafterSetup) -> ModelDrafter[Tensor]:
    return ModelDrafter(NewestFeature(), Beams(head, setup))


class Beams(FeatureProposer):
    """Packs `topk` beams of `steps` tokens to a prefix tree, and keeps its best `nodes` - 1 drafted nodes.

    Raises:
        ValueError: the beams have fewer nodes than the tree should have, and no n-grams fill it.
    """

    def __init__(self, head: RedrafterHead, setup: DrafterSetup) -> None:
        super().__init__(setup)
        self.head, self.vocabulary, tree = head, vocabulary_of(head, setup.device), setup.tree
        most = tree.model_steps * tree.topk + 1
        if tree.nodes > most and not tree.ngram_steps:
            raise ValueError(
                f"--speculative-num-draft-tokens {tree.nodes}: {tree.topk} beams of {tree.model_steps} tokens "
                f"have at most {most} nodes, the root included"
            )
        self.steps, self.topk, self.nodes = tree.model_steps, tree.topk, min(tree.nodes, most)

    def forwards(self, shape: TreeShape) -> tuple[int, int]:
        return shape.steps, self.topk

    def propose(self, draft: Tensor, batch: DecodeBatch) -> Tree:
        key = self.graph_key("redrafter", batch)
        size = min(self.nodes, batch.nodes)
        function = partial(self._propose, batch.steps, size)
        return self.graphs.run(key, function, draft, batch.verified_id, batch.seq_lens, batch.ranking)

    def _propose(
        self,
        steps: int,
        nodes: int,
        context: Tensor,
        verified_id: Tensor,
        seq_lens: Tensor,
        ranking: DraftRanking,
    ) -> Tree:
        beam, scores = beam_search(self.head, context, verified_id, steps, self.topk, ranking, self.vocabulary)
        tree = beam_tree(beam, scores, seq_lens, nodes)
        return ranking.without_refused(tree)


def beam_search(
    head: RedrafterHead,
    context: Tensor,
    verified_id: Tensor,
    steps: int,
    topk: int,
    ranking: DraftRanking = BY_PROBABILITY,
    vocabulary: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Beam search: the `topk` continuations of verified_id [bs] that it finds to have the best scores.

    Args:
        context: [bs, H], the target's feature of the position before verified_id.
        vocabulary: see `DraftRanking.best`.

    Returns:
        beams int64 [bs, topk, steps + 1], the best one first, each with verified_id first; and the score of each
        of their prefixes, float32, of the same shape.
    """
    bs = len(verified_id)
    state = head.state(verified_id, None)
    logp, tokens = ranking.best(head.logits(context, state), topk, vocabulary)  # one beam so far, with `topk` children
    beams = torch.stack([verified_id[:, None].expand(-1, topk), tokens], dim=-1)
    scores = torch.stack([torch.zeros_like(logp), logp], dim=-1)
    state, context = (x.repeat_interleave(topk, dim=0) for x in (state, context))
    first = torch.arange(0, bs * topk, topk, device=verified_id.device)[:, None]
    chosen: Tensor | None = None
    for _ in range(steps - 1):
        ranking = ranking.advance(beams[:, :, -1], chosen, topk)
        state = head.state(beams[:, :, -1].reshape(-1), state)
        logp, tokens = ranking.best(head.logits(context, state), topk, vocabulary)
        totals = scores[:, :, -1:] + logp.view(bs, topk, topk)
        best, chosen = totals.flatten(1).topk(topk, dim=1)
        parent = torch.div(chosen, topk, rounding_mode="floor")  # [bs, topk]
        state = state.index_select(0, (parent + first).view(-1))
        path = parent[:, :, None].expand(-1, -1, beams.shape[2])
        beams = torch.cat([beams.gather(1, path), tokens.view(bs, -1).gather(1, chosen)[:, :, None]], dim=2)
        scores = torch.cat([scores.gather(1, path), best[:, :, None]], dim=2)
    return beams, scores
