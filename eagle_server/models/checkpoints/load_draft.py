"""Loads draft heads from published checkpoints: detects the format, checks it against the target, loads strictly."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from eagle_server.models.checkpoints.draft_format import (
    MEDUSA_2,
    DraftFiles,
    DraftKind,
    canonical_name,
    clean_names,
    detect,
    find,
    is_causal_lm,
)
from eagle_server.models.checkpoints.draft_vocabulary import (
    check_vocabulary,
    load_token_map,
    with_map,
    without_copies,
)
from eagle_server.models.checkpoints.eagle_files import eagle3_config, eagle_config
from eagle_server.models.checkpoints.load_standalone import load_standalone
from eagle_server.models.checkpoints.load_target import created_as
from eagle_server.models.checkpoints.medusa_files import medusa_files
from eagle_server.models.checkpoints.mtp_files import mtp_config, mtp_layer, mtp_name
from eagle_server.models.checkpoints.quantized import with_dequantized
from eagle_server.models.checkpoints.redrafter_files import redrafter_config
from eagle_server.models.checkpoints.weights import copy_weights, open_weights, resolve_checkpoint
from eagle_server.models.checkpoints.whole_vocabulary import WholeVocabulary
from eagle_server.models.config import CheckpointError
from eagle_server.models.config_json import read_config
from eagle_server.models.drafts.eagle import EagleConfig, EagleHead
from eagle_server.models.drafts.eagle3 import Eagle3Config, Eagle3Head
from eagle_server.models.drafts.interface import DraftHead, TargetWeights
from eagle_server.models.drafts.medusa import MedusaHeads
from eagle_server.models.drafts.mtp import MtpConfig, MtpHead
from eagle_server.models.drafts.post_norm_head import PostNormHead
from eagle_server.models.drafts.redrafter import RedrafterHead
from eagle_server.models.drafts.standalone import DraftLM
from eagle_server.models.layers import Linear, pack_linears
from eagle_server.models.rope import at_context
from eagle_server.models.targets.interface import DraftedTarget, Target
from eagle_server.ops.quantize import Quantization

Algorithm = Literal["EAGLE", "EAGLE3", "MEDUSA", "NEXTN", "REDRAFTER", "STANDALONE"]
_HEADS: dict[DraftKind, tuple[Algorithm, str]] = {
    DraftKind.EAGLE: ("EAGLE", "an EAGLE head"),
    DraftKind.EAGLE3: ("EAGLE3", "an EAGLE3 head"),
    DraftKind.MEDUSA: ("MEDUSA", "Medusa heads"),
    DraftKind.MTP: ("NEXTN", "an MTP layer (NEXTN)"),
    DraftKind.REDRAFTER: ("REDRAFTER", "a ReDrafter head"),
}
_NAMES = dict(_HEADS.values())

_CONFIG = "config.json"

log = logging.getLogger(__name__)

HeadConfig = TypeVar("HeadConfig", EagleConfig, Eagle3Config, MtpConfig)


@dataclass(frozen=True)
class LoadedDraft:
    """A draft head and its algorithm."""

    kind: Algorithm
    head: DraftHead | DraftLM | MedusaHeads | RedrafterHead


def load_draft(  # noqa: PLR0913
    path: str | Path,
    target: Target,
    *,
    context: int,
    lookahead: int = 0,
    algorithm: Algorithm | None = None,
    token_map: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    target_path: str | Path | None = None,
    progress: bool = True,
    pack: bool = True,
    quantization: Quantization | None = None,
) -> LoadedDraft:
    """Load the draft of a directory or Hub id, in the target's dtype and on its device.

    The target is not changed: set `target.aux_boundaries = head.aux_boundaries` before using the head.

    Args:
        path: may be `target_path`, if the target's files hold Medusa heads or an MTP layer.
        context, lookahead: the RoPE table has context + lookahead positions, for any max_position_embeddings.
        algorithm: the expected algorithm; None accepts any head.
        token_map: an FR-Spec file.
        overrides: replaces keys of config.json, nested objects key by key. `aux_boundaries` sets the aux layers.
        pack: packs the linear layers. False keeps the plain weights, for training.
        quantization: rounds them, too.

    Raises:
        CheckpointError: the format is unknown or not `algorithm`, or tensors are missing, unexpected or for another
            target.
    """
    directory = resolve_checkpoint(path)
    raw = read_config(directory) if (directory / _CONFIG).is_file() else {}
    is_target = target_path is not None and directory.resolve() == resolve_checkpoint(target_path).resolve()
    stored = with_dequantized(open_weights(directory), raw, str(directory / _CONFIG))
    tensors = clean_names(stored, directory)
    files = DraftFiles(directory, raw, tensors, overrides or {}, is_target)
    if algorithm == "STANDALONE":
        _refuse_head(files)
        model = load_standalone(
            directory,
            target,
            target_path=target_path,
            context=context,
            lookahead=lookahead,
            progress=progress,
            quantization=quantization,
        )
        return LoadedDraft("STANDALONE", model)
    kind = _supported(_found(files), algorithm, directory)
    if kind != "MEDUSA" and not raw:
        read_config(directory)  # raises: only Medusa heads may come without config.json
    drafted: DraftedTarget = target
    if target.config.split is not None:
        assert target_path is not None, "a split target is read again, whole"
        drafted = WholeVocabulary(target.config, resolve_checkpoint(target_path), target.embed.device, quantization)
    with created_as(target.embed.dtype, target.embed.device):
        head = _LOADERS[kind](files, drafted, context, lookahead, progress=progress)
        if token_map is not None and isinstance(head, PostNormHead):
            head.restrict_vocabulary(load_token_map(token_map, target.config.vocab_size))
        elif token_map is not None:
            log.warning("%s: ignored, as %s has its own vocabulary", token_map, _NAMES[kind])
    head.requires_grad_(requires_grad=False).eval()
    if pack:
        pack_linears(head, quantization)
    return LoadedDraft(kind, head)


def _found(files: DraftFiles) -> DraftKind:
    if not files.is_target:
        return detect(files)
    return DraftKind.MEDUSA if files.has_prefix(MEDUSA_2) else DraftKind.MTP


def _refuse_head(files: DraftFiles) -> None:
    """Refuse a draft head, because STANDALONE needs a language model. The target loader does all other checks."""
    head = None if is_causal_lm(files) else find(files)
    if head is not None and head in _HEADS:
        raise CheckpointError(
            f"{files.directory}: --speculative-algorithm STANDALONE was asked for, but the files hold {_HEADS[head][1]}"
        )


def _supported(found: DraftKind, algorithm: Algorithm | None, directory: Path) -> Algorithm:
    if found == DraftKind.DRAFT_LM:
        raise CheckpointError(
            f"{directory}: holds a language model, not a draft head; to draft with it, add "
            "--speculative-algorithm STANDALONE"
        )
    if found not in _HEADS:
        raise CheckpointError(f"{directory}: recognized as {found}; this draft format is not supported yet")
    kind, name = _HEADS[found]
    if algorithm is not None and algorithm != kind:
        raise CheckpointError(
            f"{directory}: --speculative-algorithm {algorithm} was asked for, but the files hold {name}"
        )
    return kind


def _load_eagle(files: DraftFiles, target: DraftedTarget, context: int, lookahead: int, *, progress: bool) -> EagleHead:
    config = eagle_config(files, target.config)
    check_vocabulary(files, target, target.config.vocab_size)
    files = without_copies(files, target)
    config = _as_loaded(config, files, context)
    head = EagleHead(config, context + lookahead, _shared_weights(target, config))
    _fill(head, files, progress=progress)
    return head


def _load_eagle3(
    files: DraftFiles, target: DraftedTarget, context: int, lookahead: int, *, progress: bool
) -> Eagle3Head:
    config = eagle3_config(files, target.config)
    check_vocabulary(files, target, config.draft_vocab_size)
    files = with_map(without_copies(files, target), config.draft_vocab_size, target.config.vocab_size)
    config = _as_loaded(config, files, context)
    for name, own in (("embed_tokens.weight", config.own_embed), ("lm_head.weight", config.own_lm_head)):
        if not own and config.layers.hidden_size != target.config.hidden_size:
            raise CheckpointError(
                f"{files.directory}: {name}: missing; a draft of width {config.layers.hidden_size} cannot share that "
                f"of a target of width {target.config.hidden_size}"
            )
    head = Eagle3Head(config, context + lookahead, _shared_weights(target, config))
    _fill(head, files, progress=progress)
    return head


def _load_mtp(files: DraftFiles, target: DraftedTarget, context: int, lookahead: int, *, progress: bool) -> MtpHead:
    index, files = mtp_layer(files, target.config.num_layers)
    config = mtp_config(files, target.config, index)
    check_vocabulary(files, target, target.config.vocab_size)
    files = without_copies(files, target)
    config = _as_loaded(config, files, context)
    head = MtpHead(config, context + lookahead, _shared_weights(target, config))
    views = {mtp_name(canonical_name(name), index): view for name, view in head.weight_views()}
    copy_weights(views, files.tensors, source=files.directory, progress=progress)
    return head


def _load_redrafter(files: DraftFiles, target: DraftedTarget, *_: int, progress: bool) -> RedrafterHead:
    head = RedrafterHead(redrafter_config(files, target.config), _shared_weights(target))
    _fill(head, files, progress=progress)
    return head


def _load_medusa(files: DraftFiles, target: DraftedTarget, *_: int, progress: bool) -> MedusaHeads:
    config, tensors = medusa_files(files, target.config)
    heads = MedusaHeads(config, _shared_weights(target))
    copy_weights(dict(heads.weight_views()), tensors, source=files.directory, progress=progress)
    return heads


_LOADERS: Mapping[Algorithm, Callable[..., EagleHead | Eagle3Head | MedusaHeads | MtpHead | RedrafterHead]] = {
    "EAGLE": _load_eagle,
    "EAGLE3": _load_eagle3,
    "MEDUSA": _load_medusa,
    "NEXTN": _load_mtp,
    "REDRAFTER": _load_redrafter,
}


def _fill(head: EagleHead | Eagle3Head | RedrafterHead, files: DraftFiles, *, progress: bool) -> None:
    views = {canonical_name(name): view for name, view in head.weight_views()}
    copy_weights(views, files.tensors, source=files.directory, progress=progress)


def _shared_weights(
    target: DraftedTarget, config: EagleConfig | Eagle3Config | MtpConfig | None = None
) -> TargetWeights:
    """Of a split target only what the head does not have itself: the rest need not be read."""
    own = config if target.config.split is not None else None
    embed = torch.empty(0) if own is not None and own.own_embed else target.embed.detach()
    return TargetWeights(embed, Linear(0, []) if own is not None and own.own_lm_head else target.lm_head)


def _as_loaded(config: HeadConfig, files: DraftFiles, context: int) -> HeadConfig:
    """The config with what the files hold, and with RoPE resolved for the served context.

    The lookahead of the trees must not change RoPE.
    """
    layers = config.layers
    return replace(
        config,
        layers=replace(layers, rope=at_context(layers.rope, layers.head_dim, context)),
        own_embed="embed_tokens.weight" in files.tensors,
        own_lm_head="lm_head.weight" in files.tensors,
    )
