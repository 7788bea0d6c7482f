"""The multi-token prediction layers (NextN) in the checkpoint of a target of any family.

    x_k = eh_proj(cat(enorm(e(t+1)), hnorm(s_k)))    layer k = 0 .. n - 1 at position t; one more layer of the family
    z_k = shared_head.norm(layer(x_k));  logits = shared_head.head(z_k)
    s_0 = f[t], the target's feature: the hidden state after its final norm
    s_k = z_{k-1} at the row before, which is the parent in a tree

MiMo-V2's feature is the residual stream before that norm, and all its layers read the target's: s_k = s_{k-1} at the
row before.

At a row all layers read the same token, and write their KV to the same slot. Layer k drafts level k + 1 of a tree.
Deeper levels than n are the last layer's, too, with s = z_{n-1} of the parent. Before a text s_k is zero, which makes k
rows at its start that layer k was not trained with; transformers has none there.

Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2, and its published weights. GLM-4.5 (arXiv 2508.06471) has the same.
transformers' `MtpModel` computes it for every family; it numbers the rows of layer k by t - k.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eagle_server.attention.interface import BoundAttention
from eagle_server.models.config import ModelConfig
from eagle_server.models.drafts.interface import DraftOutput, HeadConfig, TargetWeights
from eagle_server.models.drafts.post_norm_head import PostNormHead
from eagle_server.models.layers import Linear, Views, norm_of
from eagle_server.models.native_layers import native_decoder
from eagle_server.models.rope import RotaryEmbedding
from eagle_server.models.targets.registry import decoder_layer, mtp_traits
from eagle_server.ops.native.decoder import NativeDecoder
from eagle_server.ops.native.drafting import HeadWeights


@dataclass(frozen=True)
class MtpConfig(HeadConfig):
    """layers: of the MTP layers. index: the first one's number in files, which is the target's `num_hidden_layers`.

    boundary: the target's residual stream that is the feature, see `DraftModel`; the layers pass on their streams, too.
    None: hidden states after the last norm. chained: see `MtpTraits`.
    """

    index: int
    boundary: int | None = None
    chained: bool = True

    @classmethod
    def of(cls, model: ModelConfig, index: int, count: int = 1) -> MtpConfig:
        """The MTP layers of a target with the config `model`."""
        traits = mtp_traits(model.architecture)
        boundary = model.num_layers if traits.before_norm else None
        return cls(traits.layers(model, count), index, boundary=boundary, chained=traits.chained)


class MtpLayer(nn.Module):
    """One MTP layer: the norms of both inputs, their projection, a decoder layer and its norm."""

    def __init__(self, config: ModelConfig, number: int, rope: RotaryEmbedding) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.embed_norm, self.hidden_norm = norm_of(config, hidden), norm_of(config, hidden)
        self.eh_proj = Linear(2 * hidden, [("eh_proj", hidden)])
        self.block, self.norm, self.rope = decoder_layer(config, number), norm_of(config, hidden), rope
        self.native: NativeDecoder | None = None

    def forward(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, attention: BoundAttention
    ) -> tuple[Tensor, Tensor]:
        """embedded, hidden [rows, H], positions [rows] -> the residual stream [rows, H], normed and as it is."""
        x = self.eh_proj(torch.cat([self.embed_norm(embedded), self.hidden_norm(hidden)], dim=-1))
        at_once = attention.decode(self.native, x, None, positions)
        if at_once is not None:
            return at_once[0], at_once[1]
        return self.norm.after_add(*self.block(x, None, self.rope(positions, x.dtype), attention))

    def weight_views(self, prefix: str) -> Views:
        yield f"{prefix}enorm.weight", self.embed_norm.weight
        yield f"{prefix}hnorm.weight", self.hidden_norm.weight
        yield from self.eh_proj.weight_views(prefix)
        yield from self.block.weight_views(prefix)  # type: ignore[operator]
        yield f"{prefix}shared_head.norm.weight", self.norm.weight


class MtpHead(PostNormHead):
    algorithm = "NEXTN"

    def __init__(self, config: MtpConfig, context: int, target: TargetWeights) -> None:
        super().__init__(config.layers, target, own_embed=config.own_embed, own_lm_head=config.own_lm_head)
        self.mtp, layers = config, config.layers
        self.aux_boundaries = () if config.boundary is None else (config.boundary,)
        self.num_layers = layers.num_layers
        rope = RotaryEmbedding(layers.rope, layers.head_dim, context)
        self.layers = nn.ModuleList(MtpLayer(layers, number, rope) for number in range(self.num_layers))

    def fuse(self) -> None:
        """See `Fusable`."""
        for layer in self._layers():
            layer.native = native_decoder([layer.block], layer.norm, layer.rope)

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attention: BoundAttention) -> DraftOutput:
        """The first layer. tokens, positions [rows], hidden [rows, H] -> feedback and normed [rows, H]."""
        embedded = self.embedded(tokens)
        normed, stream = self._layers()[0](embedded, hidden, positions, attention)
        return DraftOutput((normed if self.mtp.boundary is None else stream).to(embedded.dtype), normed)

    def extend(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        attention: BoundAttention,
        row_before: Callable[[int, Tensor], Tensor] | None = None,
    ) -> DraftOutput:
        """See `DraftHead`. feedback [rows, layers * H]: what every layer passes on."""
        if row_before is None:
            return self.forward(tokens, features, positions, attention)
        embedded, hidden, outputs, passed = self.embedded(tokens), features, list[Tensor](), list[Tensor]()
        for number, layer in enumerate(self._layers()):
            normed, stream = layer(embedded, hidden, positions, attention)
            outputs.append(normed)
            passed.append(self._passed_on(number, hidden, normed, stream))
            if number < self.num_layers - 1:
                hidden = row_before(number, passed[-1])
        return DraftOutput(torch.cat(passed, dim=1), outputs[0])

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
        """See `DraftHead`. hidden [.., layers * H], the parents' feedback. Later layers write KV of these rows."""
        if parents is not None:
            hidden = hidden.index_select(0, parents)
        if self.num_layers == 1:
            return self.forward(tokens, hidden, positions, attention)
        embedded, kept, last = self.embedded(tokens), list(hidden.chunk(self.num_layers, dim=1)), self.num_layers - 1
        first, of_parents, outputs = min(level, last), kept[min(level - 1, last) :], list[Tensor]()
        numbers = range(first, first + 1 if is_last else self.num_layers)
        for number, read in zip(numbers, of_parents, strict=False):
            normed, stream = self._layers()[number](embedded, read, positions, attention)
            outputs.append(normed)
            kept[number] = self._passed_on(number, read, normed, stream)
        return DraftOutput(torch.cat(kept, dim=1), outputs[0])

    def draft(
        self, level: int, tokens: Tensor, hidden: Tensor, positions: Tensor, attention: BoundAttention
    ) -> DraftOutput:
        """See `DraftHead`. The last layer drafts all deeper levels."""
        number = min(level, self.num_layers - 1)
        normed, stream = self._layers()[number](self.embedded(tokens), hidden, positions, attention)
        return DraftOutput(self._passed_on(number, hidden, normed, stream), normed)

    def _passed_on(self, number: int, read: Tensor, normed: Tensor, stream: Tensor) -> Tensor:
        """What the next layer reads of layer `number`, which read `read`. The last one reads its own output."""
        if not self.mtp.chained and number < self.num_layers - 1:
            return read
        return (normed if self.mtp.boundary is None else stream).to(self.config.dtype)

    def native_weights(self) -> HeadWeights | None:
        """For one layer that reads normed states only. Several are computed by a call for each layer."""
        if self.num_layers > 1 or self.mtp.boundary is not None:
            return None
        layer = self._layers()[0]
        return self.joined_weights(layer.native, layer.eh_proj, layer.embed_norm, layer.hidden_norm)

    def weight_views(self) -> Views:
        """Every published name with its view of a parameter."""
        prefix = f"model.layers.{self.mtp.index}."
        if self.embed is not None:
            yield f"{prefix}embed_tokens.weight", self.embed
        for number, layer in enumerate(self._layers()):
            yield from layer.weight_views(f"model.layers.{self.mtp.index + number}.")
        if self.lm_head is not None:
            yield f"{prefix}shared_head.head.weight", self.lm_head.dense_weight()

    def _layers(self) -> list[MtpLayer]:
        return list(self.layers)  # type: ignore[arg-type]
