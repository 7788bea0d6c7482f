"""The multi-token prediction layer (NextN) in the checkpoint of a target, in DeepSeek-V3's format.

    x = eh_proj(cat(enorm(e(t+1)), hnorm(f[t])))     f: the target's post-norm hidden state; later: the feedback
    z = shared_head.norm(layer(x))                   one more decoder layer of the target's family
    logits = shared_head.head(z);  feedback = z

Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2, and its published weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle_server.attention.interface import BoundAttention
from eagle_server.models.config import ModelConfig
from eagle_server.models.drafts.interface import DraftOutput, TargetWeights
from eagle_server.models.drafts.post_norm_head import PostNormHead
from eagle_server.models.layers import Linear, RMSNorm, Views, native_decoder
from eagle_server.models.rope import RotaryEmbedding
from eagle_server.models.targets.registry import decoder_layer
from eagle_server.ops.native_decoder import NativeDecoder
from eagle_server.ops.native_drafting import HeadWeights


@dataclass(frozen=True)
class MtpConfig:
    """layers: the config of the one layer. index: its number in the files, the target's `num_hidden_layers`."""

    layers: ModelConfig
    index: int
    own_embed: bool = False
    own_lm_head: bool = False

    @classmethod
    def of(cls, model: ModelConfig, index: int) -> MtpConfig:
        """The MTP layer of a target with the config `model`. If the target has experts, this layer has them too."""
        moe = None if model.moe is None else replace(model.moe, first_dense_layers=0)
        return cls(replace(model, num_layers=1, windows=(), moe=moe, tie_word_embeddings=False, nextn_layers=0), index)


class MtpHead(PostNormHead):
    algorithm = "NEXTN"

    def __init__(self, config: MtpConfig, context: int, target: TargetWeights) -> None:
        super().__init__(config.layers, target, own_embed=config.own_embed, own_lm_head=config.own_lm_head)
        self.mtp, layers = config, config.layers
        hidden, eps = layers.hidden_size, layers.rms_norm_eps
        self.embed_norm, self.hidden_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.eh_proj = Linear(2 * hidden, [("eh_proj", hidden)])
        self.rope = RotaryEmbedding(layers.rope, layers.head_dim, context)
        self.layer = decoder_layer(layers, 0)
        self.norm = RMSNorm(hidden, eps)
        self._native: NativeDecoder | None = None

    def fuse(self) -> None:
        """See `Fusable`."""
        self._native = native_decoder([self.layer], self.norm, self.rope)

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attention: BoundAttention) -> DraftOutput:
        """tokens, positions [rows], hidden [rows, H] -> feedback and normed [rows, H], equal in this head."""
        pair = torch.cat([self.embed_norm(self.embedded(tokens)), self.hidden_norm(hidden)], dim=-1)  # [rows, 2H]
        x = self.eh_proj(pair)
        at_once = attention.decode(self._native, x, None, positions)
        if at_once is not None:
            normed, _, _ = at_once
            return DraftOutput(normed.to(x.dtype), normed)
        normed, _ = self.norm.after_add(*self.layer(x, None, self.rope(positions, x.dtype), attention))
        return DraftOutput(normed, normed)

    def native_weights(self) -> HeadWeights | None:
        return self.joined_weights(self._native, self.eh_proj, self.embed_norm, self.hidden_norm)

    def weight_views(self) -> Views:
        """Every published name with its view of a parameter."""
        prefix = f"model.layers.{self.mtp.index}."
        if self.embed is not None:
            yield f"{prefix}embed_tokens.weight", self.embed
        yield f"{prefix}enorm.weight", self.embed_norm.weight
        yield f"{prefix}hnorm.weight", self.hidden_norm.weight
        yield from self.eh_proj.weight_views(prefix)
        yield from self.layer.weight_views(prefix)
        yield f"{prefix}shared_head.norm.weight", self.norm.weight
        if self.lm_head is not None:
            yield f"{prefix}shared_head.head.weight", self.lm_head.dense_weight()
