"""Reading config.json: the file, and the keys that have one meaning in every family."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eagle_server.models.config import CheckpointError, ModelConfig, RopeConfig

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LARGEST_SIZE = 2**31 - 1
_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


def read_config(directory: Path) -> dict[str, Any]:
    """The parsed config.json of a checkpoint directory.

    Raises:
        CheckpointError: the file is absent or is not a JSON object, or its `architectures` are no list.
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
    if not isinstance(raw.get("architectures") or [], list):
        raise CheckpointError(f"{path}: architectures must be a list, found {raw['architectures']!r}")
    return raw


def architecture_name(raw: Mapping[str, Any]) -> str | None:
    """The first entry of `architectures`, or else `model_type`."""
    name = (raw.get("architectures") or [raw.get("model_type")])[0]
    return None if name is None else str(name)


def common_config(raw: Mapping[str, Any], architecture: str, source: str) -> ModelConfig:
    """A decoder's config without the flags of its family: no biases, no q/k norms, no windows, no MLA, no experts.

    Raises:
        CheckpointError: a required key is absent or has a value that is not supported.
    """
    heads = integer(raw, "num_attention_heads", source)
    hidden = integer(raw, "hidden_size", source)
    layers = integer(raw, "num_hidden_layers", source)
    declared = integer(raw, "max_position_embeddings", source, default=2048)
    kv_heads = integer(raw, "num_key_value_heads", source, default=heads)
    if heads % kv_heads:
        raise CheckpointError(f"{source}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    rope = rope_config(raw, declared, source)
    limit = rope.context_limit(declared)
    if (raw.get("hidden_act") or "silu") != "silu":
        raise CheckpointError(f"{source}: hidden_act {raw['hidden_act']!r} is not supported, only 'silu' is")
    return ModelConfig(
        architecture=architecture,
        vocab_size=integer(raw, "vocab_size", source),
        hidden_size=hidden,
        intermediate_size=integer(raw, "intermediate_size", source),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=integer(raw, "head_dim", source, default=hidden // heads),
        rms_norm_eps=_number(raw, "rms_norm_eps", source, 1e-6),
        rope=rope,
        max_position=declared if rope.kind == "dynamic" else limit[0],
        context_limit=limit,
        dtype=stored_dtype(raw),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        windows=(0,) * layers,
        eos_token_ids=token_ids(raw, source),
        bos_token_id=raw.get("bos_token_id"),
        nextn_layers=int(raw.get("num_nextn_predict_layers") or 0),
    )


def rope_config(raw: Mapping[str, Any], max_position: int, source: str) -> RopeConfig:
    """RoPE from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`. The default base is 10000.

    `rope_scaling` comes first, as in transformers: model cards say to add it for longer texts.

    Raises:
        CheckpointError: an unknown type, no factor, RoPE of part of a head, or one RoPE per layer type.
    """
    parameters: Mapping[str, Any] = raw.get("rope_parameters") or {}
    scaling: Mapping[str, Any] = raw.get("rope_scaling") or parameters
    if not isinstance(scaling, Mapping) or not isinstance(parameters, Mapping):
        raise CheckpointError(f"{source}: rope_parameters and rope_scaling must be objects, found {scaling!r}")
    theta = scaling.get("rope_theta", raw.get("rope_theta", parameters.get("rope_theta")))
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    _refuse_other_ropes(raw, scaling, source)
    if kind not in _ROPE_TYPES:
        raise CheckpointError(
            f"{source}: rope type {kind!r} is not supported; supported are default, linear, dynamic, llama3 and yarn"
        )
    original = _original_length(raw, scaling, kind, max_position)
    factor = scaling.get("factor")
    if kind == "yarn" and factor is None and "factor" in scaling:
        factor = max_position / original  # DeepSeek's default, in transformers
    if kind != "default" and (not isinstance(factor, int | float) or factor <= 0):
        raise CheckpointError(f"{source}: rope type {kind!r} needs a positive 'factor', found {factor!r}")
    return RopeConfig(
        kind=kind,
        theta=_number({"rope_theta": theta}, "rope_theta", source, 10000.0),
        factor=float(factor or 1.0),
        low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
        high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
        original_max_position=original,
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        attention_factor=scaling.get("attention_factor"),
        mscale=scaling.get("mscale"),
        mscale_all_dim=scaling.get("mscale_all_dim"),
        truncate=bool(scaling.get("truncate", True)),
    )


def _original_length(raw: Mapping[str, Any], scaling: Mapping[str, Any], kind: str, max_position: int) -> int:
    """The length before scaling, as in transformers, whose dynamic RoPE knows max_position_embeddings alone."""
    key = "original_max_position_embeddings"
    outer = raw.get(key) if kind in ("llama3", "yarn") else None
    return int((outer or scaling.get(key) or max_position) if kind != "dynamic" else max_position)


def _refuse_other_ropes(raw: Mapping[str, Any], scaling: Mapping[str, Any], source: str) -> None:
    part = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if part not in (None, 1):
        raise CheckpointError(f"{source}: partial_rotary_factor {part} is not supported by this family, only 1 is")
    nested = sorted(key for key, value in scaling.items() if isinstance(value, Mapping))
    if nested:
        raise CheckpointError(
            f"{source}: one RoPE per layer type ({', '.join(nested)}) is not supported by this family"
        )


def windows_by_type(raw: Mapping[str, Any], layers: int, source: str) -> tuple[int, ...]:
    """One sliding-window size per layer (0: full attention), from `layer_types` and `sliding_window`.

    Raises:
        CheckpointError: an unknown type, too few types, or no window size.
    """
    kinds, window = list(raw["layer_types"]), int(raw.get("sliding_window") or 0)
    if len(kinds) < layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise CheckpointError(
            f"{source}: layer_types must say 'full_attention' or 'sliding_attention' for each of {layers} layers, "
            f"found {kinds}"
        )
    if "sliding_attention" in kinds and not window:
        raise CheckpointError(f"{source}: layer_types names sliding_attention, but there is no sliding_window")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:layers])


def token_ids(raw: Mapping[str, Any], source: str) -> tuple[int, ...]:
    """The end-of-sequence ids under `eos_token_id`: one id, a list of ids, or null.

    Raises:
        CheckpointError: something else.
    """
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(each) is int for each in ids):
        raise CheckpointError(f"{source}: eos_token_id must be an integer or a list of integers, found {value!r}")
    return tuple(ids)


def integer(raw: Mapping[str, Any], key: str, source: str, *, default: int | None = None) -> int:
    """The positive integer of 31 bits under `key`, or `default` if the key is absent or null.

    Raises:
        CheckpointError: the key is absent and there is no default, or it has another value.
    """
    value = raw.get(key)
    value = default if value is None else value
    if type(value) is not int or value <= 0:
        raise CheckpointError(f"{source}: {key} must be a positive integer, found {value!r}")
    if value > LARGEST_SIZE:
        raise CheckpointError(f"{source}: {key} {value} is too large")
    return value


def _number(raw: Mapping[str, Any], key: str, source: str, default: float) -> float:
    value = raw.get(key)
    if value is not None and (not isinstance(value, int | float) or value <= 0):
        raise CheckpointError(f"{source}: {key} must be a positive number, found {value!r}")
    return float(default if value is None else value)


def stored_dtype(raw: Mapping[str, Any]) -> torch.dtype:
    """The dtype of the stored weights; float32 if config.json names none that is known."""
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    return _DTYPES.get(name, torch.float32)
