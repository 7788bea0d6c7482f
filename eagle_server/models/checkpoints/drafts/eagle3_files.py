"""EAGLE-3 checkpoints: the sizes and flags in config.json, checked against the tensors."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, TypeVar

from eagle_server.models.checkpoints.drafts.aux_layers import aux_boundaries
from eagle_server.models.checkpoints.drafts.draft_format import DraftFiles, flatten
from eagle_server.models.checkpoints.drafts.draft_loading import as_loaded, filled, shared_weights
from eagle_server.models.checkpoints.drafts.draft_vocabulary import (
    check_vocabulary,
    draft_vocabulary,
    with_map,
    with_target_rows,
    without_copies,
)
from eagle_server.models.checkpoints.drafts.eagle_files import bias, layer_config
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.config import CheckpointError, ModelConfig
from eagle_server.models.drafts.eagle3 import Eagle3Config, Eagle3Head, FeatureNorm
from eagle_server.models.targets.interface import DraftedTarget

Config = TypeVar("Config", bound=Eagle3Config)

FIXED_FLAGS = {  # flags of other exporters, with the only value that is supported
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}

log = logging.getLogger(__name__)


def recognizes(files: DraftFiles) -> bool:
    """Whether these are the tensors of an EAGLE-3 head: a first layer over two inputs, or a map of its vocabulary."""
    _, q_width = files.matrix("layers.0.self_attn.q_proj.weight")
    hidden, _ = files.matrix("layers.0.self_attn.o_proj.weight")
    named = files.config.get("speculators_model_type") == "eagle3"
    return named or q_width == 2 * hidden > 0 or "d2t" in files.tensors or files.has_prefix("layers.0.hidden_norm.")


def kv_config(files: DraftFiles, target: ModelConfig) -> ModelConfig:
    """See `DraftFormat`."""
    return layer_config(flatten(files), files, target)


def load(files: DraftFiles, target: DraftedTarget, how: Loading) -> Eagle3Head:
    """The head, with the target's embedding or lm_head where it has none of its own."""
    files = with_target_rows(files, target, has_map=True)
    config, files = completed(eagle3_config(files, target.config), files, target, how)
    return filled(Eagle3Head(config, how.positions, shared_weights(target, config)), files, how)


def completed(config: Config, files: DraftFiles, target: DraftedTarget, how: Loading) -> tuple[Config, DraftFiles]:
    """The config with what the files hold, and the files as the head takes them.

    Raises:
        CheckpointError: they are for another target, or lack what the head cannot share with this one.
    """
    check_vocabulary(files, target, config.draft_vocab_size)
    files = with_map(without_copies(files, target), config.draft_vocab_size, target.config.vocab_size)
    config = as_loaded(config, files, how)
    for name, own in (("embed_tokens.weight", config.own_embed), ("lm_head.weight", config.own_lm_head)):
        if not own and config.layers.hidden_size != target.config.hidden_size:
            raise CheckpointError(
                f"{files.directory}: {name}: missing; a draft of width {config.layers.hidden_size} cannot share that "
                f"of a target of width {target.config.hidden_size}"
            )
    return config, files


def eagle3_config(files: DraftFiles, target: ModelConfig) -> Eagle3Config:
    """The config of an EAGLE-3 head. Its fc must fit the target's width and the number of aux streams.

    Raises:
        CheckpointError: the config contradicts the tensors, or is for another target.
    """
    if files.has_part("qkv_a", "kv_a_proj", "q_a_proj"):
        raise CheckpointError(
            f"{files.directory}: recognized as EAGLE-3 with MLA attention; this draft format is not supported yet"
        )
    flat, source = flatten(files), files.config_source
    layers = layer_config(flat, files, target)
    _refuse_other_meanings(flat, source)
    expected_width = flat.get("target_hidden_size")
    if expected_width not in (None, target.hidden_size):
        raise CheckpointError(
            f"{source}: target_hidden_size: this draft is for targets of width {expected_width}, "
            f"found {target.hidden_size}"
        )
    uses_aux = _flag(flat, "use_aux_hidden_state", source) is not False
    boundaries = aux_boundaries(flat, target.num_layers, source) if uses_aux else ()
    _check_fc(flat, files, target, boundaries, layers.hidden_size)
    norm = _feature_norm(flat, files)
    return Eagle3Config(
        layers=layers,
        target_hidden_size=target.hidden_size,
        draft_vocab_size=draft_vocabulary(files, flat.get("draft_vocab_size"), target.vocab_size),
        aux_boundaries=boundaries,
        fc_bias=bias(flat, ("bias",), files, "fc.bias"),
        norm_before_residual=_norm_before_residual(flat, source),
        feature_norm=norm,
        norm_output=_norm_output(flat, norm, files),
        vocab_map="d2t" in files.tensors,
    )


def _check_fc(
    flat: Mapping[str, Any], files: DraftFiles, target: ModelConfig, boundaries: tuple[int, ...], hidden: int
) -> None:
    source, (rows, width) = files.directory, files.matrix("fc.weight")
    if not boundaries:
        if hidden != target.hidden_size:
            raise CheckpointError(
                f"{files.config_source}: hidden_size: without aux hidden states the draft is as wide as its target, "
                f"expected {target.hidden_size}, found {hidden}"
            )
        return
    if not width or width % target.hidden_size:
        raise CheckpointError(
            f"{source}: fc.weight: expected [{hidden}, n * {target.hidden_size}] for this target, "
            f"found [{rows}, {width}]"
        )
    streams = width // target.hidden_size
    declared = flat.get("num_aux_hidden_states") or streams
    if streams != len(boundaries) or declared != streams:
        raise CheckpointError(
            f"{source}: fc.weight: takes {streams} aux hidden states of width {target.hidden_size}, but the config "
            f"names {len(boundaries)} boundaries {list(boundaries)} (num_aux_hidden_states {declared})"
        )


def _feature_norm(flat: Mapping[str, Any], files: DraftFiles) -> FeatureNorm:
    """N of the EAGLE-3 formula. Without a flag in the config, the tensors decide."""
    source = files.config_source
    legacy = _flag(flat, "use_aux_norm", source)
    declared_each = _flag(flat, "fc_norm", source)
    each = _matching("fc_norm", legacy if declared_each is None else declared_each, files, "fc_norm.0.weight")
    concat = _matching("norm_before_fc", _flag(flat, "norm_before_fc", source), files, "input_norm.weight")
    if each and concat:
        raise CheckpointError(f"{source}: norm_before_fc and fc_norm exclude each other, found both")
    return "each" if each else "concat" if concat else "none"


def _matching(flag: str, declared: bool | None, files: DraftFiles, tensor: str) -> bool:  # noqa: FBT001
    present = tensor in files.tensors
    if declared is not None and declared != present:
        found = f"holds {tensor}" if present else f"lacks {tensor}"
        raise CheckpointError(f"{files.config_source}: {flag}: config.json says {declared}, but the file {found}")
    return present


def _norm_output(flat: Mapping[str, Any], norm: FeatureNorm, files: DraftFiles) -> bool:
    """Whether norm(y) is the feedback, as in EAGLE-3.1. SpecForge 0.3.0 set the flag for plain EAGLE-3 too."""
    source = files.config_source
    declared = bool(_flag(flat, "norm_output", source))
    settled = "norm_output" in files.overrides or "speculators_model_type" in flat or norm == "each"
    if declared and not settled:
        log.warning(
            "%s: norm_output without fc_norm is what SpecForge 0.3.0 wrote for plain EAGLE-3 heads, so it is not "
            "applied to the feedback; override norm_output to true if this is an EAGLE-3.1 head",
            source,
        )
        return False
    return declared


def _norm_before_residual(flat: Mapping[str, Any], source: str) -> bool:
    """EAGLE-3 files of older speculators leave it out and mean true: so vLLM reads them, for which they were made."""
    declared = _flag(flat, "norm_before_residual", source)
    return flat.get("speculators_model_type") == "eagle3" if declared is None else declared


def _refuse_other_meanings(flat: Mapping[str, Any], source: str) -> None:
    for key, meaning in FIXED_FLAGS.items():
        if _flag(flat, key, source) not in (None, meaning):
            raise CheckpointError(f"{source}: {key}: {not meaning} is not supported, only {meaning} is")


def _flag(flat: Mapping[str, Any], key: str, source: str) -> bool | None:
    """A boolean at the top level or in eagle_config; None if it is absent."""
    nested = flat.get("eagle_config") or {}
    value = flat.get(key, nested.get(key))
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{source}: {key}: true or false is expected, found {value!r}")
    return value
