"""What drafters share that read nothing but the target's newest feature: no KV, no memory of a text."""

from __future__ import annotations

from collections.abc import Collection, Hashable

import torch
from torch import Tensor

from eagle_server.speculation.accept import Accepted
from eagle_server.speculation.tree import EagleVerifyInput
from eagle_server.worker.batch import DecodeBatch, Prompts
from eagle_server.worker.graphs import Graphs


class FeatureDrafter:
    """All of a `Drafter` but `propose`. `graph_sizes`: batch sizes that graphs are captured for."""

    feeds = True

    def __init__(self, graphs: Graphs | None, graph_sizes: Collection[int]) -> None:
        self.graphs, self.graph_sizes = graphs or Graphs(), frozenset(graph_sizes)

    def forget(self, row: int) -> None:
        """Nothing is kept by row."""

    def prefill(self, prompts: Prompts) -> None:
        """Nothing is learned from prompts: the newest feature knows them."""

    def extend(self, batch: DecodeBatch) -> Tensor:
        """The feature [bs, H] of the position before each verified_id."""
        tokens, features = batch.accepted_tokens.take(batch.req_pool_indices, batch.extend_width)
        first = torch.arange(0, len(tokens), batch.extend_width, device=tokens.device)
        return features.index_select(0, first + batch.extend_lens - 1)

    def observe(self, batch: DecodeBatch, tree: EagleVerifyInput, accepted: Accepted) -> None:
        """It learns nothing while it serves."""

    def graph_key(self, name: str, batch: DecodeBatch) -> Hashable | None:
        """The key of this batch's graph, None where there is none."""
        size = len(batch.seq_lens_host)
        return (name, size) if size in self.graph_sizes and not batch.token_mask.is_active else None
