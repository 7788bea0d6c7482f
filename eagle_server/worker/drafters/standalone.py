"""A smaller language model as the drafter. It drafts trees as an EAGLE head does, from tokens alone.

A head stores the pair (token p + 1, feature of p) in slot p. A language model stores token p there. So it reads the
prompt as the target does, first token included. Its draft-extend ends with verified_id in slot seq_len; a head's ends
one slot earlier. After that it drafts as a head does, one position later.
"""

from __future__ import annotations

from dataclasses import replace

from eagle_server.attention.spec_info import EagleDraftInput
from eagle_server.models.drafts.standalone import DraftLM
from eagle_server.plan import TreeShape
from eagle_server.speculation.tree import Tree
from eagle_server.speculation.tree_config import TreeConfig
from eagle_server.worker.batch.batch import DecodeBatch, Prompts
from eagle_server.worker.drafters.eagle import multi_step, pair_reader
from eagle_server.worker.drafters.interface import DrafterSetup, ModelDrafter
from eagle_server.worker.drafters.multi_step import MultiStep
from eagle_server.worker.drafters.pairs import PairReader


def lookahead(tree: TreeConfig) -> int:
    """KV slots after a request's text: verified_id's, and behind it rows of draft-extend, then nodes in their place."""
    return 1 + max(tree.steps, (tree.model_steps - 1) * tree.topk)


def standalone_drafter(model: DraftLM, setup: DrafterSetup) -> ModelDrafter[EagleDraftInput]:
    """Multi-step top-k drafting with a `DraftLM`."""
    pairs = pair_reader(model, setup, MultiStep.step_rows(setup.tree))
    return ModelDrafter(OwnTokens(pairs), PastVerified(multi_step(pairs, setup)))


class OwnTokens:
    """Reads a text's tokens with the draft's own hidden states in place of the target's features."""

    uses_features = True  # of which it reads the tokens
    extends_ahead = False  # its last row is one slot later, which may not be allocated yet
    reads_late = False  # it reads the first token too, which has no feature before it

    def __init__(self, pairs: PairReader) -> None:
        self.pairs = pairs

    def forget(self, req_pool_index: int) -> None:
        self.pairs.forget(req_pool_index)

    def prefill(self, prompts: Prompts) -> None:
        """Draft KV of prompt rows, causally."""
        self.pairs.read(prompts.rows, None)

    def extend(self, batch: DecodeBatch) -> EagleDraftInput:
        """Recompute the accepted tokens and verified_id: drafting may have left another branch's KV in their slots."""
        return self.pairs.extend(batch.past_verified())


class PastVerified:
    """Drafts one position later than a head."""

    def __init__(self, multi_step: MultiStep) -> None:
        self.multi_step, self.steps = multi_step, multi_step.steps
        self.widest, self.proposes_ahead = multi_step.widest, multi_step.proposes_ahead

    def propose(self, draft: EagleDraftInput, batch: DecodeBatch) -> Tree:
        tree = self.multi_step.propose(draft, batch.past_verified())
        return replace(tree, positions=batch.seq_lens[:, None] + tree.depths)

    def forwards(self, shape: TreeShape) -> tuple[int, int]:
        return self.multi_step.forwards(shape)
