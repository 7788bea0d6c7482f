"""The EAGLE-1/2 draft head: one Llama layer without an input norm over fc(cat(embedding of t+1, feature of t)).

    h = fc(cat(e(t+1), f[t]))        f: the target's post-norm hidden state; in later passes this head's own output
    u = h + attn(h)
    y = u + mlp(post_attention_layernorm(u))
    logits = target_lm_head(y);  feedback = y

Source: EAGLE (arXiv 2401.15077); EAGLE-2 drafts differently with the same checkpoint. With an FR-Spec token map
(arXiv 2502.14856) the logits are those of the listed rows of the target's head only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_server.attention.interface import Planned
from eagle_server.models.config import ModelConfig
from eagle_server.models.draft import DraftOutput, TargetWeights
from eagle_server.models.layers import Attention, DecoderLayer, GatedMLP, Linear, RMSNorm, Views
from eagle_server.models.rope import RotaryEmbedding


@dataclass(frozen=True)
class EagleConfig:
    """What an EAGLE-1/2 checkpoint says of itself; `layers.hidden_size` equals the target's."""

    layers: ModelConfig
    fc_bias: bool = True
    own_embed: bool = False
    own_lm_head: bool = False


class EagleLayer(nn.Module):
    """The first layer; its attention input is not normalized."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(config, 0, config.hidden_size)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attention: Planned) -> Tensor:
        x = x + self.attention(x, rope, attention)
        return x + self.mlp(self.post_norm(x))  # type: ignore[no-any-return]

    def weight_views(self, prefix: str) -> Views:
        yield f"{prefix}post_attention_layernorm.weight", self.post_norm.weight
        yield from self.attention.weight_views(f"{prefix}self_attn.")
        yield from self.mlp.weight_views(f"{prefix}mlp.")


class EagleHead(nn.Module):
    """A `DraftHead`; what it borrows from the target is not registered, so it is not trained or saved."""

    def __init__(self, config: EagleConfig, context: int, target: TargetWeights) -> None:
        super().__init__()
        self.eagle, self.config = config, config.layers
        self.aux_boundaries: tuple[int, ...] = ()
        self._target = target
        vocab, hidden = config.layers.vocab_size, config.layers.hidden_size
        self.embed = nn.Parameter(torch.empty(vocab, hidden)) if config.own_embed else None
        self.fc = Linear(2 * hidden, [("fc", hidden)], bias=config.fc_bias)
        self.rope = RotaryEmbedding(config.layers.rope, config.layers.head_dim, context)
        plain = (DecoderLayer(config.layers, index) for index in range(1, config.layers.num_layers))
        self.layers = nn.ModuleList([EagleLayer(config.layers), *plain])
        self.lm_head = Linear(hidden, [("lm_head", vocab)]) if config.own_lm_head else None
        self.mapped_head: Linear | None = None
        self.token_map: Tensor | None
        self.register_buffer("token_map", None, persistent=False)

    def restrict_vocabulary(self, token_map: Tensor) -> None:
        """Draft the target ids `token_map` int64 [Vd] only, by their rows of the full head; once that is loaded."""
        full = self._full_head().dense_weight()
        self.token_map = token_map.to(full.device)
        self.mapped_head = Linear(full.shape[1], [("lm_head", len(token_map))])
        self.mapped_head.weight = nn.Parameter(full[self.token_map], requires_grad=False)

    @property
    def draft_vocab_size(self) -> int:
        return self.config.vocab_size if self.token_map is None else len(self.token_map)

    def combine(self, features: Tensor) -> Tensor:
        """[rows, H], unchanged: an EAGLE-1 feature is the hidden state itself."""
        return features

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attention: Planned) -> DraftOutput:
        """tokens, positions [rows], hidden [rows, H] -> feedback and normed [rows, H], which are the same here."""
        embedded = F.embedding(tokens, self._target.embed if self.embed is None else self.embed)
        rope = self.rope(positions, embedded.dtype)
        x: Tensor = self.fc(torch.cat([embedded, hidden], dim=-1))
        for layer in self.layers:
            x = layer(x, rope, attention)
        return DraftOutput(x, x)

    def logits(self, normed: Tensor) -> Tensor:
        """[rows, H] -> [rows, V], or [rows, Vd] under a token map, in float32."""
        head = self._full_head() if self.mapped_head is None else self.mapped_head
        return head(normed).float()  # type: ignore[no-any-return]

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft ids, any shape -> target ids, int64."""
        ids = draft_ids.long()
        return ids if self.token_map is None else self.token_map[ids]

    def weight_views(self) -> Views:
        """Every published name with its place in this head."""
        if self.embed is not None:
            yield "embed_tokens.weight", self.embed
        yield from self.fc.weight_views("")
        for index, layer in enumerate(self.layers):
            yield from layer.weight_views(f"layers.{index}.")  # type: ignore[operator]
        if self.lm_head is not None:
            yield from self.lm_head.weight_views("")

    def _full_head(self) -> Linear:
        return self._target.lm_head if self.lm_head is None else self.lm_head
