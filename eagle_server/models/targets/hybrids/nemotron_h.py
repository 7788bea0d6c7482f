"""Nemotron-H and Nemotron 3: each layer is one of Mamba-2, attention without positions, an MLP, or experts.

    s <- s + mixer(norm(s))

MLPs and experts have no gate: down(relu(up(x))^2). Experts may work on a narrower copy of their input. An MTP layer is
two of the family's layers, attention and experts. Source: transformers' nemotron_h; for the MTP layer vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from eagle_server.attention.interface import BoundAttention
from eagle_server.models.config import CheckpointError, ModelConfig, RopeConfig, State
from eagle_server.models.config_json import integer
from eagle_server.models.layers import Attention, Linear, Views, norm_of
from eagle_server.models.mamba2 import Mamba2, step_limits
from eagle_server.models.moe import Experts, Router, native_experts
from eagle_server.models.native_layers import FeedForward, Mixer
from eagle_server.models.rope import RotaryEmbedding
from eagle_server.models.targets.deepseek import routed_experts
from eagle_server.models.targets.interface import MtpTraits, TargetFamily, own_layers
from eagle_server.ops.layers.fused import Rotation, squared_relu
from eagle_server.ops.native.decoder import FeedForwardWeights, LayerWeights
from eagle_server.ops.native.experts import NativeExperts
from eagle_server.ops.recurrent.nodes import RecurrentShape

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}  # of hybrid_override_pattern
_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}


@dataclass(frozen=True)
class NemotronHConfig:
    """What Nemotron-H has beside Mamba-2.

    kinds: of each layer: linear_attention, full_attention, mlp or moe.
    shared_width: of the MLP beside experts. latent_size: of the experts' inputs, 0: hidden_size. mtp_kinds: as kinds,
    of the layers that are one MTP layer together.
    """

    kinds: tuple[str, ...]
    shared_width: int
    latent_size: int
    mtp_kinds: tuple[str, ...] = ("full_attention", "moe")


class UngatedMLP(nn.Module):
    """down(relu(up(x))^2)."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.up = Linear(config.hidden_size, [("up_proj", width)], bias=config.mlp_bias)
        self.down = Linear(width, [("down_proj", config.hidden_size)], bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(squared_relu(self.up(x)))
        return y

    def native_weights(self) -> FeedForwardWeights | None:
        """See `FeedForward`."""
        up, down = self.up.native, self.down.native
        return None if up is None or down is None else FeedForwardWeights(up, down, activation="relu2")

    def weight_views(self, prefix: str) -> Views:
        yield from self.up.weight_views(prefix)
        yield from self.down.weight_views(prefix)


class UngatedExperts(nn.Module):
    """Experts without a gate, an MLP that sees every token, and projections to and from the experts' size."""

    def __init__(self, config: ModelConfig, own: NemotronHConfig) -> None:
        super().__init__()
        assert config.moe is not None, "a config with experts"
        moe, hidden, size = config.moe, config.hidden_size, own.latent_size or config.hidden_size
        self.router, self.experts = Router(moe, hidden), Experts(moe, size, "relu2")
        self.shared = UngatedMLP(config, own.shared_width)
        narrows, bias = own.latent_size > 0, config.mlp_bias
        self.narrow = Linear(hidden, [("fc1_latent_proj", size)], bias=bias) if narrows else None
        self.widen = Linear(size, [("fc2_latent_proj", hidden)], bias=bias) if narrows else None
        self._native: NativeExperts | None = None

    def forward(self, x: Tensor) -> Tensor:
        shared, native = self.shared(x), self._native_experts()
        inputs = x if self.narrow is None else self.narrow(x)
        mixed: Tensor = self.experts(inputs, *self.router(x)) if native is None else native(inputs, x)
        y: Tensor = shared + (mixed if self.widen is None else self.widen(mixed))
        return y

    def native_weights(self) -> FeedForwardWeights | None:
        """See `FeedForward`."""
        shared, experts = self.shared.native_weights(), self._native_experts()
        if shared is None or experts is None:
            return None
        narrow, widen = (None if each is None else each.native for each in (self.narrow, self.widen))
        if self.narrow is not None and (narrow is None or widen is None):
            return None
        return replace(shared, experts=experts, narrow=narrow, widen=widen)

    def _native_experts(self) -> NativeExperts | None:
        if self._native is None:
            self._native = native_experts(self.router, self.experts)
        return self._native

    def weight_views(self, prefix: str) -> Views:
        yield from self.router.weight_views(f"{prefix}gate.")
        yield from self.experts.weight_views(f"{prefix}experts.")
        yield from self.shared.weight_views(f"{prefix}shared_experts.")
        for projection in (self.narrow, self.widen):
            if projection is not None:
                yield from projection.weight_views(prefix)


class NemotronLayer(nn.Module):
    """A layer of Nemotron-H, called as a `DecoderLayer` is."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        own = config.own
        assert isinstance(own, NemotronHConfig)
        kind = own.kinds[layer]
        self.norm, self.mixes_rows = norm_of(config, config.hidden_size), kind in _OLDER.values()
        self.mixer: nn.Module
        if kind == "linear_attention":
            self.mixer = Mamba2(config, layer)
        elif kind == "full_attention":
            self.mixer = Attention(config, layer, config.hidden_size)
        else:
            self.mixer = UngatedMLP(config, config.intermediate_size) if kind == "mlp" else UngatedExperts(config, own)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        rope: Rotation,
        attention: BoundAttention,
        layer_input: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer`."""
        normed, residual = (self.norm(x), x) if residual is None else self.norm.after_add(x, residual)
        return self.mixer(normed, rope, attention) if self.mixes_rows else self.mixer(normed), residual

    def native_layer(self, rope: RotaryEmbedding, local_rope: RotaryEmbedding) -> LayerWeights | None:
        """See `NativeLayer`."""
        eps, gain = self.norm.eps, self.norm.gain
        if isinstance(self.mixer, FeedForward) and not self.mixes_rows:
            after = self.mixer.native_weights()
            return None if after is None else LayerWeights(None, after, eps, post_norm=gain)
        mixer = self.mixer.native_weights(rope, local_rope) if isinstance(self.mixer, Mixer) else None
        return None if mixer is None else LayerWeights(mixer, None, eps, input_norm=gain)

    def weight_views(self, prefix: str) -> Views:
        yield f"{prefix}norm.weight", self.norm.weight
        yield from self.mixer.weight_views(f"{prefix}mixer.")  # type: ignore[operator]


class NemotronMtpBlock(nn.Module):
    """The layers that are one MTP layer, called as a `DecoderLayer` is."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert isinstance(config.own, NemotronHConfig)
        self.parts = nn.ModuleList(NemotronLayer(config, layer) for layer in range(len(config.own.kinds)))

    def forward(
        self, x: Tensor, residual: Tensor | None, rope: Rotation, attention: BoundAttention
    ) -> tuple[Tensor, Tensor | None]:
        """See `DecoderLayer`."""
        for part in self.parts:
            x, residual = part(x, residual, rope, attention)
        return x, residual

    def weight_views(self, prefix: str) -> Views:
        for number, part in enumerate(self.parts):
            yield from part.weight_views(f"{prefix}parts.{number}.")  # type: ignore[operator]


def _layer(config: ModelConfig, layer: int) -> nn.Module:
    return NemotronMtpBlock(config) if config.recurrent is None else NemotronLayer(config, layer)


def _add_flags(config: ModelConfig, raw: Mapping[str, Any], source: str) -> ModelConfig:
    kinds = _kinds(raw, source)
    if len(kinds) != config.num_layers:
        raise CheckpointError(
            f"{source}: num_hidden_layers {config.num_layers} beside the kinds of {len(kinds)} layers"
        )
    if (raw.get("mlp_hidden_act") or "relu2") != "relu2":
        raise CheckpointError(f"{source}: mlp_hidden_act {raw['mlp_hidden_act']!r} is not supported, only 'relu2' is")
    heads, groups = integer(raw, "mamba_num_heads", source), integer(raw, "n_groups", source)
    if heads % groups:
        raise CheckpointError(f"{source}: mamba_num_heads {heads} is no multiple of n_groups {groups}")
    shape = RecurrentShape(
        key_heads=groups,
        value_heads=heads,
        key_dim=integer(raw, "ssm_state_size", source),
        value_dim=integer(raw, "mamba_head_dim", source),
        kernel=integer(raw, "conv_kernel", source),
        rule="ssd",
        steps=step_limits(raw, source),
    )
    if "full_attention" not in kinds:
        raise CheckpointError(f"{source}: no layer attends, which is not supported")
    kept: dict[str, tuple[State, ...]] = {"linear_attention": (shape,), "full_attention": config.kept[0]}
    moe = None
    if "moe" in kinds:
        fixed = {**raw, "num_hidden_layers": len(kinds), "topk_method": "noaux_tc", "n_shared_experts": 0}
        moe = routed_experts(fixed, source, scoring="sigmoid", routing="noaux_tc", normalize=True)
    return replace(
        config,
        rope=RopeConfig("none"),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        moe=moe,
        states=tuple(kept.get(kind, ()) for kind in kinds),
        recurrent_bias=bool(raw.get("use_bias", False)),
        conv_bias=raw.get("use_conv_bias") is not False,
        own=NemotronHConfig(
            kinds,
            shared_width=integer(raw, "moe_shared_expert_intermediate_size", source, default=1),
            latent_size=int(raw.get("moe_latent_size") or 0),
            mtp_kinds=_mtp_kinds(raw),
        ),
    )


def _kinds(raw: Mapping[str, Any], source: str) -> tuple[str, ...]:
    pattern = raw.get("hybrid_override_pattern")
    given = raw.get("layers_block_type") or raw.get("layer_types") or [_LETTERS.get(c, c) for c in pattern or ""]
    kinds = tuple(_OLDER.get(kind, kind) for kind in given)
    if not kinds or not set(kinds) <= set(_LETTERS.values()):
        raise CheckpointError(
            f"{source}: layers_block_type must name {', '.join(_LETTERS.values())} for each layer, found {list(kinds)}"
        )
    return kinds


def _mtp_kinds(raw: Mapping[str, Any]) -> tuple[str, ...]:
    pattern = raw.get("mtp_hybrid_override_pattern") or "*E"
    given = raw.get("mtp_layers_block_type") or [_LETTERS.get(c, c) for c in pattern]
    return tuple(_OLDER.get(kind, kind) for kind in given)


def _mtp_layers(config: ModelConfig, count: int) -> ModelConfig:
    """One MTP layer is several of the family's layers, of which one attends."""
    own = config.own
    assert isinstance(own, NemotronHConfig)
    kinds, known = own.mtp_kinds, {"full_attention", "mlp", *(["moe"] if config.moe is not None else [])}
    if count != 1 or not set(kinds) <= known or kinds[:1] != ("full_attention",) or "full_attention" in kinds[1:]:
        raise CheckpointError(
            f"{config.architecture}: {count} MTP layers of {', '.join(kinds)} are not supported, only one of "
            "full_attention, then moe or mlp"
        )
    return replace(own_layers(config, count), own=replace(own, kinds=kinds))


NEMOTRON_H = TargetFamily(
    "NemotronHForCausalLM",
    "nemotron_h",
    _add_flags,
    _layer,
    {
        **{"rms_norm_eps": 1e-5, "intermediate_size": 21504, "mamba_num_heads": 128, "mamba_head_dim": 64},
        **{"ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "head_dim": 128},
    },
    mtp=MtpTraits(_mtp_layers),
    aliases={"layer_norm_epsilon": "rms_norm_eps", "attention_head_dim": "head_dim"},
    renames={"backbone.": "model.", "model.embeddings.": "model.embed_tokens.", "model.norm_f.": "model.norm."},
)
