"""Plain decoding: every tree is only its root."""

from __future__ import annotations

from eagle_server.plan import TreeShape
from eagle_server.speculation.tree import Tree, root_alone
from eagle_server.worker.batch.batch import DecodeBatch, Prompts


class NoDrafter:
    """Proposes no nodes: verify has one row per request, and accept samples the next token."""

    uses_features = extends_ahead = proposes_ahead = reads_late = False
    steps, widest = 0, 1

    def forget(self, req_pool_index: int) -> None:
        return None

    def prefill(self, prompts: Prompts) -> None:
        return None

    def extend(self, batch: DecodeBatch) -> None:
        return None

    def propose(self, draft: None, batch: DecodeBatch) -> Tree:
        return root_alone(batch.verified_id, batch.seq_lens)

    def forwards(self, shape: TreeShape) -> tuple[int, int]:
        return 0, 0
