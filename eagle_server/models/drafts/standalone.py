"""A smaller language model with the target's vocabulary, as a draft."""

from __future__ import annotations

from torch import Tensor

from eagle_server.attention.interface import BoundAttention
from eagle_server.models.drafts.interface import DraftHead, DraftOutput
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.models.targets.interface import Target
from eagle_server.ops.native.drafting import HeadWeights


class DraftLM(DraftHead):
    """Reads only the text. It ignores features and feedback."""

    algorithm = "STANDALONE"

    def __init__(self, model: Target) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    @property
    def is_fused(self) -> bool:
        return self.model.is_fused

    @property
    def draft_vocab_size(self) -> int:
        return self.config.vocab_size

    def combine(self, features: Tensor) -> Tensor:
        return features

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attention: BoundAttention) -> DraftOutput:
        """tokens, positions [rows] -> hidden states [rows, H], for both fields of the output. Ignores `hidden`."""
        out = self.model(tokens, positions, attention)
        return DraftOutput(out.hidden, out.hidden)

    def native_weights(self) -> HeadWeights | None:
        return self.model.native_weights() if isinstance(self.model, TargetModel) else None

    def logits(self, normed: Tensor) -> Tensor:
        return self.model.logits(normed)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids.long()
