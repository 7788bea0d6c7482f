"""A smaller language model with the target's vocabulary, as a draft."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from eagle_server.attention.interface import BoundAttention
from eagle_server.models.drafts.interface import DraftHead, DraftOutput
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.models.targets.interface import Target
from eagle_server.ops.native.drafting import HeadWeights


class DraftLM(DraftHead):
    """Reads only the text. It ignores features and feedback.

    Models of one family often have embeddings of several sizes for one tokenizer: some rows are padding. Rows that the
    target does not have are never drafted, and tokens that the draft does not have are read as its last one.
    """

    algorithm = "STANDALONE"

    def __init__(self, model: Target, vocab_size: int | None = None) -> None:
        """`vocab_size`: the target's; None: the model's own."""
        super().__init__()
        self.model, self.config = model, model.config
        self._rows, wanted = model.config.vocab_size, vocab_size or model.config.vocab_size
        self._drafted = min(self._rows, wanted)
        if self._rows < wanted and isinstance(model, TargetModel):  # native kernels look a token up without a check
            last = model.embed.detach()[-1:].expand(wanted - self._rows, -1)
            model.embed = nn.Parameter(torch.cat([model.embed.detach(), last]), requires_grad=False)

    @property
    def is_fused(self) -> bool:
        return self.model.is_fused

    @property
    def vocab_size(self) -> int:
        return self._drafted

    @property
    def why_no_token_map(self) -> str | None:
        return None if isinstance(self.model, TargetModel) else "transformers' code computes this draft's logits"

    def keep_rows(self, token_map: Tensor) -> None:
        assert isinstance(self.model, TargetModel), "`why_no_token_map` says so"
        self.model.lm_head = self.model.lm_head.with_rows(token_map)

    def combine(self, features: Tensor) -> Tensor:
        return features

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attention: BoundAttention) -> DraftOutput:
        """tokens, positions [rows] -> hidden states [rows, H], for both fields of the output. Ignores `hidden`."""
        out = self.model(tokens.clamp(max=self._rows - 1), positions, attention)
        return DraftOutput(out.hidden, out.hidden)

    def native_weights(self) -> HeadWeights | None:
        weights = self.model.native_weights() if isinstance(self.model, TargetModel) else None
        if weights is None or self.token_map is not None or self._drafted == self._rows:
            return weights
        lm_head, bias = weights.lm_head
        return replace(weights, lm_head=(lm_head.rows_until(self._drafted), bias))

    def logits(self, normed: Tensor) -> Tensor:
        return self.model.logits(normed)[:, : self.draft_vocab_size]
