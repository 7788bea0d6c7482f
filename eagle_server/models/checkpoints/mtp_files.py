"""MTP layers in checkpoints: in the target's own files, or exported to a separate directory."""

from __future__ import annotations

import re
from dataclasses import replace

from eagle_server.models.checkpoints.draft_format import DraftFiles, canonical_name, flatten
from eagle_server.models.checkpoints.draft_loading import Loading, as_loaded, shared_weights
from eagle_server.models.checkpoints.draft_vocabulary import check_vocabulary, without_copies
from eagle_server.models.checkpoints.weights import copy_weights
from eagle_server.models.config import CheckpointError, ModelConfig
from eagle_server.models.drafts.mtp import MtpConfig, MtpHead
from eagle_server.models.targets.interface import DraftedTarget
from eagle_server.models.targets.registry import read_target_config

_PROJECTION = re.compile(r"layers\.(\d+)\.eh_proj\.weight")


def recognizes(files: DraftFiles) -> bool:
    """Whether there is an MTP layer under any of its published names."""
    return files.has_prefix("mtp.", "mtp_layers.") or files.has_part("eh_proj")


def load(files: DraftFiles, target: DraftedTarget, how: Loading) -> MtpHead:
    """The MTP layer, with the target's embedding or lm_head where the files have no other."""
    index, files = mtp_layer(files, target.config.num_layers)
    config = mtp_config(files, target.config, index)
    check_vocabulary(files, target, target.config.vocab_size)
    files = without_copies(files, target)
    config = as_loaded(config, files, how)
    head = MtpHead(config, how.positions, shared_weights(target, config))
    views = {mtp_name(canonical_name(name), index): view for name, view in head.weight_views()}
    copy_weights(views, files.tensors, source=files.directory, progress=how.progress)
    return head


def mtp_layer(files: DraftFiles, target_layers: int) -> tuple[int, DraftFiles]:
    """(the number of the MTP layer, its tensors). Embedding and lm_head get the names they have in other drafts.

    In the target's own files the MTP layer is number `target_layers`; other files hold nothing else.

    Raises:
        CheckpointError: there is no MTP layer with known names, or more than one.
    """
    found = sorted(int(match[1]) for name in files.tensors if (match := _PROJECTION.fullmatch(name)))
    if files.is_target and target_layers not in found:
        raise CheckpointError(
            f"{files.directory}: this is the target itself, and it has no MTP layer to draft with: there is no "
            f"model.layers.{target_layers}.eh_proj.weight (quantized copies often lack it); name a draft checkpoint"
        )
    if not found:
        raise CheckpointError(
            f"{files.directory}: recognized as MTP (NextN) under other names than model.layers.*.eh_proj.weight; "
            "this draft format is not supported yet"
        )
    if len(found) > 1:
        raise CheckpointError(f"{files.directory}: {len(found)} MTP layers, {found}; only one is supported yet")
    index = found[0]
    kept = {
        mtp_name(name, index): tensor
        for name, tensor in files.tensors.items()
        if not files.is_target or name.startswith(f"layers.{index}.")
    }
    return index, replace(files, tensors=kept)


def mtp_name(name: str, index: int) -> str:
    """The canonical name of an MTP layer's tensor."""
    prefix = f"layers.{index}."
    shared = {"embed_tokens.weight": "embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    return shared.get(name.removeprefix(prefix), name) if name.startswith(prefix) else name


def mtp_config(files: DraftFiles, target: ModelConfig, index: int) -> MtpConfig:
    """The config of the MTP layer, from its config.json. Family, width and vocabulary must be the target's.

    Raises:
        CheckpointError: the config is for another target.
    """
    layers = read_target_config({**flatten(files), "architectures": [target.architecture]}, files.config_source)
    for key in ("hidden_size", "vocab_size"):
        expected, found = getattr(target, key), getattr(layers, key)
        if found != expected:
            raise CheckpointError(
                f"{files.config_source}: {key}: an MTP layer has its target's, expected {expected}, found {found}"
            )
    return MtpConfig.of(replace(layers, dtype=target.dtype), index)
