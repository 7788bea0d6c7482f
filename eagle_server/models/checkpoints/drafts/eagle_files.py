"""EAGLE-1/2 checkpoints, and the layers of EAGLE-3 ones: config.json, checked against the tensors."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eagle_server.models.checkpoints.drafts.draft_format import DraftFiles, flatten
from eagle_server.models.checkpoints.drafts.draft_loading import as_loaded, filled, shared_weights
from eagle_server.models.checkpoints.drafts.draft_vocabulary import check_vocabulary, with_target_rows, without_copies
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.weights import stored_heads
from eagle_server.models.config import CheckpointError, ModelConfig
from eagle_server.models.config_json import windows_by_type
from eagle_server.models.drafts.eagle import EagleConfig, EagleHead
from eagle_server.models.targets.interface import DraftedTarget
from eagle_server.models.targets.registry import read_target_config

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # model types of draft layers; all others are read as Llama

log = logging.getLogger(__name__)


def recognizes(files: DraftFiles) -> bool:
    """Whether these are the tensors of an EAGLE-1/2 head: fc joins two inputs, the first layer has no input norm."""
    hidden, width = files.matrix("fc.weight")
    return width == 2 * hidden > 0 and not files.has_prefix("layers.0.input_layernorm.")


def kv_config(files: DraftFiles, target: ModelConfig) -> ModelConfig:
    """See `DraftFormat`."""
    return layer_config(flatten(files), files, target)


def load(files: DraftFiles, target: DraftedTarget, how: Loading) -> EagleHead:
    """The head, with the target's embedding or lm_head where it has none of its own."""
    files = with_target_rows(files, target, has_map=False)
    config = eagle_config(files, target.config)
    check_vocabulary(files, target, target.config.vocab_size)
    files = without_copies(files, target)
    config = as_loaded(config, files, how)
    return filled(EagleHead(config, how.positions, shared_weights(target, config)), files, how)


def eagle_config(files: DraftFiles, target: ModelConfig) -> EagleConfig:
    """The config of an EAGLE-1/2 head. Its fc has a bias if the file holds one.

    Raises:
        CheckpointError: the config contradicts the tensors, or is for another target.
    """
    flat = flatten(files)
    layers = layer_config(flat, files, target)
    source = files.config_source
    if layers.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{source}: hidden_size: an EAGLE-1/2 head is as wide as its target, expected {target.hidden_size}, "
            f"found {layers.hidden_size}"
        )
    truncated = flat.get("truncated_vocab_size")
    if truncated not in (None, flat.get("vocab_size"), target.vocab_size):
        raise CheckpointError(f"{source}: truncated_vocab_size {truncated} is not supported; use a token map")
    return EagleConfig(layers, fc_bias=bias(flat, ("bias",), files, "fc.bias"))


def layer_config(flat: Mapping[str, Any], files: DraftFiles, target: ModelConfig) -> ModelConfig:
    """The decoder config of a draft. vocab_size and dtype are the target's.

    The number of layers, biases, q/k norms and sizes of heads follow the tensors. Published configs are often wrong
    there; a difference is logged.
    """
    source = files.config_source
    family = flat.get("model_type") if flat.get("model_type") in _FAMILIES else "llama"
    raw = {"vocab_size": target.vocab_size, **flat, "model_type": family, "architectures": []}
    raw = {**raw, **_stored_sizes(raw, files)}
    config = read_target_config(raw, source)
    windows = windows_by_type(raw, config.num_layers, source) if raw.get("layer_types") else config.windows
    attention, mlp = "layers.0.self_attn.", "layers.0.mlp."
    if config.vocab_size != target.vocab_size and not {"embed_tokens.weight", "t2d"} & set(files.tensors):
        raise CheckpointError(
            f"{source}: vocab_size: the target's is {target.vocab_size}, found {config.vocab_size}: another target?"
        )
    return replace(
        config,
        vocab_size=target.vocab_size,
        dtype=target.dtype,
        windows=windows,
        qkv_bias=bias(flat, ("qkv_bias", "attention_bias"), files, f"{attention}q_proj.bias"),
        o_bias=f"{attention}o_proj.bias" in files.tensors,
        mlp_bias=bias(flat, ("mlp_bias",), files, f"{mlp}down_proj.bias"),
        qk_norm=f"{attention}q_norm.weight" in files.tensors,
    )


def bias(flat: Mapping[str, Any], keys: tuple[str, ...], files: DraftFiles, tensor: str) -> bool:
    """Whether the files hold this bias. The first declared key of `keys` may say otherwise, which is logged."""
    held = tensor in files.tensors
    key, declared = next(((key, flat[key]) for key in keys if isinstance(flat.get(key), bool)), ("", held))
    if declared != held:
        log.warning(
            "%s: %s is %s, but the files %s %s; the tensors count",
            files.config_source,
            key,
            str(declared).lower(),
            "hold" if held else "lack",
            tensor,
        )
    return held


def _stored_sizes(raw: Mapping[str, Any], files: DraftFiles) -> dict[str, int]:
    """What the tensors say about keys of config.json that are absent or wrong. A wrong one is logged."""
    declared, layers, source = raw.get("num_hidden_layers"), files.num_layers, files.config_source
    sizes = stored_heads(raw, files.tensors, "layers.0.self_attn.", source)
    if not layers or declared == layers:
        return sizes
    if declared is not None:
        log.warning("%s: num_hidden_layers is %s, but the files hold %d; the tensors count", source, declared, layers)
    return {**sizes, "num_hidden_layers": layers}
