"""Reading config.json: the file, and the keys that have one meaning in every family."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from eagle_server.models.config import CheckpointError, ModelConfig, RopeConfig
from eagle_server.models.wrappers import MEDIA, plain_rope, text_config

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LARGEST_SIZE = 2**31 - 1
_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


def read_config(directory: Path) -> dict[str, Any]:
    """The parsed config.json of a checkpoint directory; of one that reads images too, its text decoder's.

    Raises:
        CheckpointError: as `read_whole_config`.
    """
    return text_config(read_whole_config(directory))


def read_whole_config(directory: Path) -> dict[str, Any]:
    """config.json as it is.

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


def common_config(
    raw: Mapping[str, Any], architecture: str, source: str, partial_rotary_factor: float | None = None
) -> ModelConfig:
    """A decoder's config without the flags of its family: no biases, no q/k norms, no windows, no MLA, no experts.

    partial_rotary_factor: as in `rope_config`.

    Raises:
        CheckpointError: a required key is absent or has a value that is not supported.
    """
    heads = integer(raw, "num_attention_heads", source)
    hidden = integer(raw, "hidden_size", source)
    kinds = raw.get("layers_block_type")
    counted = len(kinds) if isinstance(kinds, list) else None
    layers = integer(raw, "num_hidden_layers", source, default=counted)
    declared = integer(raw, "max_position_embeddings", source, default=2048)
    kv_heads = integer(raw, "num_key_value_heads", source, default=heads)
    if heads % kv_heads:
        raise CheckpointError(f"{source}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    rope, local_rope = ropes_by_type(raw, declared, source, partial_rotary_factor)
    head_dim = integer(raw, "head_dim", source, default=hidden // heads)
    rotary = rope.rotary_dim(head_dim)
    if rope.partial_rotary_factor != 1 and (rotary % 2 or not 0 < rotary <= head_dim):
        raise CheckpointError(
            f"{source}: partial_rotary_factor {rope.partial_rotary_factor} rotates {rotary} of {head_dim} dimensions; "
            "an even number of them is expected"
        )
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
        head_dim=head_dim,
        rms_norm_eps=_number(raw, "rms_norm_eps", source, 1e-6),
        rope=rope,
        local_rope=local_rope,
        max_position=declared if rope.kind == "dynamic" else limit[0],
        context_limit=limit,
        dtype=stored_dtype(raw),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        windows=(0,) * layers,
        eos_token_ids=token_ids(raw, source),
        bos_token_id=raw.get("bos_token_id"),
        media_token_ids=tuple(raw[MEDIA]) if MEDIA in raw else None,
    )


def ropes_by_type(
    raw: Mapping[str, Any], max_position: int, source: str, partial_rotary_factor: float | None = None
) -> tuple[RopeConfig, RopeConfig | None]:
    """(RoPE, the RoPE of layers with a sliding window; None: the same), from one set of parameters or one per type.

    Raises:
        CheckpointError: as `rope_config`.
    """
    sets = raw.get("rope_parameters")
    if not isinstance(sets, Mapping) or set(sets) != {"full_attention", "sliding_attention"}:
        return rope_config(raw, max_position, source, partial_rotary_factor), None
    outer = {key: value for key, value in raw.items() if key not in ("rope_scaling", "rope_theta")}
    full = {**sets["full_attention"], **(raw.get("rope_scaling") or {})}
    given = [{**outer, "rope_parameters": parameters} for parameters in (full, sets["sliding_attention"])]
    rope, local_rope = (rope_config(each, max_position, source, partial_rotary_factor) for each in given)
    return rope, local_rope


def rope_config(
    raw: Mapping[str, Any], max_position: int, source: str, partial_rotary_factor: float | None = None
) -> RopeConfig:
    """RoPE from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`. The default base is 10000.

    `rope_scaling` comes first, as in transformers: model cards say to add it for longer texts.

    partial_rotary_factor: the family's default; None: the family rotates whole heads.

    Raises:
        CheckpointError: an unknown type, no factor, RoPE of part of a head in a family that has none, or one RoPE per
            layer type.
    """
    parameters: Mapping[str, Any] = raw.get("rope_parameters") or {}
    scaling: Mapping[str, Any] = raw.get("rope_scaling") or parameters
    if not isinstance(scaling, Mapping) or not isinstance(parameters, Mapping):
        raise CheckpointError(f"{source}: rope_parameters and rope_scaling must be objects, found {scaling!r}")
    scaling = plain_rope(scaling)
    theta = scaling.get("rope_theta", raw.get("rope_theta", parameters.get("rope_theta")))
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    part = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if part is None:
        part = 1.0 if partial_rotary_factor is None else partial_rotary_factor
    elif partial_rotary_factor is None and part != 1 and kind != "proportional":
        raise CheckpointError(f"{source}: partial_rotary_factor {part} is not supported by this family, only 1 is")
    _refuse_ropes_by_layer(scaling, source)
    if kind not in _ROPE_TYPES:
        raise CheckpointError(f"{source}: rope type {kind!r} is not supported; supported are {', '.join(_ROPE_TYPES)}")
    original = _original_length(raw, scaling, kind, max_position)
    factor = scaling.get("factor")
    if kind == "yarn" and factor is None and "factor" in scaling:
        factor = max_position / original  # DeepSeek's default, in transformers
    short = scaling.get("short_factor") if kind == "longrope" else ()
    if not isinstance(short, list | tuple) or not all(isinstance(each, int | float) and each > 0 for each in short):
        raise CheckpointError(f"{source}: rope type 'longrope' needs a list 'short_factor', found {short!r}")
    if kind not in ("default", "proportional", "longrope") and (not isinstance(factor, int | float) or factor <= 0):
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
        attention_factor=_longrope_scale(scaling, original, max_position) if short else scaling.get("attention_factor"),
        mscale=scaling.get("mscale"),
        mscale_all_dim=scaling.get("mscale_all_dim"),
        truncate=bool(scaling.get("truncate", True)),
        partial_rotary_factor=_number({"partial_rotary_factor": part}, "partial_rotary_factor", source, 1.0),
        short_factor=tuple(map(float, short)),
    )


def _longrope_scale(scaling: Mapping[str, Any], original: int, max_position: int) -> float:
    """The factor on cos and sin (LongRoPE, arXiv 2402.13753, as transformers has it)."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor = float(scaling.get("factor") or max_position / original)
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _original_length(raw: Mapping[str, Any], scaling: Mapping[str, Any], kind: str, max_position: int) -> int:
    """The length before scaling, as in transformers, whose dynamic RoPE knows max_position_embeddings alone."""
    key = "original_max_position_embeddings"
    outer = raw.get(key) if kind in ("llama3", "yarn", "longrope") else None
    return int((outer or scaling.get(key) or max_position) if kind != "dynamic" else max_position)


def _refuse_ropes_by_layer(scaling: Mapping[str, Any], source: str) -> None:
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


def recurrent_layers(kinds: Sequence[str], layers: int, source: str, recurrent: str) -> tuple[int, ...]:
    """The layers whose kind is `recurrent`, of kinds that may be this one or full_attention.

    Raises:
        CheckpointError: another kind, too few kinds, or no layer that attends.
    """
    if len(kinds) < layers or not set(kinds) <= {recurrent, "full_attention"}:
        raise CheckpointError(
            f"{source}: layer_types must say {recurrent!r} or 'full_attention' for each of {layers} layers, found "
            f"{list(kinds)}"
        )
    if "full_attention" not in kinds[:layers]:
        raise CheckpointError(f"{source}: layer_types names no layer with full_attention, which is not supported")
    return tuple(layer for layer, kind in enumerate(kinds[:layers]) if kind == recurrent)


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
