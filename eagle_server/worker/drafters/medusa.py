"""Medusa: heads that guess several positions at once, in a static tree of their best tokens."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from eagle_server.models.medusa_head import MedusaHeads
from eagle_server.ops.topk import topk_logprobs
from eagle_server.speculation.accept import Accepted
from eagle_server.speculation.medusa import choice_parents, sorted_choices
from eagle_server.speculation.medusa_choices import Choices, depth_of, ranks_of
from eagle_server.speculation.tree import EagleVerifyInput, TreeNodes
from eagle_server.worker.batch import DecodeBatch, PromptFeatures
from eagle_server.worker.graphs import Graphs


class MedusaDrafter:
    """Drafts the tree `choices` for every request; a node of choice (.., r) at depth d is rank r of head d - 1.

    It has no KV and no memory of a text but the target's newest feature. `graph_sizes`: batch sizes that graphs are
    captured for.
    """

    feeds = True

    def __init__(
        self,
        heads: MedusaHeads,
        choices: Choices,
        *,
        device: torch.device,
        graphs: Graphs | None = None,
        graph_sizes: Collection[int] = (),
    ) -> None:
        self.heads, self.depth, self.ranks = heads, depth_of(choices), ranks_of(choices)
        self.graphs, self.graph_sizes = graphs or Graphs(), frozenset(graph_sizes)
        places = [(len(choice) - 1) * self.ranks + choice[-1] for choice in sorted_choices(choices)]
        self._places = torch.tensor(places, device=device)  # [n], of the best tokens of all heads
        self._parents = torch.tensor([choice_parents(choices)], device=device)  # [1, n]

    def forget(self, row: int) -> None:
        """Nothing is kept by row."""

    def prefill(self, prompts: PromptFeatures) -> None:
        """Nothing is learned from prompts: the newest feature knows them."""

    def extend(self, batch: DecodeBatch) -> Tensor:
        """The feature [bs, H] of the position before each verified_id."""
        tokens, features = batch.carry.take(batch.rows, batch.extend_width)
        first = torch.arange(0, len(tokens), batch.extend_width, device=tokens.device)
        return features.index_select(0, first + batch.counts - 1)

    def propose(self, draft: Tensor, batch: DecodeBatch) -> TreeNodes:
        size = len(batch.seq_lens_host)
        key = ("medusa", size) if size in self.graph_sizes else None
        tokens = self.graphs.run(key, self._best, draft)
        return TreeNodes(tokens, self._parents.expand(size, -1), spec_steps=self.depth)

    def observe(self, batch: DecodeBatch, tree: EagleVerifyInput, accepted: Accepted) -> None:
        """It learns nothing while it serves."""

    def _best(self, feature: Tensor) -> Tensor:
        """The tokens [bs, n] of the tree's nodes."""
        logits: Tensor = self.heads(feature, self.depth)  # [depth, bs, V]
        _, ids = topk_logprobs(logits.flatten(0, 1), self.ranks)
        flat: Tensor = ids.unflatten(0, (self.depth, -1)).transpose(0, 1).flatten(1)  # [bs, depth * ranks]
        return flat.index_select(1, self._places)
