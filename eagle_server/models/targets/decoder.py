"""The decoder of every family: an embedding, the family's layers over paged KV, a norm and the lm_head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_server.attention.interface import BoundAttention
from eagle_server.models.config import ModelConfig
from eagle_server.models.layer_inputs import LayerInputs
from eagle_server.models.layers import Linear, Views, norm_of
from eagle_server.models.native_layers import native_decoder
from eagle_server.models.rope import RotaryEmbedding
from eagle_server.models.targets.interface import TargetOutput
from eagle_server.models.targets.registry import decoder_layer
from eagle_server.ops.native.decoder import NativeDecoder
from eagle_server.ops.native.drafting import HeadWeights, Residual


class TargetModel(nn.Module):
    """A `Target` of a family in the registry, or one rank's share of it.

    `context` is the number of positions in the RoPE table.
    """

    def __init__(self, config: ModelConfig, context: int) -> None:
        super().__init__()
        self.config = config
        self.ranks = None if config.split is None else config.split.ranks
        rows = config.vocab_size if self.ranks is None else -(-config.vocab_size // self.ranks.size)
        self.embed = nn.Parameter(torch.empty(rows, config.hidden_size))
        local = config.local_rope
        self.rope = RotaryEmbedding(config.rope, _head_dim(config, slides=local is None), context)
        self.local_rope = None if local is None else RotaryEmbedding(local, _head_dim(config, slides=True), context)
        inputs = config.layer_inputs
        self.layer_inputs = None if inputs is None else LayerInputs(config, inputs)
        self.layers = nn.ModuleList(decoder_layer(config, index) for index in range(config.num_layers))
        self.norm = norm_of(config, config.hidden_size)
        self.lm_head = Linear(config.hidden_size, [("lm_head", rows)])
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed
        self._native: NativeDecoder | None = None
        self._logits_dtype = config.logits_dtype

    def forward(
        self, tokens: Tensor, positions: Tensor, attention: BoundAttention, aux_boundaries: Sequence[int] = ()
    ) -> TargetOutput:
        """See `Target`."""
        x = self._embedded(tokens)
        inputs = None if self.layer_inputs is None else self.layer_inputs(tokens, x)  # [rows, layers, size]
        at_once = attention.decode(self._native, x, None, positions, aux_boundaries, inputs)
        if at_once is not None:
            hidden, _, aux = at_once
            return TargetOutput(hidden, None if aux is None else aux.to(x.dtype))
        rope = self.rope(positions, x.dtype)
        local_rope = rope if self.local_rope is None else self.local_rope(positions, x.dtype)
        aux = x.new_empty(len(x), len(aux_boundaries), x.shape[1])
        streams = {boundary: aux[:, number] for number, boundary in enumerate(aux_boundaries)}
        residual: Tensor | None = None
        for boundary, layer in enumerate(self.layers):
            if boundary in streams:  # a copy, because layers may overwrite their arguments
                out = streams[boundary]
                out.copy_(x) if residual is None else torch.add(residual, x, out=out)
            slides = bool(self.config.windows and self.config.windows[boundary])
            own = None if inputs is None else inputs[:, boundary]
            x, residual = layer(x, residual, local_rope if slides else rope, attention, own)
        hidden, stream = (self.norm(x), x) if residual is None else self.norm.after_add(x, residual)
        if len(self.layers) in streams:
            streams[len(self.layers)].copy_(stream)
        return TargetOutput(hidden, aux.flatten(1) if aux_boundaries else None)

    def _embedded(self, tokens: Tensor) -> Tensor:
        x, scale = self._looked_up(tokens), self.config.embed_scale
        return x if scale == 1.0 else x * x.new_tensor(scale)  # rounded to the dtype, as in transformers

    def _looked_up(self, tokens: Tensor) -> Tensor:
        if self.ranks is None:
            return F.embedding(tokens, self.embed)
        rows = tokens - self.ranks.rank * len(self.embed)
        is_own = (rows >= 0) & (rows < len(self.embed))
        own = F.embedding(rows.clamp(0, len(self.embed) - 1), self.embed)
        return self.ranks.sum(own.masked_fill(~is_own[:, None], 0.0))

    @property
    def is_fused(self) -> bool:
        """Whether one native call computes all layers."""
        return self._native is not None

    def fuse(self) -> None:
        """Compute all layers by one native call, if they are of that kind. `pack_linears` calls it."""
        self._native = native_decoder(self.layers, self.norm, self.rope, self.local_rope)

    def native_weights(self) -> HeadWeights | None:
        """The model as a draft, see `DraftHead`."""
        lm_head = self.lm_head.native
        if self._native is None or lm_head is None or self.layer_inputs is not None or self.config.logits_softcap:
            return None
        return HeadWeights(
            *(self._native, lm_head, self.embed),
            residual=Residual.JOINED,
            feeds_normed=True,
            uses_hidden=False,
            embed_scale=self.config.embed_scale,
        )

    @property
    def logits_dtype(self) -> torch.dtype:
        """Float32, or the model's dtype if logits are computed in it."""
        return torch.promote_types(self._logits_dtype, self.lm_head.output_dtype)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, hidden] -> [rows, vocab] in `logits_dtype`, written to `out` if there is one."""
        softcap, divisor = self.config.logits_softcap, self.config.logits_divisor
        inputs = hidden if divisor == 1 else hidden / divisor
        if out is not None and self.ranks is None and not softcap:
            return self.lm_head.write(inputs, out)  # without a copy
        logits: Tensor = self.lm_head(inputs)
        if self.ranks is not None:
            logits = self.ranks.gather(logits)[:, : self.config.vocab_size]  # without the padding of the last ranks
        if softcap:
            logits = softcap * torch.tanh(logits.float() / softcap)
        return logits.to(self.logits_dtype) if out is None else out.copy_(logits)

    def weight_views(self) -> Views:
        """Every checkpoint name with its view of a parameter."""
        yield "model.embed_tokens.weight", self.embed
        if self.layer_inputs is not None:
            yield from self.layer_inputs.weight_views()
        for index, layer in enumerate(self.layers):
            yield from layer.weight_views(f"model.layers.{index}.")  # type: ignore[operator]
        yield "model.norm.weight", self.norm.weight
        if not self.config.tie_word_embeddings:
            yield from self.lm_head.weight_views("")


def _head_dim(config: ModelConfig, *, slides: bool) -> int:
    """The head size of the layers with a sliding window, or without; `config.head_dim` if there are none."""
    kinds = [bool(window) == slides for window in config.windows or (0,) * config.num_layers]
    return config.kv_shape(kinds.index(True)).head_dim if any(kinds) else config.head_dim
