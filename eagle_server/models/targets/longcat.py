"""LongCat-Flash: layers that attend twice, with experts beside the second half, some of which give back their input.

    u = s + attention_0(norm(s));  e = experts(norm(u))
    v = u + mlp_0(norm(u))
    w = v + attention_1(norm(v));  s <- w + mlp_1(norm(w)) + e

Attention is DeepSeek's latent attention, with factors on the normed queries and KV. The MTP layer in its files attends
once and has an MLP alone. Source: transformers' longcat_flash (arXiv 2509.01322); for the MTP layer SGLang's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from eagle_server.attention.interface import BoundAttention
from eagle_server.models.config import CheckpointError, ModelConfig, MoEConfig
from eagle_server.models.config_json import integer
from eagle_server.models.layers import GatedMLP, Views, norm_of
from eagle_server.models.mla import MLAAttention
from eagle_server.models.moe import MixtureOfExperts
from eagle_server.models.targets.deepseek import latent_layer, with_mla
from eagle_server.models.targets.interface import MtpTraits, TargetFamily, own_layers
from eagle_server.ops.layers.fused import Rotation


class ShortcutLayer(nn.Module):
    """A layer of LongCat-Flash, called as a `DecoderLayer` is."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert config.mla is not None and config.moe is not None, "LongCat's config"
        mla, halves, first = config.mla, range(2), config.pool_layer(layer)
        self.input_norms = nn.ModuleList(norm_of(config, config.hidden_size) for _ in halves)
        self.attentions = nn.ModuleList(MLAAttention(config, mla, first + half) for half in halves)
        self.post_norms = nn.ModuleList(norm_of(config, config.hidden_size) for _ in halves)
        self.mlps = nn.ModuleList(GatedMLP(config) for _ in halves)
        self.experts = MixtureOfExperts(config, config.moe)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        rope: Rotation,
        attention: BoundAttention,
        layer_input: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer`."""
        shortcut: Tensor | None = None
        for norm, attend, post_norm, mlp in zip(
            self.input_norms, self.attentions, self.post_norms, self.mlps, strict=True
        ):
            normed, residual = (norm(x), x) if residual is None else norm.after_add(x, residual)  # type: ignore[operator]
            normed, residual = post_norm.after_add(attend(normed, rope, attention), residual)  # type: ignore[operator]
            if shortcut is None:
                shortcut = self.experts(normed)
            x = mlp(normed)
        assert residual is not None and shortcut is not None
        return x + shortcut, residual

    def weight_views(self, prefix: str) -> Views:
        lists = (("input_layernorm", self.input_norms), ("post_attention_layernorm", self.post_norms))
        for name, norms in lists:
            for half, norm in enumerate(norms):
                yield f"{prefix}{name}.{half}.weight", norm.weight  # type: ignore[misc]
        for name, modules in (("self_attn", self.attentions), ("mlps", self.mlps)):
            for half, module in enumerate(modules):
                yield from module.weight_views(f"{prefix}{name}.{half}.")  # type: ignore[operator]
        yield from self.experts.experts.weight_views(f"{prefix}mlp.experts.")
        router = self.experts.router
        yield f"{prefix}mlp.router.classifier.weight", router.weight
        assert router.correction_bias is not None, "LongCat's router"
        yield f"{prefix}mlp.router.e_score_correction_bias", router.correction_bias


def _add_flags(config: ModelConfig, raw: Mapping[str, Any], source: str) -> ModelConfig:
    if raw.get("router_bias"):
        raise CheckpointError(f"{source}: router_bias is not supported by this family")
    if raw.get("zero_expert_type") not in (None, "identity"):
        raise CheckpointError(
            f"{source}: zero_expert_type {raw['zero_expert_type']!r} is not supported, only 'identity'"
        )
    config = with_mla(config, raw, source)
    assert config.mla is not None and config.mla.q_lora_rank is not None
    ranks, experts = (config.mla.q_lora_rank, config.mla.kv_lora_rank), integer(raw, "n_routed_experts", source)
    scales = [(config.hidden_size / rank) ** 0.5 for rank in ranks]
    identities, chosen = int(raw.get("zero_expert_num") or 0), integer(raw, "num_experts_per_tok", source)
    if chosen > experts + identities:
        raise CheckpointError(f"{source}: moe_topk {chosen} is more than {experts + identities} experts")
    moe = MoEConfig(
        experts=experts,
        experts_per_token=chosen,
        intermediate_size=integer(raw, "moe_intermediate_size", source),
        shared_experts=0,
        dense_layers=frozenset(),
        scoring="softmax",
        routing="noaux_tc",
        groups=1,
        topk_groups=1,
        normalize=False,
        scale=float(raw.get("routed_scaling_factor") or 1.0),
        identities=identities,
    )
    states = tuple(2 * states for states in config.kept)
    return replace(config, mla=replace(config.mla, q_scale=scales[0], kv_scale=scales[1]), moe=moe, states=states)


def _layer(config: ModelConfig, layer: int) -> nn.Module:
    return latent_layer(config, layer) if config.moe is None else ShortcutLayer(config, layer)


def _mtp_layers(config: ModelConfig, count: int) -> ModelConfig:
    """They are DeepSeek's layers with an MLP: they attend once and have no experts."""
    return replace(own_layers(config, count), moe=None)


LONGCAT_FLASH = TargetFamily(
    "LongcatFlashForCausalLM",
    "longcat_flash",
    _add_flags,
    _layer,
    {"rms_norm_eps": 1e-5, "routed_scaling_factor": 6.0, "rope_theta": 10_000_000.0},
    mtp=MtpTraits(_mtp_layers),
    aliases={
        "num_layers": "num_hidden_layers",
        "ffn_hidden_size": "intermediate_size",
        "moe_topk": "num_experts_per_tok",
        "expert_ffn_hidden_size": "moe_intermediate_size",
    },
)
