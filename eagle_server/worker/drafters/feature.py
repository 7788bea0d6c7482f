"""Reads only the target's newest feature: no KV, and no state of a text."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_server.plan import TreeShape
from eagle_server.speculation.tree_config import TreeConfig
from eagle_server.worker.batch.batch import DecodeBatch, Prompts
from eagle_server.worker.drafters.interface import DrafterSetup
from eagle_server.worker.graphs import GraphKey


def lookahead(tree: TreeConfig) -> int:
    """There is no KV."""
    return 0


class NewestFeature:
    """The newest feature depends on the whole text, so prompts need no work."""

    uses_features, extends_ahead, reads_late = True, False, False

    def forget(self, req_pool_index: int) -> None:
        """There is no state per request."""

    def prefill(self, prompts: Prompts) -> None:
        """Prompts need no work: the newest feature depends on all of them."""

    def extend(self, batch: DecodeBatch) -> Tensor:
        """The feature [bs, H] of the position before each verified_id."""
        tokens, features = batch.accepted_tokens.take(batch.req_pool_indices, batch.extend_width)
        first = torch.arange(0, len(tokens), batch.extend_width, device=tokens.device)
        return features.index_select(0, first + batch.extend_lens - 1)


class FeatureProposer:
    """All of a proposer over the newest feature but `propose`."""

    proposes_ahead, widest = False, 1

    def __init__(self, setup: DrafterSetup) -> None:
        self.graphs, self.graph_sizes = setup.graphs, frozenset(setup.graph_sizes)

    def forwards(self, shape: TreeShape) -> tuple[int, int]:
        """None depends on the shape."""
        return 0, 0

    def graph_key(self, name: str, batch: DecodeBatch) -> GraphKey | None:
        """The key of this batch's graph; None: it is not captured."""
        size = len(batch.seq_lens_host)
        captured = size in self.graph_sizes and not batch.ranking.has_grammars
        return (name, size, batch.steps, batch.nodes) if captured else None
