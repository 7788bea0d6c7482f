"""Common base of the heads that read the target's post-norm hidden state: EAGLE-1/2 and MTP.

Embedding and lm_head are the target's, unless the checkpoint has its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_server.models.config import ModelConfig
from eagle_server.models.drafts.interface import DraftHead, TargetWeights
from eagle_server.models.layers import Linear, RMSNorm
from eagle_server.ops.native.decoder import NativeDecoder
from eagle_server.ops.native.drafting import HeadWeights, Residual


class PostNormHead(DraftHead):
    """A `DraftHead` without its layers. Shared weights are not registered, so they are not trained or saved."""

    def __init__(self, config: ModelConfig, target: TargetWeights, *, own_embed: bool, own_lm_head: bool) -> None:
        super().__init__()
        self.config = config
        self._target = target
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embed = nn.Parameter(torch.empty(vocab, hidden)) if own_embed else None
        self.lm_head = Linear(hidden, [("lm_head", vocab)]) if own_lm_head else None

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def keep_rows(self, token_map: Tensor) -> None:
        self.lm_head = self._draft_head().with_rows(token_map)

    def combine(self, features: Tensor) -> Tensor:
        """features [rows, H], unchanged: the feature is already the hidden state."""
        return features

    def embedded(self, tokens: Tensor) -> Tensor:
        """Target ids [rows] -> [rows, H]."""
        return F.embedding(tokens, self._target.embed if self.embed is None else self.embed)

    def logits(self, normed: Tensor) -> Tensor:
        """[rows, H] -> [rows, V], or [rows, Vd] with a token map."""
        return self._draft_head()(normed)  # type: ignore[no-any-return]

    def joined_weights(
        self,
        decoder: NativeDecoder | None,
        joined: Linear,
        embed_norm: RMSNorm | None = None,
        hidden_norm: RMSNorm | None = None,
    ) -> HeadWeights | None:
        """The head for the native kernels, if `joined` maps embedding and hidden state to the decoder's input."""
        lm_head, native = self._draft_head().native, joined.native
        if decoder is None or lm_head is None or native is None:
            return None
        return HeadWeights(
            decoder,
            lm_head,
            self._target.embed if self.embed is None else self.embed,
            residual=Residual.JOINED,
            feeds_normed=True,
            joined=native,
            embed_norm=None if embed_norm is None else embed_norm.gain,
            hidden_norm=None if hidden_norm is None else hidden_norm.gain,
        )

    def _draft_head(self) -> Linear:
        return self._target.lm_head if self.lm_head is None else self.lm_head
