"""Medusa: each head predicts one further position, and a static tree combines their best tokens."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_server.models.drafts.medusa import MedusaHeads
from eagle_server.speculation.static_tree import (
    choice_parents,
    ranks_of,
    sorted_choices,
    static_tree,
    steps_of,
)
from eagle_server.speculation.tree import Tree, build_tree
from eagle_server.worker.batch.batch import DecodeBatch
from eagle_server.worker.batch.draft_ranking import DraftRanking, finite_or_off
from eagle_server.worker.drafters.feature import FeatureProposer, NewestFeature
from eagle_server.worker.drafters.interface import DrafterSetup, ModelDrafter, vocabulary_of


def medusa_drafter(heads: MedusaHeads, setup: DrafterSetup) -> ModelDrafter[Tensor]:
    return ModelDrafter(NewestFeature(), MedusaTree(heads, setup))


class MedusaTree(FeatureProposer):
    """Drafts the static tree of `choices` for every request: the node of choice (.., r) at depth d has rank r of head
    d - 1.
    """

    def __init__(self, heads: MedusaHeads, setup: DrafterSetup) -> None:
        super().__init__(setup)
        choices, device = setup.tree.choices, setup.device
        self.vocabulary = vocabulary_of(heads, device)
        self.heads, self.steps, self.ranks = heads, steps_of(choices), ranks_of(choices)
        # Each node's path as indices into the heads' best tokens, [head * ranks + rank], its own token last. Shorter
        # paths are padded in front with an index past all of them, whose score is 0.
        padding = self.steps * self.ranks
        paths = [[head * self.ranks + rank for head, rank in enumerate(choice)] for choice in sorted_choices(choices)]
        padded = [[padding] * (self.steps - len(path)) + path for path in paths]
        self._paths = torch.tensor(padded, device=device)  # [n, steps]
        self._parents = torch.tensor([choice_parents(choices)], device=device)  # [1, n]
        self._levels = static_tree(choices, device).levels
        depths = [len(choice) for choice in sorted_choices(choices)]
        self._counts = [sum(depth <= steps for depth in depths) for steps in range(self.steps + 1)]

    def propose(self, draft: Tensor, batch: DecodeBatch) -> Tree:
        """The levels of the static tree that the cycle wants."""
        steps = min(batch.steps, self.steps)
        if batch.ranking.has_grammars:
            tokens, scores = self._grow(steps, draft, batch.ranking)
        else:
            function = partial(self._best, steps)
            tokens, scores = self.graphs.run(self.graph_key("medusa", batch), function, draft, batch.ranking)
        parents = self._parents[:, : tokens.shape[1]].expand(len(tokens), -1)
        tree = build_tree(batch.verified_id, batch.seq_lens, tokens, parents, steps, scores)
        return batch.ranking.without_refused(tree)

    def _best(self, steps: int, feature: Tensor, ranking: DraftRanking) -> tuple[Tensor, Tensor]:
        """The tokens of the tree's nodes down to depth `steps`, and the scores of their paths, [bs, n]."""
        logp, ids = list[Tensor](), list[Tensor]()
        logits: Tensor = self.heads(feature, steps)  # [steps, bs, V]
        for of_head in logits:
            best, head_ids = ranking.best(of_head, self.ranks, self.vocabulary)  # [bs, ranks]
            logp.append(best)
            ids.append(head_ids)
            ranking = ranking.deeper()
        unused = (self.steps - steps) * self.ranks
        path_logp = F.pad(finite_or_off(torch.cat(logp, dim=1)), (0, unused + 1))
        paths = self._paths[: self._counts[steps]]
        on_paths = path_logp.index_select(1, paths.reshape(-1)).unflatten(1, paths.shape)
        tokens, scores = torch.cat(ids, dim=1).index_select(1, paths[:, -1]), on_paths.sum(-1)
        return tokens, scores

    def _grow(self, steps: int, feature: Tensor, ranking: DraftRanking) -> tuple[Tensor, Tensor]:
        """The same level by level under grammars: each node has its own best tokens of a head."""
        bs = len(feature)
        above = torch.zeros(bs, 1, device=feature.device)  # path scores of the nodes that have children
        tokens, scores = list[Tensor](), list[Tensor]()
        logits: Tensor = self.heads(feature, steps)  # [steps, bs, V]
        for depth, (level, of_head) in enumerate(zip(self._levels[:steps], logits, strict=True)):
            if depth:
                before = self._levels[depth - 1]
                above = scores[-1].index_select(1, before.fed)
                ranking = ranking.advance(tokens[-1].index_select(1, before.fed), before.parents.expand(bs, -1))
            logp, ids = ranking.best(of_head.repeat_interleave(above.shape[1], dim=0), self.ranks, self.vocabulary)
            paths = above[:, :, None] + logp.view(bs, -1, self.ranks)
            tokens.append(ids.view(bs, -1).index_select(1, level.picks))
            scores.append(paths.flatten(1).index_select(1, level.picks))
        return torch.cat(tokens, dim=1), torch.cat(scores, dim=1)
