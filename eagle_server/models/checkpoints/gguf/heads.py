"""Draft heads in GGUF files: keys of config.json, and names of tensors, of llama.cpp's architectures for them.

    eagle3   an EAGLE-3 head of one layer; d2t holds target ids
    dflash   a block drafter of Qwen3's layers, with a Markov head too (DSpark)

Both name the target's streams by the layers that read them, as `eagle_aux_hidden_state_layer_ids` does. What they
share with the target is not in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from eagle_server.models.config import CheckpointError

_NEUTRAL = {"logit_scale": 1.0, "embedding_scale": 1.0, "final_logit_softcapping": 0.0}
_MARKOV = "markov_w1.weight"

EAGLE3_TOP = {"fc": "fc", "enc.output_norm": "input_norm"}
EAGLE3_PARTS = {"attn_norm_2": "hidden_norm"}
DFLASH_TOP = {
    **{"fc": "fc", "enc.output_norm": "hidden_norm"},
    **{"markov_w1": "markov_head.markov_w1", "markov_w2": "markov_head.markov_w2"},
    "conf_proj": "confidence_head.proj",
}


def eagle3(config: dict[str, Any], value: Callable[..., Any], found: Container[str]) -> dict[str, Any]:
    """Of an EAGLE-3 head."""
    return _streams(value) | {
        "norm_before_residual": bool(value("norm_before_residual", default=False)),
        "norm_before_fc": bool(value("norm_before_fc", default=False)),
    }


def dflash(config: dict[str, Any], value: Callable[..., Any], found: Container[str]) -> dict[str, Any]:
    """Of a block drafter. With a Markov head its first row scores the first token, if the file does not say it."""
    for key, neutral in _NEUTRAL.items():
        if value(key, neutral) != neutral:
            raise CheckpointError(f"dflash.{key}: only {neutral} is supported in GGUF")
    causal = value("attention.causal", ())
    return {
        **_streams(value),
        **_windows(value),
        **({} if causal == () else {"is_causal": causal}),
        "dflash_config": {},
        "block_size": value("block_size"),
        "sample_from_anchor": bool(value("sample_from_anchor", default=_MARKOV in found)),
    }


def _streams(value: Callable[..., Any]) -> dict[str, Any]:
    layers = value("target_layers", []) or value("extract_layers")
    width = value("target_hidden_size", 0)
    return {"eagle_aux_hidden_state_layer_ids": layers} | ({"target_hidden_size": width} if width else {})


def _windows(value: Callable[..., Any]) -> dict[str, Any]:
    window = value("attention.sliding_window", 0)
    if not window:
        return {}
    kinds = ["sliding_attention" if each else "full_attention" for each in value("attention.sliding_window_pattern")]
    return {"sliding_window": window, "use_sliding_window": True, "layer_types": kinds}
