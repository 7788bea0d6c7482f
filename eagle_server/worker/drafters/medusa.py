"""Medusa: heads that guess several positions at once, in a static tree of their best tokens."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from eagle_server.models.medusa_head import MedusaHeads
from eagle_server.ops.topk import topk_logprobs
from eagle_server.speculation.medusa import choice_parents, sorted_choices
from eagle_server.speculation.medusa_choices import Choices, depth_of, ranks_of
from eagle_server.speculation.tree import TreeNodes
from eagle_server.worker.batch import DecodeBatch
from eagle_server.worker.drafters.from_feature import FeatureDrafter
from eagle_server.worker.graphs import Graphs


class MedusaDrafter(FeatureDrafter):
    """Drafts the tree `choices` for every request; a node of choice (.., r) at depth d is rank r of head d - 1.

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
        self.heads, self.depth, self.ranks = heads, depth_of(choices), ranks_of(choices)
        places = [(len(choice) - 1) * self.ranks + choice[-1] for choice in sorted_choices(choices)]
        self._places = torch.tensor(places, device=device)  # [n], of the best tokens of all heads
        self._parents = torch.tensor([choice_parents(choices)], device=device)  # [1, n]

    def propose(self, draft: Tensor, batch: DecodeBatch) -> TreeNodes:
        size = len(batch.seq_lens_host)
        tokens = self.graphs.run(self.graph_key("medusa", batch), self._best, draft)
        return TreeNodes(tokens, self._parents.expand(size, -1), spec_steps=self.depth)

    def _best(self, feature: Tensor) -> Tensor:
        """The tokens [bs, n] of the tree's nodes."""
        logits: Tensor = self.heads(feature, self.depth)  # [depth, bs, V]
        _, ids = topk_logprobs(logits.flatten(0, 1), self.ranks)
        flat: Tensor = ids.unflatten(0, (self.depth, -1)).transpose(0, 1).flatten(1)  # [bs, depth * ranks]
        return flat.index_select(1, self._places)
