"""A draft head around another one, for tests that watch or change what it computes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from eagle_server.models.drafts.interface import DraftHead, DraftOutput


class WrappedHead(DraftHead):
    """Computes as `head` does, without native kernels."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.head, self.config = head, head.config
        self.algorithm, self.aux_boundaries = head.algorithm, head.aux_boundaries  # type: ignore[misc]

    @property
    def vocab_size(self) -> int:
        return self.head.vocab_size

    @property
    def draft_vocab_size(self) -> int:
        return self.head.draft_vocab_size

    def keep_rows(self, token_map: Tensor) -> None:
        self.head.keep_rows(token_map)

    def combine(self, features: Tensor) -> Tensor:
        return self.head.combine(features)

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attention: Any) -> DraftOutput:
        return self.head(tokens, hidden, positions, attention)

    def logits(self, normed: Tensor) -> Tensor:
        return self.head.logits(normed)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return self.head.target_ids(draft_ids)
