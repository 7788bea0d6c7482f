"""A smaller language model drafts the trees of an EAGLE head, from the text alone."""

from __future__ import annotations

from eagle_server.models.drafts.standalone import DraftLM
from eagle_server.speculation.draft_input import EagleDraftInput
from eagle_server.speculation.tree import Candidates
from eagle_server.worker.batch import DecodeBatch, Prompts
from eagle_server.worker.drafters.eagle import EagleDrafter


class StandaloneDrafter(EagleDrafter):
    """Multi-step top-k drafting with a `DraftLM`.

    A head stores the pair (token p + 1, feature of p) in slot p; a language model stores token p there. So it reads
    prompts as the target does, the first token included, and its extend ends with verified_id in slot seq_len, where a
    head's ends one slot earlier. Everything after that is a head's, one position further on.
    """

    head: DraftLM

    def prefill(self, prompts: Prompts) -> None:
        """Draft KV of prompt rows, causally."""
        batch = prompts.rows
        planned = self.attention.plan(batch.attention.layout).bind(batch.attention)
        self.head.model(batch.tokens, batch.positions, planned)

    def extend(self, batch: DecodeBatch) -> EagleDraftInput:
        """The accepted tokens and verified_id, written anew: what drafting left in their slots is another branch's."""
        return super().extend(batch.past_verified())

    def propose(self, draft: EagleDraftInput, batch: DecodeBatch) -> Candidates:
        return super().propose(draft, batch.past_verified())
