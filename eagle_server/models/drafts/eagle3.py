"""The EAGLE-3 draft head. Flags select the variants of EAGLE-3.1 and speculators.

A slot pairs the embedding of token t+1 with n residual streams of the target at t. Its RoPE position is t:

    g = fc(N(cat(aux low -> high)))              first pass; in later passes g is the feedback of the previous pass
    r = g, or hidden_norm(g) if norm_before_residual
    u = r + attn(cat(input_layernorm(e(t+1)), hidden_norm(g)))
    y = u + mlp(post_attention_layernorm(u))     then further Llama layers, if there are any
    logits = lm_head(norm(y)) over the draft vocabulary;  feedback = y, or norm(y) if norm_output

Source: EAGLE-3 (arXiv 2503.01840) and the published checkpoints of EAGLE, SpecForge and speculators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from eagle_server.attention.interface import BoundAttention
from eagle_server.models.config import ModelConfig
from eagle_server.models.drafts.interface import DraftHead, DraftOutput, HeadConfig, TargetWeights
from eagle_server.models.layers import Attention, GatedMLP, Linear, RMSNorm, Views
from eagle_server.models.native_layers import native_decoder
from eagle_server.models.rope import RotaryEmbedding
from eagle_server.models.targets.llama import llama_layer
from eagle_server.ops.layers.fused import Rotation
from eagle_server.ops.layers.normed_pairs import PairNorms, normed_pairs
from eagle_server.ops.native.decoder import NativeDecoder
from eagle_server.ops.native.drafting import HeadWeights, Residual

FeatureNorm = Literal["none", "each", "concat"]


@dataclass(frozen=True)
class Eagle3Config(HeadConfig):
    """Sizes and flags of an EAGLE-3 head.

    layers: the decoder. Its vocab_size is the target's.
    aux_boundaries: the n residual streams that `fc` takes. If empty (`use_aux_hidden_state: false`), there is no `fc`,
        and the feature is the target's post-norm hidden state.
    feature_norm: N above, on nothing ("none"), on each stream ("each", fc_norm) or on all ("concat", norm_before_fc).
    vocab_map: whether d2t and t2d are part of the checkpoint.
    """

    target_hidden_size: int
    draft_vocab_size: int
    aux_boundaries: tuple[int, ...]
    fc_bias: bool = False
    norm_before_residual: bool = False
    feature_norm: FeatureNorm = "none"
    norm_output: bool = False
    own_lm_head: bool = field(default=True, kw_only=True)
    vocab_map: bool = False


class Eagle3Layer(nn.Module):
    """The first layer. Its attention reads cat(normed embedding, normed feature), so the input is 2H wide.

    It returns two summands (see `DecoderLayer`).
    """

    def __init__(self, config: ModelConfig, *, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, 0, 2 * config.hidden_size)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def forward(
        self, pair: Tensor, residual: Tensor, rope: Rotation, attention: BoundAttention
    ) -> tuple[Tensor, Tensor]:
        """What `inputs` returns -> two summands of the residual stream [rows, H]. May overwrite its arguments."""
        normed, residual = self.post_norm.after_add(self.attention(pair, rope, attention), residual)
        return self.mlp(normed), residual

    def inputs(
        self, tokens: Tensor, embed: Tensor, hidden: Tensor, parents: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The input of attention [rows, 2H], and the residual stream before it [rows, H].

        parents: see `DraftHead.step`. `hidden` stays as it is, whatever is done to the results.
        """
        norms = PairNorms(self.input_norm.weight, self.hidden_norm.weight, self.hidden_norm.eps)
        return normed_pairs(tokens, embed, hidden, norms, parents, keeps_normed=self.norm_before_residual)

    def weight_views(self, prefix: str) -> Views:
        yield f"{prefix}input_layernorm.weight", self.input_norm.weight
        yield f"{prefix}hidden_norm.weight", self.hidden_norm.weight
        yield f"{prefix}post_attention_layernorm.weight", self.post_norm.weight
        yield from self.attention.weight_views(f"{prefix}self_attn.")
        yield from self.mlp.weight_views(f"{prefix}mlp.")


class Eagle3Head(DraftHead):
    """Weights shared with the target are not registered, so they are not trained or saved."""

    algorithm = "EAGLE3"

    def __init__(self, config: Eagle3Config, context: int, target: TargetWeights) -> None:
        super().__init__()
        self.eagle, self.config = config, config.layers
        self.aux_boundaries = config.aux_boundaries
        self._target = target
        self._native: NativeDecoder | None = None
        hidden, eps = config.layers.hidden_size, config.layers.rms_norm_eps
        self.embed = nn.Parameter(torch.empty(config.layers.vocab_size, hidden)) if config.own_embed else None
        self.feature_norms = nn.ModuleList(RMSNorm(size, eps) for size in _feature_norm_sizes(config))
        width = len(config.aux_boundaries) * config.target_hidden_size
        self.fc = Linear(width, [("fc", hidden)], bias=config.fc_bias) if config.aux_boundaries else None
        self.rope = RotaryEmbedding(config.layers.rope, config.layers.head_dim, context)
        plain = (llama_layer(config.layers, index) for index in range(1, config.layers.num_layers))
        first = Eagle3Layer(config.layers, norm_before_residual=config.norm_before_residual)
        self.layers = nn.ModuleList([first, *plain])
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = Linear(hidden, [("lm_head", config.draft_vocab_size)]) if config.own_lm_head else None
        self.d2t: Tensor | None
        self.t2d: Tensor | None
        mapped = config.vocab_map
        offsets = torch.zeros(config.draft_vocab_size, dtype=torch.int64) if mapped else None
        self.register_buffer("d2t", offsets, persistent=mapped)
        used = torch.zeros(config.layers.vocab_size, dtype=torch.bool) if mapped else None
        self.register_buffer("t2d", used, persistent=mapped)

    def fuse(self) -> None:
        """See `Fusable`."""
        self._native = native_decoder(self.layers, self.norm, self.rope)

    def native_weights(self) -> HeadWeights | None:
        first, embed = self.layers[0], self._target.embed if self.embed is None else self.embed
        assert isinstance(first, Eagle3Layer)
        lm_head = self._draft_head().native
        combine = None if self.fc is None else self.fc.native
        unknown = self._native is None or lm_head is None or (self.fc is not None and combine is None)
        if unknown or self.feature_norms or embed.shape[1] != self.config.hidden_size:
            return None
        assert self._native is not None and lm_head is not None
        return HeadWeights(
            self._native,
            lm_head,
            embed,
            residual=Residual.NORMED_HIDDEN if self.eagle.norm_before_residual else Residual.HIDDEN,
            feeds_normed=self.eagle.norm_output,
            combine=combine,
            embed_norm=first.input_norm.weight,
            hidden_norm=first.hidden_norm.weight,
        )

    @property
    def vocab_size(self) -> int:
        return self.eagle.draft_vocab_size

    @property
    def why_no_token_map(self) -> str | None:
        return None if self.d2t is None else f"this head drafts {self.vocab_size} tokens of its own (d2t)"

    def keep_rows(self, token_map: Tensor) -> None:
        self.lm_head = self._draft_head().with_rows(token_map)

    def combine(self, features: Tensor) -> Tensor:
        """Target features [rows, n * Ht] -> hidden [rows, H]. For the first pass only."""
        if self.fc is None:
            return features
        if self.feature_norms:
            slices = features.chunk(len(self.feature_norms), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.feature_norms, slices, strict=True)], dim=-1)
        return self.fc(features)  # type: ignore[no-any-return]

    def step(
        self,
        level: int,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        attention: BoundAttention,
        parents: Tensor | None = None,
        *,
        is_last: bool = False,
    ) -> DraftOutput:
        """See `DraftHead`. All levels are computed alike."""
        return self(tokens, hidden, positions, attention, parents)  # type: ignore[no-any-return]

    def forward(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        attention: BoundAttention,
        parents: Tensor | None = None,
    ) -> DraftOutput:
        """tokens, positions [rows], hidden [.., H] -> feedback and normed [rows, H]. parents: see `DraftHead.step`."""
        embed = self._target.embed if self.embed is None else self.embed
        first, *rest = self.layers
        assert isinstance(first, Eagle3Layer)
        pair, residual = first.inputs(tokens, embed, hidden, parents)
        at_once = attention.decode(self._native, pair, residual, positions)
        if at_once is not None:
            normed, stream, _ = at_once
            feedback = normed if self.eagle.norm_output else stream
            return DraftOutput(feedback.to(embed.dtype), normed)
        rope = self.rope(positions, embed.dtype)
        x, residual = first(pair, residual, rope, attention)
        for layer in rest:
            x, residual = layer(x, residual, rope, attention)
        normed, stream = self.norm.after_add(x, residual)
        return DraftOutput(normed if self.eagle.norm_output else stream, normed)

    def logits(self, normed: Tensor) -> Tensor:
        """[rows, H] -> [rows, Vd]."""
        return self._draft_head()(normed)  # type: ignore[no-any-return]

    def _draft_head(self) -> Linear:
        return self._target.lm_head if self.lm_head is None else self.lm_head

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft ids, any shape -> target ids, int64. `d2t` holds offsets."""
        ids = super().target_ids(draft_ids)
        return ids if self.d2t is None else ids + self.d2t[ids]

    def set_vocabulary(self, target_ids: Tensor) -> None:
        """Map draft id i to `target_ids[i]` (distinct, int64 [Vd]). A trainer calls this once."""
        if self.d2t is None or self.t2d is None:
            raise ValueError("this head has no vocabulary map; build it with Eagle3Config(vocab_map=True)")
        self.d2t.copy_(target_ids - torch.arange(len(target_ids), device=target_ids.device))
        self.t2d.zero_()
        self.t2d[target_ids] = True

    def weight_views(self) -> Views:
        """Every published name with its view of a parameter. A single layer is `midlayer`, several are `layers.{i}`."""
        if self.embed is not None:
            yield "embed_tokens.weight", self.embed
        if self.fc is not None:
            yield from self.fc.weight_views("")
        names = _feature_norm_names(self.eagle)
        for name, norm in zip(names, self.feature_norms, strict=True):
            yield f"{name}.weight", norm.weight  # type: ignore[misc]
        for index, layer in enumerate(self.layers):
            prefix = "midlayer." if len(self.layers) == 1 else f"layers.{index}."
            yield from layer.weight_views(prefix)  # type: ignore[operator]
        yield "norm.weight", self.norm.weight
        if self.lm_head is not None:
            yield from self.lm_head.weight_views("")
        if self.d2t is not None and self.t2d is not None:
            yield "d2t", self.d2t
            yield "t2d", self.t2d


def _feature_norm_sizes(config: Eagle3Config) -> Sequence[int]:
    count = len(config.aux_boundaries)
    if config.feature_norm == "each":
        return [config.target_hidden_size] * count
    return [config.target_hidden_size * count] if config.feature_norm == "concat" else []


def _feature_norm_names(config: Eagle3Config) -> Sequence[str]:
    if config.feature_norm == "each":
        return [f"fc_norm.{index}" for index in range(len(config.aux_boundaries))]
    return ["input_norm"] if config.feature_norm == "concat" else []
