"""Plain decoding: every tree is only its root."""

from __future__ import annotations

from eagle_server.speculation.accept import Accepted
from eagle_server.speculation.tree import Candidates, EagleVerifyInput
from eagle_server.worker.batch import DecodeBatch, Prompts


class NoDrafter:
    """Proposes no nodes: verify has one row per request, and accept samples the next token."""

    uses_features = extends_ahead = False

    def forget(self, req_pool_index: int) -> None:
        return None

    def prefill(self, prompts: Prompts) -> None:
        return None

    def extend(self, batch: DecodeBatch) -> None:
        return None

    def propose(self, draft: None, batch: DecodeBatch) -> Candidates:
        empty = batch.req_pool_indices.new_empty(len(batch.seq_lens_host), 0)
        return Candidates(empty, empty, empty, topk=1, spec_steps=0, scores=empty.float())

    def forwards(self, num_steps: int) -> int:  # noqa: ARG002
        return 0

    def observe(self, batch: DecodeBatch, tree: EagleVerifyInput, accepted: Accepted) -> None:
        return None
