"""A smaller language model as the drafter. It drafts trees as an EAGLE head does, from tokens alone."""

from __future__ import annotations

from dataclasses import replace

from eagle_server.attention.spec_info import EagleDraftInput
from eagle_server.models.drafts.standalone import DraftLM
from eagle_server.speculation.tree import Tree
from eagle_server.worker.batch.batch import DecodeBatch, Prompts
from eagle_server.worker.drafters.eagle import EagleDrafter


class StandaloneDrafter(EagleDrafter):
    """Multi-step top-k drafting with a `DraftLM`.

    A head stores the pair (token p + 1, feature of p) in slot p. A language model stores token p there. So it reads the
    prompt as the target does, first token included. Its draft-extend ends with verified_id in slot seq_len; a head's
    ends one slot earlier. After that it drafts as a head does, one position later.
    """

    extends_ahead = False  # its last row is one slot later, which may not be allocated yet
    reads_late = False  # it reads the first token too, which has no feature before it
    head: DraftLM

    def prefill(self, prompts: Prompts) -> None:
        """Draft KV of prompt rows, causally."""
        batch = prompts.rows
        bound = self.attention.plan(batch.attention.layout).bind(batch.attention)
        if self._native is not None and bound.native_rows is not None:
            self._native.prefill(batch.tokens, None, batch.positions, bound.native_rows)
        else:
            self.head.model(batch.tokens, batch.positions, bound)

    def extend(self, batch: DecodeBatch) -> EagleDraftInput:
        """Recompute the accepted tokens and verified_id: drafting may have left another branch's KV in their slots."""
        return super().extend(batch.past_verified())

    def propose(self, draft: EagleDraftInput, batch: DecodeBatch) -> Tree:
        tree = super().propose(draft, batch.past_verified())
        return replace(tree, positions=batch.seq_lens[:, None] + tree.depths)
