"""Medusa: each head predicts one further position, and a static tree combines their best tokens."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_server.models.drafts.medusa import MedusaHeads
from eagle_server.ops.topk import topk_logprobs
from eagle_server.speculation.static_tree import (
    Choices,
    choice_parents,
    depth_of,
    ranks_of,
    sorted_choices,
    static_tree,
)
from eagle_server.speculation.tree import TreeNodes
from eagle_server.worker.batch import DecodeBatch
from eagle_server.worker.draft_token_mask import DraftTokenMask
from eagle_server.worker.drafters.feature import FeatureDrafter
from eagle_server.worker.graphs import Graphs


class MedusaDrafter(FeatureDrafter):
    """Drafts the static tree `choices` for every request. The node of choice (.., r) at depth d is rank r of head d -
    1.

    `graph_sizes`: batch sizes that graphs are captured for.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        choices: Choices,
        *,
        device: torch.device,
        graphs: Graphs | None = None,
        graph_sizes: Collection[int] = (),
    ) -> None:
        super().__init__(graphs, graph_sizes)
        self.heads, self.num_steps, self.ranks = heads, depth_of(choices), ranks_of(choices)
        # Each node's path as indices into the heads' best tokens, [head * ranks + rank], its own token last. Shorter
        # paths are padded in front with an index past all of them, whose score is 0.
        padding = self.num_steps * self.ranks
        paths = [[head * self.ranks + rank for head, rank in enumerate(choice)] for choice in sorted_choices(choices)]
        padded = [[padding] * (self.num_steps - len(path)) + path for path in paths]
        self._paths = torch.tensor(padded, device=device)  # [n, num_steps]
        self._parents = torch.tensor([choice_parents(choices)], device=device)  # [1, n]
        self._levels = static_tree(choices, device).levels

    def propose(self, draft: Tensor, batch: DecodeBatch) -> TreeNodes:
        size = len(batch.seq_lens_host)
        if batch.token_mask.is_active:
            tokens, scores = self._grow(draft, batch.token_mask)
        else:
            tokens, scores = self.graphs.run(self.graph_key("medusa", batch), self._best, draft)
        return TreeNodes(tokens, self._parents.expand(size, -1), spec_steps=self.num_steps, scores=scores)

    def _best(self, feature: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of the tree's nodes and the log-probabilities of their paths, [bs, n]."""
        logits: Tensor = self.heads(feature, self.num_steps)  # [num_steps, bs, V]
        logp, ids = (
            each.unflatten(0, (self.num_steps, -1)).transpose(0, 1).flatten(1)  # [bs, num_steps * ranks]
            for each in topk_logprobs(logits.flatten(0, 1), self.ranks)
        )
        steps = F.pad(logp, (0, 1)).index_select(1, self._paths.view(-1)).unflatten(1, self._paths.shape)
        return ids.index_select(1, self._paths[:, -1]), steps.sum(-1)

    def _grow(self, feature: Tensor, token_mask: DraftTokenMask) -> tuple[Tensor, Tensor]:
        """The same level by level under token masks: each node has its own best tokens of a head."""
        bs = len(feature)
        above = torch.zeros(bs, 1, device=feature.device)  # path scores of the nodes that have children
        tokens, scores = list[Tensor](), list[Tensor]()
        logits: Tensor = self.heads(feature, self.num_steps)  # [num_steps, bs, V]
        for depth, (level, of_head) in enumerate(zip(self._levels, logits, strict=True)):
            if depth:
                before = self._levels[depth - 1]
                above = scores[-1].index_select(1, before.fed)
                token_mask = token_mask.advance(tokens[-1].index_select(1, before.fed), before.parents.expand(bs, -1))
            logp, ids = token_mask.best(of_head.repeat_interleave(above.shape[1], dim=0), self.ranks)
            paths = above[:, :, None] + logp.view(bs, -1, self.ranks)
            tokens.append(ids.view(bs, -1).index_select(1, level.picks))
            scores.append(paths.flatten(1).index_select(1, level.picks))
        found, worth = torch.cat(tokens, dim=1), torch.cat(scores, dim=1)
        return token_mask.without_refused(found, worth), worth
