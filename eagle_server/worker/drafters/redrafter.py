"""ReDrafter: beam search with a recurrent head, the beams packed to a prefix tree."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from eagle_server.models.drafts.redrafter import RedrafterHead
from eagle_server.speculation.prefix_tree import beam_tree
from eagle_server.speculation.tree import Tree
from eagle_server.worker.batch.batch import DecodeBatch
from eagle_server.worker.batch.draft_ranking import BY_PROBABILITY, DraftRanking
from eagle_server.worker.drafters.feature import FeatureDrafter
from eagle_server.worker.drafters.interface import DrafterSetup


class RedrafterDrafter(FeatureDrafter):
    """Packs topk beams of num_steps tokens to a prefix tree, and keeps its best num_draft_tokens - 1 nodes.

    Raises:
        ValueError: the beams have fewer nodes than the tree should have, and no n-grams fill it.
    """

    def __init__(self, head: RedrafterHead, setup: DrafterSetup) -> None:
        super().__init__(setup)
        self.head, tree = head, setup.tree
        most = tree.num_steps * tree.topk + 1
        if tree.num_draft_tokens > most and not tree.ngram_depth:
            raise ValueError(
                f"--speculative-num-draft-tokens {tree.num_draft_tokens}: {tree.topk} beams of {tree.num_steps} tokens "
                f"have at most {most} nodes, the root included"
            )
        self.num_steps, self.beam_width, self.num_draft_tokens = (
            tree.num_steps,
            tree.topk,
            min(tree.num_draft_tokens, most),
        )

    def forwards(self, num_steps: int) -> int:
        return num_steps

    def propose(self, draft: Tensor, batch: DecodeBatch) -> Tree:
        key = self.graph_key("redrafter", batch)
        size = min(self.num_draft_tokens, batch.num_draft_tokens)
        function = partial(self._propose, batch.num_steps, size)
        return self.graphs.run(key, function, draft, batch.verified_id, batch.seq_lens, batch.ranking)

    def _propose(  # noqa: PLR0913, PLR0917
        self,
        num_steps: int,
        num_draft_tokens: int,
        context: Tensor,
        verified_id: Tensor,
        seq_lens: Tensor,
        ranking: DraftRanking,
    ) -> Tree:
        beam, scores = beam_search(self.head, context, verified_id, num_steps, self.beam_width, ranking)
        tree = beam_tree(beam, scores, seq_lens, num_draft_tokens)
        return ranking.without_refused(tree)


def beam_search(  # noqa: PLR0913, PLR0917
    head: RedrafterHead,
    context: Tensor,
    verified_id: Tensor,
    num_steps: int,
    width: int,
    ranking: DraftRanking = BY_PROBABILITY,
) -> tuple[Tensor, Tensor]:
    """Beam search: the `width` continuations of verified_id [bs] that it finds to have the best scores.

    Args:
        context: [bs, H], the target's feature of the position before verified_id.

    Returns:
        beams int64 [bs, width, num_steps + 1], the best one first, each with verified_id first; and the score of each
        of their prefixes, float32, of the same shape.
    """
    bs = len(verified_id)
    state = head.state(verified_id, None)
    logp, tokens = ranking.best(head.logits(context, state), width)  # one beam so far, with `width` children
    beams = torch.stack([verified_id[:, None].expand(-1, width), tokens], dim=-1)
    scores = torch.stack([torch.zeros_like(logp), logp], dim=-1)
    state, context = (x.repeat_interleave(width, dim=0) for x in (state, context))
    first = torch.arange(0, bs * width, width, device=verified_id.device)[:, None]
    chosen: Tensor | None = None
    for _ in range(num_steps - 1):
        ranking = ranking.advance(beams[:, :, -1], chosen, width)
        state = head.state(beams[:, :, -1].reshape(-1), state)
        logp, tokens = ranking.best(head.logits(context, state), width)
        totals = scores[:, :, -1:] + logp.view(bs, width, width)
        best, chosen = totals.flatten(1).topk(width, dim=1)
        parent = torch.div(chosen, width, rounding_mode="floor")  # [bs, width]
        state = state.index_select(0, (parent + first).view(-1))
        path = parent[:, :, None].expand(-1, -1, beams.shape[2])
        beams = torch.cat([beams.gather(1, path), tokens.view(bs, -1).gather(1, chosen)[:, :, None]], dim=2)
        scores = torch.cat([scores.gather(1, path), best[:, :, None]], dim=2)
    return beams, scores
