"""Multi-head latent attention with absorbed weights: all heads attend to one compressed KV, which is never expanded.

Let c be the normed latent. The key of a head is W_UK c, and a rotary part that all heads share. Its value is W_UV c.
As q . (W_UK c) = (W_UK^T q) . c, queries are projected into the latent space, and outputs are projected back:

    q' = cat(W_UK^T q_nope, rope(q_pe))      k' = cat(c, rope(k_pe))      v' = c
    o = W_UV attention(q', k', v')

So all heads share one key of kv_lora_rank + qk_rope_head_dim numbers. Its first kv_lora_rank numbers are the value.

Source: DeepSeek-V2 (arXiv 2405.04434).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from eagle_server.attention.interface import BoundAttention, LayerSpec
from eagle_server.models.config import MLAConfig, ModelConfig
from eagle_server.models.layers import Linear, RMSNorm, Views
from eagle_server.models.ranks import summed
from eagle_server.models.rope import RotaryEmbedding
from eagle_server.ops.layers.fused import Rotation, apply_rope_pair
from eagle_server.ops.native.decoder import AttentionShape, AttentionWeights, LatentWeights

_EPS = 1e-6  # eps of the norms in the bottlenecks; rms_norm_eps is for all other norms


class MLAAttention(nn.Module):
    """`attention.run` takes q [T, heads, rank + rope_dim] and k [T, 1, rank + rope_dim], returns [T, heads, rank]."""

    name = "self_attn"  # in checkpoints

    def __init__(self, config: ModelConfig, mla: MLAConfig, layer: int) -> None:
        super().__init__()
        self.mla, self.heads, hidden = mla, config.num_heads, config.hidden_size
        q_rank, kv_rank = mla.q_lora_rank, mla.kv_lora_rank
        parts = [] if q_rank is None else [("q_a_proj", q_rank)]
        parts.append(("kv_a_proj_with_mqa", kv_rank + mla.qk_rope_head_dim))
        self.down = Linear(hidden, parts, bias=config.qkv_bias)
        self.q_norm = None if q_rank is None else RMSNorm(q_rank, _EPS)
        q_rows = self.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        self.q = Linear(q_rank or hidden, [("q_proj" if q_rank is None else "q_b_proj", q_rows)])
        self.kv_norm = RMSNorm(kv_rank, _EPS)
        # For each head W_UK, then W_UV. Not a Linear, because a Linear is packed and this weight is used in halves.
        self.kv_b = nn.Parameter(torch.empty(self.heads * (mla.qk_nope_head_dim + mla.v_head_dim), kv_rank))
        self.o = Linear(self.heads * mla.v_head_dim, [("o_proj", hidden)], bias=config.o_bias)
        self.ranks = config.split.ranks if config.split is not None and config.split.attention else None
        self.spec = LayerSpec(layer, softmax_scale(config, mla))

    def forward(self, x: Tensor, rope: Rotation, attention: BoundAttention) -> Tensor:
        mla, rows, down = self.mla, x.shape[0], self.down(x)
        if self.q_norm is not None:
            narrow, down = down.split_with_sizes([mla.q_lora_rank, down.shape[1] - (mla.q_lora_rank or 0)], dim=1)
            x = self.q_norm(narrow)
            x = x if mla.q_scale == 1 else x * mla.q_scale
        latent, k_pe = down.split_with_sizes([mla.kv_lora_rank, mla.qk_rope_head_dim], dim=1)
        q_nope, q_pe = (
            self.q(x).view(rows, self.heads, -1).split_with_sizes([mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=2)
        )
        q_pe, k_pe = apply_rope_pair(q_pe, k_pe.unsqueeze(1), rope, interleaved=mla.rope_interleaved)
        w_uk, w_uv = self._halves()
        absorbed = torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)  # [T, heads, rank]
        latent = self.kv_norm(latent)
        latent = latent if mla.kv_scale == 1 else latent * mla.kv_scale
        q, k = torch.cat([absorbed, q_pe], dim=2), torch.cat([latent.unsqueeze(1), k_pe], dim=2)
        out = attention.run(q, k, k[..., : mla.kv_lora_rank], self.spec)
        values = torch.bmm(out.transpose(0, 1), w_uv.transpose(1, 2)).transpose(0, 1)  # [T, heads, v_head_dim]
        return summed(self.ranks, self.o(values.reshape(rows, -1)))

    def native_weights(self, rope: RotaryEmbedding, local_rope: RotaryEmbedding) -> AttentionWeights | None:
        """See `Mixer`."""
        mla, down, queries, out = self.mla, self.down.native, self.q.native, self.o.native
        dim = mla.kv_lora_rank + mla.qk_rope_head_dim
        if self.ranks is not None or down is None or queries is None or out is None or not AttentionShape.fits(dim):
            return None
        w_uk, w_uv = self._halves()
        latent = LatentWeights(
            queries,
            absorb=LatentWeights.by_head(w_uk.transpose(1, 2)),
            values=LatentWeights.by_head(w_uv),
            eps=_EPS,
            q_scale=mla.q_scale,
            kv_scale=mla.kv_scale,
            interleaved=mla.rope_interleaved,
        )
        return AttentionWeights(
            *(down, out),
            q_norm=None if self.q_norm is None else self.q_norm.gain,
            k_norm=self.kv_norm.gain,
            v_norm=None,
            gated=False,
            kv_layer=self.spec.index,
            cos=rope.cos,
            sin=rope.sin,
            shape=AttentionShape(self.heads, 1, dim, self.spec.scale, self.spec.softcap, self.spec.sliding_window),
            latent=latent,
        )

    def _halves(self) -> tuple[Tensor, Tensor]:
        """W_UK [heads, nope, rank] and W_UV [heads, v_head_dim, rank]."""
        mla = self.mla
        both = self.kv_b.view(self.heads, -1, mla.kv_lora_rank)
        w_uk, w_uv = both.split_with_sizes([mla.qk_nope_head_dim, mla.v_head_dim], dim=1)
        return w_uk, w_uv

    def weight_views(self, prefix: str) -> Views:
        yield from self.down.weight_views(prefix)
        yield from self.q.weight_views(prefix)
        if self.q_norm is not None:
            yield f"{prefix}q_a_layernorm.weight", self.q_norm.weight
        yield f"{prefix}kv_a_layernorm.weight", self.kv_norm.weight
        yield f"{prefix}kv_b_proj.weight", self.kv_b
        yield from self.o.weight_views(prefix)


def softmax_scale(config: ModelConfig, mla: MLAConfig) -> float:
    """1 / sqrt(query size of a head), times the square of YaRN's mscale for mscale_all_dim, as DeepSeek does."""
    scale, rope = 1 / math.sqrt(mla.qk_nope_head_dim + mla.qk_rope_head_dim), config.rope
    if rope.kind == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return scale
    mscale: float = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0
    return scale * mscale * mscale
