"""What a Hugging Face ``config.json`` says about a decoder, read once into a frozen value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class CheckpointError(ValueError):
    """A checkpoint that cannot be served; the message names the file, the key, what was expected and what was found."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding parameters; `kind` is default, linear, dynamic, llama3 or yarn."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention: what queries (None: not at all) and KV are compressed to, and head sizes."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleaved: bool


Scoring = Literal["softmax", "sigmoid"]
Routing = Literal["greedy", "group_limited_greedy", "noaux_tc"]


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts; `intermediate_size` is that of one expert.

    Each token goes to the `experts_per_token` best experts of its `topk_groups` best groups, of `groups` equal ones.
    """

    experts: int
    experts_per_token: int
    intermediate_size: int
    shared_experts: int
    first_dense_layers: int
    layer_frequency: int
    scoring: Scoring
    routing: Routing
    groups: int
    topk_groups: int
    normalize: bool
    scale: float

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer has experts, or one MLP like a dense model."""
        return layer >= self.first_dense_layers and layer % self.layer_frequency == 0


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder, or of a draft head's layers.

    `windows` holds one sliding-window size per layer, 0 for full attention. `head_dim` is what RoPE turns: with `mla`,
    the rotary part of a head. `nextn_layers` is how many further layers in the same files draft. A decoder that is not
    `native` is run by transformers' code, and no more is filled in than others ask for.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    dtype: torch.dtype
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None
    nextn_layers: int = 0
    native: bool = True

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """Read a decoder's config.

        Raises:
            CheckpointError: a required key is absent or has a value that is not supported.
        """
        family = native_family(raw)
        if family is None:
            raise CheckpointError(
                f"{source}: architecture {named_family(raw)!r} is not supported; supported are {', '.join(SUPPORTED)}"
            )
        heads = _integer(raw, "num_attention_heads", source)
        hidden = _integer(raw, "hidden_size", source)
        layers = _integer(raw, "num_hidden_layers", source)
        max_position = int(raw.get("max_position_embeddings") or 2048)
        if raw.get("hidden_act", "silu") != "silu":
            raise CheckpointError(f"{source}: hidden_act {raw['hidden_act']!r} is not supported, only 'silu' is")
        attention_bias = bool(raw.get("attention_bias", False))
        eos = raw.get("eos_token_id")
        mla = _mla(raw, source) if family in _DEEPSEEK else None
        return cls(
            architecture=family,
            vocab_size=_integer(raw, "vocab_size", source),
            hidden_size=hidden,
            intermediate_size=_integer(raw, "intermediate_size", source),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=mla.qk_rope_head_dim if mla else int(raw.get("head_dim") or hidden // heads),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=rope_config(raw, max_position, source),
            max_position=max_position,
            dtype=stored_dtype(raw),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or family == "Qwen2ForCausalLM",
            o_bias=attention_bias and family in ("LlamaForCausalLM", "Qwen3ForCausalLM", *_DEEPSEEK),
            mlp_bias=bool(raw.get("mlp_bias", False)) and family != "DeepseekV3ForCausalLM",
            qk_norm=family == "Qwen3ForCausalLM",
            windows=_windows(raw, family, layers, source),
            eos_token_ids=token_ids(eos),
            bos_token_id=raw.get("bos_token_id"),
            mla=mla,
            moe=_moe(raw, family, source) if family in _DEEPSEEK else None,
            nextn_layers=int(raw.get("num_nextn_predict_layers") or 0),
        )


_DEEPSEEK = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", *_DEEPSEEK)
_BY_MODEL_TYPE = {"llama": 0, "mistral": 1, "qwen2": 2, "qwen3": 3, "deepseek_v2": 4, "deepseek_v3": 5}


def read_config(directory: Path) -> dict[str, Any]:
    """The parsed config.json of a checkpoint directory.

    Raises:
        CheckpointError: the file is absent or is not a JSON object.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{directory}: no config.json here; a Hugging Face checkpoint directory is expected")
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: a JSON object is expected")
    return raw


def rope_config(raw: Mapping[str, Any], max_position: int, source: str) -> RopeConfig:
    """RoPE from `rope_parameters` (Transformers 5), or `rope_theta` and `rope_scaling`; a missing base means 10000."""
    scaling: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = scaling.get("rope_theta", raw.get("rope_theta"))
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "linear", "dynamic", "llama3", "yarn"):
        raise CheckpointError(
            f"{source}: rope type {kind!r} is not supported; supported are default, linear, dynamic, llama3 and yarn"
        )
    if kind != "default" and "factor" not in scaling:
        raise CheckpointError(f"{source}: rope type {kind!r} needs a 'factor'")
    return RopeConfig(
        kind=kind,
        theta=float(10000.0 if theta is None else theta),
        factor=float(scaling.get("factor") or 1.0),
        low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
        high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
        original_max_position=int(scaling.get("original_max_position_embeddings") or max_position),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        attention_factor=scaling.get("attention_factor"),
        mscale=scaling.get("mscale"),
        mscale_all_dim=scaling.get("mscale_all_dim"),
        truncate=bool(scaling.get("truncate", True)),
    )


def windows_by_type(raw: Mapping[str, Any], layers: int, source: str) -> tuple[int, ...]:
    """One window per layer from `layer_types` and `sliding_window`."""
    kinds, window = list(raw["layer_types"]), int(raw.get("sliding_window") or 0)
    if len(kinds) < layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise CheckpointError(
            f"{source}: layer_types must say 'full_attention' or 'sliding_attention' for each of {layers} layers, "
            f"found {kinds}"
        )
    if "sliding_attention" in kinds and not window:
        raise CheckpointError(f"{source}: layer_types names sliding_attention, but there is no sliding_window")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:layers])


def native_family(raw: Mapping[str, Any]) -> str | None:
    """The architecture, if its layers are written here."""
    architectures = raw.get("architectures") or []
    for name in architectures:
        if name in SUPPORTED:
            return str(name)
    index = _BY_MODEL_TYPE.get(raw.get("model_type", ""))
    if index is None or (architectures and not str(architectures[0]).startswith(("Llama", "Mistral", "Qwen", "Eagle"))):
        return None
    return SUPPORTED[index]


def named_family(raw: Mapping[str, Any]) -> str | None:
    """What a config.json calls its architecture."""
    name = (raw.get("architectures") or [raw.get("model_type")])[0]
    return None if name is None else str(name)


def _windows(raw: Mapping[str, Any], family: str, layers: int, source: str) -> tuple[int, ...]:
    window = raw.get("sliding_window")
    if not window or family in ("LlamaForCausalLM", *_DEEPSEEK):
        return (0,) * layers
    if raw.get("layer_types"):
        return windows_by_type(raw, layers, source)
    if family == "MistralForCausalLM":
        return (int(window),) * layers
    if not raw.get("use_sliding_window", False):
        return (0,) * layers
    first = int(raw.get("max_window_layers", 28))
    return tuple(int(window) if layer >= first else 0 for layer in range(layers))


def _mla(raw: Mapping[str, Any], source: str) -> MLAConfig:
    return MLAConfig(
        q_lora_rank=None if raw.get("q_lora_rank") is None else _integer(raw, "q_lora_rank", source),
        kv_lora_rank=_integer(raw, "kv_lora_rank", source),
        qk_nope_head_dim=_integer(raw, "qk_nope_head_dim", source),
        qk_rope_head_dim=_integer(raw, "qk_rope_head_dim", source),
        v_head_dim=_integer(raw, "v_head_dim", source),
        rope_interleaved=raw.get("rope_interleave") is not False,
    )


def _moe(raw: Mapping[str, Any], family: str, source: str) -> MoEConfig | None:
    if not raw.get("n_routed_experts"):
        return None
    newer = family == "DeepseekV3ForCausalLM"
    scoring = raw.get("scoring_func") or ("sigmoid" if newer else "softmax")
    routing = raw.get("topk_method") or ("noaux_tc" if newer else "greedy")
    for key, value, known in (("scoring_func", scoring, Scoring), ("topk_method", routing, Routing)):
        if value not in get_args(known):
            raise CheckpointError(f"{source}: {key} {value!r} is not supported; supported are {get_args(known)}")
    experts, chosen = (_integer(raw, key, source) for key in ("n_routed_experts", "num_experts_per_tok"))
    groups, topk_groups = (1, 1) if routing == "greedy" else (int(raw.get(k) or 1) for k in ("n_group", "topk_group"))
    if experts % groups or topk_groups > groups or chosen > topk_groups * (experts // groups):
        raise CheckpointError(
            f"{source}: n_routed_experts {experts}, n_group {groups}, topk_group {topk_groups} and num_experts_per_tok "
            f"{chosen} do not fit together"
        )
    normalize = raw.get("norm_topk_prob")
    return MoEConfig(
        experts=experts,
        experts_per_token=chosen,
        intermediate_size=_integer(raw, "moe_intermediate_size", source),
        shared_experts=int(raw.get("n_shared_experts") or 0),
        first_dense_layers=int(raw.get("first_k_dense_replace") or 0),
        layer_frequency=int(raw.get("moe_layer_freq") or 1),
        scoring=cast(Scoring, scoring),
        routing=cast(Routing, routing),
        groups=groups,
        topk_groups=topk_groups,
        normalize=newer if normalize is None else bool(normalize),
        scale=float(raw.get("routed_scaling_factor") or 1.0),
    )


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """What config.json gives as one id, several, or null."""
    return tuple(value) if isinstance(value, list) else () if value is None else (int(value),)


def _integer(raw: Mapping[str, Any], key: str, source: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value <= 0:
        raise CheckpointError(f"{source}: {key} must be a positive integer, found {value!r}")
    return value


def stored_dtype(raw: Mapping[str, Any]) -> torch.dtype:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    return DTYPES.get(name, torch.float32)
