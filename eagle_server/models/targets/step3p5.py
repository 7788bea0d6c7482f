"""Step 3.5 and 3.7 Flash: two kinds of layers, with another number of query heads, and DeepSeek-V3's router.

Layers with a window have a RoPE of their own. A gate per head weighs the output of attention. Norms multiply by
1 + weight. In some layers gate and up of experts and MLP have limits. The MTP layers have a window and an MLP.

Sources: transformers' step3p7; the MTP layers: vLLM's step3p5_mtp, whose layers read and pass on residual streams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from eagle_server.models.config import CheckpointError, ModelConfig, MoEConfig, SwiGLULimits
from eagle_server.models.config_json import integer, windows_by_type
from eagle_server.models.targets.deepseek import routed_experts
from eagle_server.models.targets.interface import MtpTraits, TargetFamily, windowed_layers
from eagle_server.models.targets.llama import llama_layer

_FULL, _SLIDING = "full_attention", "sliding_attention"
_SERVED: dict[str, Any] = {  # null, too; transformers computes nothing else
    **{"att_impl_type": "GQA", "attention_bias": False, "mlp_bias": False, "use_bidirectional_attention": False},
    **{"use_head_wise_attn_gate": True, "zero_centered": True, "use_mfa": False, "sparse_attention_config": None},
    **{"moe_router_activation": "sigmoid", "use_moe_router_bias": True, "norm_expert_weight": True},
    "yarn_only_types": [_FULL],
}


def _usual(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """RoPE per layer type, from published files' numbers per layer. Their lists go on for the MTP layers."""
    layers = integer(raw, "num_hidden_layers", source)
    kinds = list(raw.get("layer_types") or [_FULL] * layers)[:layers]
    sets = dict(raw.get("rope_parameters") or {})
    usual = {**raw, "layer_types": kinds}
    if not sets:
        sets = {kind: _rope_of(kind, kinds, raw, source) for kind in set(kinds)}
        for key in ("rope_theta", "rope_scaling", "partial_rotary_factors"):
            usual.pop(key, None)
    elif not set(kinds) <= set(sets):
        raise CheckpointError(f"{source}: rope_parameters: one set for each of {sorted(set(kinds))} is expected")
    for kind in (_FULL, _SLIDING):  # one that no layer has
        sets.setdefault(kind, next(iter(sets.values())))
    return usual | {"rope_parameters": sets}


def _rope_of(kind: str, kinds: Sequence[str], raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": "default"}
    for key, listed, default in (
        ("rope_theta", "rope_theta", 10_000.0),
        ("partial_rotary_factor", "partial_rotary_factors", 1.0),
    ):
        given = raw.get(listed) or default
        own = {given[layer] if isinstance(given, list) else given for layer, each in enumerate(kinds) if each == kind}
        if len(own) > 1:
            raise CheckpointError(f"{source}: {listed}: layers with {kind} must have the same, found {sorted(own)}")
        found[key] = own.pop()
    return found | dict(raw.get("rope_scaling") or {}) if kind == _FULL else found


def _add_flags(config: ModelConfig, raw: Mapping[str, Any], source: str) -> ModelConfig:
    _check(config, raw, source)
    windows, scalar = windows_by_type(raw, config.num_layers, source), raw.get("query_pre_attn_scalar")
    return replace(
        config,
        qk_norm=True,
        norm_offset=1.0,
        head_gate=True,
        windows=windows,
        layer_heads=_heads(config, raw, windows, source),
        attention_scale=None if scalar in (None, config.head_dim) else float(scalar) ** -0.5,
        swiglu_limits=_limits(raw, config.num_layers),
        moe=_experts(raw, config.num_layers, source),
    )


def _check(config: ModelConfig, raw: Mapping[str, Any], source: str) -> None:
    """Refuse what transformers does not compute."""
    other = {**(raw.get("attention_other_setting") or {})}
    found = {**raw, **{f"attention_other_setting: {key}": value for key, value in other.items()}}
    served = _SERVED | {
        "attention_other_setting: attention_type": _SLIDING,
        "attention_other_setting: num_attention_groups": config.num_kv_heads,
        "attention_other_setting: head_dim": config.head_dim,
    }
    for key, value in served.items():
        if found.get(key) not in (None, value):
            raise CheckpointError(f"{source}: {key} {found[key]!r} is not supported by this family, only {value!r} is")
    if not all(raw.get("use_rope_layers") or ()):
        raise CheckpointError(f"{source}: use_rope_layers: layers without RoPE are not supported by this family")


def _heads(config: ModelConfig, raw: Mapping[str, Any], windows: Sequence[int], source: str) -> tuple[int, ...]:
    """Query heads of every layer: as transformers' `per_layer_config` says, or one number for layers with a window."""
    setting = raw.get("attention_other_setting") or {}
    slides = raw.get("num_sliding_attention_heads") or setting.get("num_attention_heads") or config.num_heads
    every: Mapping[str, Any] | None = raw.get("per_layer_config")
    if every is None:
        heads = [int(slides) if window else config.num_heads for window in windows]
    else:
        if unknown := {key for own in every.values() for key in own} - {"num_attention_heads"}:
            raise CheckpointError(f"{source}: per_layer_config: {sorted(unknown)} of a layer is not supported")
        given = [every.get(str(layer), {}).get("num_attention_heads") for layer in range(len(windows))]
        heads = [int(own or config.num_heads) for own in given]
    if any(own <= 0 or own % config.num_kv_heads for own in heads):
        raise CheckpointError(
            f"{source}: num_attention_heads of layers: multiples of num_key_value_heads {config.num_kv_heads} are "
            f"expected, found {sorted(set(heads))}"
        )
    return tuple(heads)


def _limits(raw: Mapping[str, Any], layers: int) -> tuple[SwiGLULimits, ...]:
    both = [raw.get(key) or [0.0] * layers for key in ("swiglu_limits", "swiglu_limits_shared")]
    return tuple(SwiGLULimits(*(float(each[layer] or 0.0) for each in both)) for layer in range(layers))


def _experts(raw: Mapping[str, Any], layers: int, source: str) -> MoEConfig | None:
    width, shared = (integer(raw, key, source) for key in ("moe_intermediate_size", "share_expert_dim"))
    if shared % width:
        raise CheckpointError(
            f"{source}: share_expert_dim {shared} is not supported, only multiples of moe_intermediate_size {width} are"
        )
    dense = frozenset(range(layers)) - _sparse_layers(raw, source)
    usual = {**raw, "first_k_dense_replace": 0, "moe_layer_freq": 1, "n_shared_experts": shared // width}
    usual |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1}
    usual |= {"norm_topk_prob": True, "routed_scaling_factor": raw.get("moe_router_scaling_factor")}
    moe = routed_experts(usual, source, scoring="sigmoid", routing="noaux_tc", normalize=True)
    return None if moe is None or len(dense) == layers else replace(moe, dense_layers=dense)


def _sparse_layers(raw: Mapping[str, Any], source: str) -> frozenset[int]:
    """The layers with experts, those of MTP layers too where files count them."""
    kinds, listed = raw.get("mlp_layer_types"), raw.get("moe_layers_enum")
    if kinds is not None:
        return frozenset(layer for layer, kind in enumerate(kinds) if kind == "sparse")
    if listed is None:
        raise CheckpointError(f"{source}: moe_layers_enum or mlp_layer_types is expected: which layers have experts")
    items = listed.split(",") if isinstance(listed, str) else listed
    return frozenset(int(each) for each in items if str(each).strip())


def _check_mtp(raw: Mapping[str, Any], source: str) -> None:
    """Published ones attend with a window, and have an MLP without limits."""
    first = integer(raw, "num_hidden_layers", source)
    kinds = raw.get("mtp_layer_types") or (raw.get("layer_types") or [])[first:]
    mlps = raw.get("mtp_mlp_layer_types") or []
    sparse = "sparse" in mlps or any(layer >= first for layer in _sparse_layers(raw, source))
    limited = any((raw.get("swiglu_limits_shared") or [])[first:])
    if sparse or limited or not set(kinds) <= {_SLIDING}:
        raise CheckpointError(
            f"{source}: its MTP layers are not supported: only layers with {_SLIDING} and an MLP without swiglu_limits "
            f"are, found layer_types {list(kinds)}{', experts' if sparse else ''}{', limits' if limited else ''}"
        )


STEP3P5 = TargetFamily(
    "Step3p5ForCausalLM",
    "step3p5",
    _add_flags,
    llama_layer,
    # transformers' defaults. Files leave out what has its default.
    {
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
        **{"vocab_size": 128_815, "hidden_size": 4096, "intermediate_size": 11_264, "num_hidden_layers": 45},
        **{"max_position_embeddings": 128_000, "n_routed_experts": 288, "num_experts_per_tok": 8},
        **{"moe_intermediate_size": 1280, "share_expert_dim": 1280},
    },
    partial_rotary_factor=1.0,
    mtp=MtpTraits(windowed_layers, before_norm=True, check=_check_mtp),
    aliases={
        "num_attention_groups": "num_key_value_heads",
        "moe_num_experts": "n_routed_experts",
        "moe_top_k": "num_experts_per_tok",
        "share_expert_dims": "share_expert_dim",
    },
    usual=_usual,
    renames={
        ".moe.router_bias": ".mlp.gate.e_score_correction_bias",
        ".moe.gate.": ".mlp.gate.",
        ".moe.": ".mlp.experts.",
        ".share_expert.": ".mlp.shared_experts.",
        ".transformer.": ".",
        ".shared_head.output.": ".shared_head.head.",
    },
)
