"""Gemma 4's assistant: a few Gemma 4 layers that attend to the target's own keys and values, and write none.

    x = pre(cat(sqrt(H) e(token), h))        h: the target's post-norm hidden state, later the feedback
    y = norm(layers(x)), each attending to the target's last layer of its kind, all at the position of the root
    feedback = post(y), logits = W y

With centroids, logits are computed of the tokens of the best ones alone. So a draft has no prefill, no KV and no state,
and a node depends on its ancestors by token and feedback alone.

Source: transformers' Gemma4AssistantForCausalLM and SinglePositionMultiTokenCandidateGenerator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_server.attention.interface import BoundAttention
from eagle_server.models.config import ModelConfig
from eagle_server.models.drafts.interface import DraftModel, DraftOutput, TargetWeights
from eagle_server.models.layers import Linear, Views, norm_of
from eagle_server.models.native_layers import native_decoder
from eagle_server.models.rope import RotaryEmbedding
from eagle_server.models.targets.gemma4 import gemma4_layer
from eagle_server.ops.native.decoder import NativeDecoder


@dataclass(frozen=True)
class AssistantConfig:
    """Sizes of an assistant. layers: its decoder, over the target's KV pool. centroids 0: it has none."""

    layers: ModelConfig
    target_hidden_size: int
    centroids: int = 0
    best_centroids: int = 0


class Gemma4Assistant(DraftModel):
    """See the head of this file."""

    algorithm = "FROZEN_KV_MTP"
    reads_target_kv = True

    def __init__(self, config: AssistantConfig, context: int, target: TargetWeights) -> None:
        super().__init__()
        own, outer = config.layers, config.target_hidden_size
        assert own.local_rope is not None, "Gemma 4 has a RoPE for each kind of layer"
        self.head_config, self.config, self._target = config, own, target
        self.pre = Linear(2 * outer, [("pre_projection", own.hidden_size)])
        self.layers = nn.ModuleList(gemma4_layer(own, index) for index in range(own.num_layers))
        self.norm = norm_of(own, own.hidden_size)
        self.post = Linear(own.hidden_size, [("post_projection", outer)])
        count, vocab = config.centroids, own.vocab_size
        self.lm_head = None if count else Linear(own.hidden_size, [("embed_tokens", vocab)])
        self.rows = nn.Parameter(torch.empty(vocab, own.hidden_size)) if count else None  # single rows are read
        self.centroids = Linear(own.hidden_size, [("masked_embedding.centroids", count)]) if count else None
        self.token_ordering: Tensor | None
        ordering = torch.zeros(vocab, dtype=torch.int64) if count else None
        self.register_buffer("token_ordering", ordering, persistent=False)
        dims = {bool(own.windows[i]): own.kv_shape(i).head_dim for i in range(own.num_layers)}
        self.rope = RotaryEmbedding(own.rope, dims.get(False, own.head_dim), context)
        self.local_rope = RotaryEmbedding(own.local_rope, dims.get(True, own.head_dim), context)
        self._native: NativeDecoder | None = None

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def why_no_token_map(self) -> str | None:
        return "this assistant's centroids choose the tokens that it scores" if self.centroids is not None else None

    def keep_rows(self, token_map: Tensor) -> None:
        assert self.lm_head is not None, "without centroids all logits are computed"
        self.lm_head = self.lm_head.with_rows(token_map)

    @property
    def is_fused(self) -> bool:
        """Whether one native call computes all layers."""
        return self._native is not None

    def fuse(self) -> None:
        """See `TargetModel.fuse`."""
        self._native = native_decoder(self.layers, self.norm, self.rope, self.local_rope)

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attention: BoundAttention) -> DraftOutput:
        """tokens, positions [rows], hidden [rows, Ht] -> the next hidden, and the input of the logits."""
        embedded = F.embedding(tokens, self._target.embed)
        embedded = embedded * embedded.new_tensor(self.head_config.target_hidden_size**0.5)
        x = self.pre(torch.cat([embedded, hidden.to(embedded.dtype)], dim=1)).to(embedded.dtype)
        at_once = attention.decode(self._native, x, None, positions)
        if at_once is not None:
            normed = at_once[0]
        else:
            rope, local_rope = self.rope(positions, x.dtype), self.local_rope(positions, x.dtype)
            residual: Tensor | None = None
            for index, layer in enumerate(self.layers):
                x, residual = layer(x, residual, local_rope if self.config.windows[index] else rope, attention)
            normed = self.norm(x)
        return DraftOutput(self.post(normed), normed)

    def logits(self, normed: Tensor) -> Tensor:
        """[rows, H] -> [rows, draft vocabulary]; -inf for tokens of other centroids."""
        if self.centroids is None or self.token_ordering is None or self.rows is None:
            assert self.lm_head is not None, "without centroids all logits are computed"
            return self.lm_head(normed)  # type: ignore[no-any-return]
        best = self.centroids(normed).topk(self.head_config.best_centroids, dim=1).indices
        tokens = self.token_ordering.view(self.head_config.centroids, -1)[best].flatten(1)  # [rows, n]
        weight = self.rows[tokens]  # [rows, n, H]
        chosen = torch.bmm(weight, normed.to(weight.dtype).unsqueeze(2)).squeeze(2).float()
        full = chosen.new_full((len(normed), self.config.vocab_size), float("-inf"))
        return full.scatter_(1, tokens, chosen)

    def weight_views(self) -> Views:
        """Every published name with its view of a parameter or buffer."""
        if self.lm_head is not None:
            yield from self.lm_head.weight_views("model.")
        yield from self.pre.weight_views("")
        yield from self.post.weight_views("")
        for index, layer in enumerate(self.layers):
            yield from layer.weight_views(f"model.layers.{index}.")  # type: ignore[operator]
        yield "model.norm.weight", self.norm.weight
        if self.centroids is not None and self.token_ordering is not None and self.rows is not None:
            yield "model.embed_tokens.weight", self.rows
            yield from self.centroids.weight_views("")
            yield "masked_embedding.token_ordering", self.token_ordering
