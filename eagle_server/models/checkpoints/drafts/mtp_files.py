"""MTP layers in checkpoints: in the target's own files, or exported to a separate directory.

DeepSeek, GLM-4 MoE   model.layers.N.{enorm, hnorm, eh_proj, shared_head.norm}, and a decoder layer's names, N: the
                      target's number of layers, and the next numbers for more; often with copies of the target's
                      embedding and lm_head
Qwen3-Next, Qwen3.5   mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm} and mtp.layers.0.*
MiMo                  model.mtp_layers.K.{token_layernorm, hidden_layernorm, input_proj, final_layernorm}, and a decoder
                      layer's names; input_proj reads the hidden state first
MiMo-V2-Flash         model.mtp.layers.K.{enorm, hnorm, eh_proj, pre_mlp_layernorm, final_layernorm}, and a decoder
                      layer's names
LongCat-Flash         model.mtp.layers.0.{enorm.m, hnorm.m, eh_proj, transformer_layer.mlp}, a decoder layer's names,
                      model.mtp.norm, and often a copy of the target's embedding, model.mtp.embed_tokens
Nemotron-H            mtp.layers.J.{norm, mixer} of the layers that are one MTP layer, enorm, hnorm and eh_proj in the
                      first, final_layernorm in the last
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import torch

from eagle_server.models.checkpoints.drafts.draft_format import DraftFiles, canonical_name, flatten
from eagle_server.models.checkpoints.drafts.draft_loading import as_loaded, filled, shared_weights
from eagle_server.models.checkpoints.drafts.draft_vocabulary import check_vocabulary, is_copy, without_copies
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.padded_values import with_padded_values
from eagle_server.models.checkpoints.weights import StoredTensor, Weights
from eagle_server.models.config import CheckpointError, ModelConfig
from eagle_server.models.drafts.mtp import MtpConfig, MtpHead
from eagle_server.models.targets.interface import DraftedTarget
from eagle_server.models.targets.registry import mtp_traits, read_target_config

_MODELS_NORM = "norm.weight"  # llama.cpp writes it beside MTP layers that stand alone
_PROJECTION = re.compile(r"layers\.(\d+)\.eh_proj\.weight")
_QWEN_NAMES = {
    "mtp.fc.": "eh_proj.",
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "shared_head.norm.",  # LongCat's, too, as the next one
    "mtp.embed_tokens.": "embed_tokens.",
    "mtp.layers.0.": "",
}
_MIMO = re.compile(r"mtp_layers\.(\d+)\.(.*)")
_NUMBERED = re.compile(r"mtp\.layers\.(\d+)\.(.*)")
_NUMBERED_NAMES = {
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "final_layernorm.weight": "shared_head.norm.weight",
    "enorm.m.weight": "enorm.weight",
    "hnorm.m.weight": "hnorm.weight",
    **{f"transformer_layer.mlp.{part}.weight": f"mlp.{part}.weight" for part in ("gate_proj", "up_proj", "down_proj")},
}
_MIMO_NAMES = {
    "input_proj.weight": "eh_proj.weight",
    "token_layernorm.weight": "enorm.weight",
    "hidden_layernorm.weight": "hnorm.weight",
    "final_layernorm.weight": "shared_head.norm.weight",
}


def recognizes(files: DraftFiles) -> bool:
    """Whether there is an MTP layer under any of its published names."""
    return files.has_prefix("mtp.", "mtp_layers.") or files.has_part("eh_proj")


def kv_config(files: DraftFiles, target: ModelConfig) -> ModelConfig:
    """See `DraftFormat`."""
    numbers, files = mtp_layers(by_deepseeks_names(files, target.num_layers), target.num_layers)
    return mtp_config(files, target, numbers).layers


def load(files: DraftFiles, target: DraftedTarget, how: Loading) -> MtpHead:
    """The MTP layers, with the target's embedding or lm_head where the files have no other."""
    stored, first = files.tensors, target.config.num_layers
    numbers, files = mtp_layers(by_deepseeks_names(files, first), first)
    config = mtp_config(files, target.config, numbers)
    check_vocabulary(files, target, target.config.vocab_size)
    files = _without_later_copies(without_copies(files, target), target, numbers, stored if files.is_target else {})
    config = as_loaded(config, files, how)
    files = replace(files, tensors=with_padded_values(files.tensors, config.layers))
    head = MtpHead(config, how.positions, shared_weights(target, config))
    return filled(head, files, how, lambda name: mtp_name(canonical_name(name), numbers[0]))


def by_deepseeks_names(files: DraftFiles, index: int) -> DraftFiles:
    """`files` with the tensors of all families' MTP layers as those of layers `index`, `index` + 1, ..."""
    if any(name.startswith("mtp.layers.0.mixer.") for name in files.tensors):
        files = replace(files, tensors={_as_one_layer(name): each for name, each in files.tensors.items()})
    if "mtp.layers.0.eh_proj.weight" in files.tensors:
        files = _numbered(files, _NUMBERED, _NUMBERED_NAMES, index)
    if files.is_target and "mtp_layers.0.input_proj.weight" in files.tensors:  # speculators has these names, too
        files = _numbered(files, _MIMO, _MIMO_NAMES, index)
        joined = {
            name: _embedding_first(each) for name, each in files.tensors.items() if name.endswith(".eh_proj.weight")
        }
        return replace(files, tensors=files.tensors | joined)
    renamed = dict(files.tensors)
    for name in files.tensors:
        for theirs, ours in _QWEN_NAMES.items():
            if name.startswith(theirs):
                renamed[f"layers.{index}.{ours}{name.removeprefix(theirs)}"] = renamed.pop(name)
    return replace(files, tensors=renamed)


def _as_one_layer(name: str) -> str:
    """A name in Nemotron-H's MTP layer, whose parts are numbered as layers are."""
    match = _NUMBERED.fullmatch(name)
    if match is not None and match[2].startswith(("norm.", "mixer.")):
        return f"mtp.layers.0.parts.{match[1]}.{match[2]}"
    return name if match is None or not match[2].startswith("final_") else f"mtp.layers.0.{match[2]}"


def _numbered(files: DraftFiles, pattern: re.Pattern[str], names: Mapping[str, str], index: int) -> DraftFiles:
    """Layers that are numbered from 0 on under a name of their own, as layers `index`, `index` + 1, ..."""
    tensors: Weights = {}
    for name, tensor in files.tensors.items():
        match = pattern.fullmatch(name)
        own = None if match is None else names.get(match[2], match[2])
        tensors[name if match is None else f"layers.{index + int(match[1])}.{own}"] = tensor
    return replace(files, tensors=tensors)


def _embedding_first(projection: StoredTensor) -> StoredTensor:
    """A projection of (hidden state, embedding) as one of (embedding, hidden state)."""
    return StoredTensor(
        projection.file,
        projection.key,
        projection.shape,
        lambda: torch.cat(projection.read().chunk(2, dim=1)[::-1], dim=1),
    )


def mtp_layers(files: DraftFiles, target_layers: int) -> tuple[range, DraftFiles]:
    """(the numbers of the MTP layers, their tensors).

    The first one's embedding and lm_head get the names they have in other drafts. In the target's own files the layers
    are numbered from `target_layers` on. Other files hold these layers alone, or a whole model, such as the target
    before it was quantized: of that only these layers are read.

    Raises:
        CheckpointError: there is no MTP layer with known names, or not all that config.json counts.
    """
    numbers = sorted(int(match[1]) for name in files.tensors if (match := _PROJECTION.fullmatch(name)))
    if files.is_target and target_layers not in numbers:
        raise CheckpointError(
            f"{files.directory}: this is the target itself, and it has no MTP layer to draft with: there is no "
            f"model.layers.{target_layers}.eh_proj.weight, mtp.fc.weight or model.mtp_layers.0.input_proj.weight "
            "(quantized copies often lack it); name a draft checkpoint"
        )
    if not numbers:
        raise CheckpointError(
            f"{files.directory}: recognized as MTP (NextN) under other names than model.layers.*.eh_proj.weight and "
            "mtp.fc.weight; this draft format is not supported yet"
        )
    first = target_layers if files.is_target else numbers[0]
    declared = files.config.get("num_nextn_predict_layers")
    count = max(numbers[-1] + 1 - first, declared if isinstance(declared, int) else 0)
    layers = range(first, first + count)
    if absent := [layer for layer in layers if layer not in numbers]:
        names = ", ".join(f"model.layers.{layer}.eh_proj.weight" for layer in absent)
        raise CheckpointError(f"{files.directory}: {count} MTP layers are expected, but there is no {names}")
    prefixes = tuple(f"layers.{layer}." for layer in layers)
    has_target = first == target_layers and any(name.startswith("layers.0.") for name in files.tensors)
    kept = {
        mtp_name(name, first): tensor
        for name, tensor in files.tensors.items()
        if (name != _MODELS_NORM if not has_target else name.startswith(prefixes))
    }
    return layers, replace(files, tensors=kept)


def _without_later_copies(files: DraftFiles, target: DraftedTarget, numbers: range, own: Weights) -> DraftFiles:
    """`files` without the copies of embedding and lm_head that MTP layers after the first have.

    own: the tensors of the target's files, where they are these: what is loaded may be rounded.

    Raises:
        CheckpointError: one of them is no copy of the target's.
    """
    shape, tensors = (target.config.vocab_size, target.config.hidden_size), dict(files.tensors)
    for layer in numbers[1:]:
        for name, theirs in (("embed_tokens", "embed_tokens.weight"), ("shared_head.head", "lm_head.weight")):
            stored = tensors.pop(f"layers.{layer}.{name}.weight", None)
            if stored is None:
                continue
            if theirs in own:
                weight = own[theirs].read()
            else:
                weight = target.lm_head.dense_weight() if name == "shared_head.head" else target.embed
            if stored.shape != shape or not is_copy(stored.read(), weight):
                raise CheckpointError(
                    f"{stored.file}: {stored.key}: not the target's; MTP layers after the first must share it"
                )
    return replace(files, tensors=tensors)


def mtp_name(name: str, index: int) -> str:
    """The canonical name of an MTP layer's tensor."""
    prefix = f"layers.{index}."
    shared = {"embed_tokens.weight": "embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    return shared.get(name.removeprefix(prefix), name) if name.startswith(prefix) else name


def published_name(name: str, config: MtpConfig) -> str:
    """The name in the family's own files of a tensor that `MtpHead.weight_views` names: Qwen's mtp.*, or DeepSeek's."""
    if not mtp_traits(config.layers.architecture).named_mtp:
        return name
    part = name.removeprefix(f"model.layers.{config.index}.")
    theirs, ours = next(pair for pair in _QWEN_NAMES.items() if part.startswith(pair[1]))
    return theirs + part.removeprefix(ours)


def mtp_config(files: DraftFiles, target: ModelConfig, numbers: range) -> MtpConfig:
    """The config of the MTP layers, from their config.json. Family, width and vocabulary must be the target's.

    Raises:
        CheckpointError: the config is for another target.
    """
    raw = flatten(files)
    mtp_traits(target.architecture).check(raw, files.config_source)
    layers = read_target_config({**raw, "architectures": [target.architecture]}, files.config_source)
    for key in ("hidden_size", "vocab_size"):
        expected, value = getattr(target, key), getattr(layers, key)
        if value != expected:
            raise CheckpointError(
                f"{files.config_source}: {key}: an MTP layer has its target's, expected {expected}, found {value}"
            )
    config = MtpConfig.of(replace(layers, dtype=target.dtype), numbers[0], len(numbers))
    return config if config.boundary is None else replace(config, boundary=target.num_layers)
