"""Draft heads from published checkpoints: recognized by their files, checked against their target, loaded strictly."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from eagle_server.models.checkpoints.draft_config import eagle3_config, eagle_config, flatten
from eagle_server.models.checkpoints.draft_format import (
    DraftFiles,
    DraftKind,
    canonical_name,
    clean_names,
    detect,
    find,
    is_causal_lm,
)
from eagle_server.models.checkpoints.draft_vocabulary import (
    check_map,
    check_vocabulary,
    load_token_map,
    without_copies,
)
from eagle_server.models.checkpoints.load_target import created_as
from eagle_server.models.checkpoints.medusa_files import medusa_files
from eagle_server.models.checkpoints.mtp_files import mtp_config, mtp_layer, mtp_name
from eagle_server.models.checkpoints.weights import copy_weights, open_weights, refuse_quantized, resolve_checkpoint
from eagle_server.models.config import CheckpointError, ModelConfig
from eagle_server.models.config_json import read_config
from eagle_server.models.drafts.eagle import EagleHead
from eagle_server.models.drafts.eagle3 import Eagle3Head
from eagle_server.models.drafts.interface import DraftHead, TargetWeights
from eagle_server.models.drafts.medusa import MEDUSA_2, MedusaHeads
from eagle_server.models.drafts.mtp import MtpHead
from eagle_server.models.drafts.post_norm_head import PostNormHead
from eagle_server.models.drafts.redrafter import RedrafterHead, redrafter_config
from eagle_server.models.drafts.standalone import DraftLM, load_standalone
from eagle_server.models.layers import pack_linears
from eagle_server.models.rope import at_context
from eagle_server.models.targets.interface import Target

Algorithm = Literal["EAGLE", "EAGLE3", "MEDUSA", "NEXTN", "REDRAFTER", "STANDALONE"]
_HEADS: dict[DraftKind, tuple[Algorithm, str]] = {
    DraftKind.EAGLE: ("EAGLE", "an EAGLE head"),
    DraftKind.EAGLE3: ("EAGLE3", "an EAGLE3 head"),
    DraftKind.MEDUSA: ("MEDUSA", "Medusa heads"),
    DraftKind.MTP: ("NEXTN", "an MTP layer (NEXTN)"),
    DraftKind.REDRAFTER: ("REDRAFTER", "a ReDrafter head"),
}
_NAMES = dict(_HEADS.values())

_CONFIG = "config.json"  # Medusa heads do without

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedDraft:
    """A draft head, and the algorithm that it is for."""

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
) -> LoadedDraft:
    """The draft of a directory or Hub id, in the target's dtype and on its device.

    `path` may be `target_path` itself, if the target brings Medusa heads or an MTP layer. The head's RoPE table covers
    `context` and `lookahead`, whatever the draft's max_position_embeddings is. `token_map` is an FR-Spec file.
    `overrides` replaces keys of config.json, nested objects key by key; `aux_boundaries` there settles the aux layers.
    The target is not changed: set `target.aux_boundaries = head.aux_boundaries` before using the head.

    Raises:
        CheckpointError: another format, an inexact checkpoint, or one for another target; `algorithm` contradicts it.
    """
    directory, overrides = resolve_checkpoint(path), overrides or {}
    is_target = target_path is not None and directory.resolve() == resolve_checkpoint(target_path).resolve()
    raw = read_config(directory) if (directory / _CONFIG).is_file() else {}
    refuse_quantized(raw, str(directory / "config.json"))
    files = DraftFiles(directory, raw, clean_names(open_weights(directory), directory))
    how = _Options(overrides, context, lookahead, is_target, progress)
    if algorithm == "STANDALONE":
        return _standalone(files, target, target_path, how)
    kind = _supported(_found(files, is_target=is_target), algorithm, directory)
    if kind != "MEDUSA" and not raw:
        read_config(directory)  # says what is missing
    flat = flatten(files, overrides)
    with created_as(target.embed.dtype, target.embed.device):
        head = _LOADERS[kind](flat, files, target, how)
        if token_map is not None and isinstance(head, PostNormHead):
            head.restrict_vocabulary(load_token_map(token_map, target.config.vocab_size))
        elif token_map is not None:
            log.warning("%s: ignored, as %s has its own vocabulary", token_map, _NAMES[kind])
    head.requires_grad_(requires_grad=False).eval()
    pack_linears(head)
    return LoadedDraft(kind, head)


@dataclass(frozen=True)
class _Options:
    """How a head is to be loaded; see `load_draft`. `is_target`: from the target's own files."""

    overrides: Mapping[str, Any]
    context: int
    lookahead: int
    is_target: bool
    progress: bool

    def served(self, layers: ModelConfig) -> ModelConfig:
        """The layers with RoPE as it is at the served context, which the trees' lookahead must not change."""
        return replace(layers, rope=at_context(layers.rope, layers.head_dim, self.context))


def _found(files: DraftFiles, *, is_target: bool) -> DraftKind:
    if not is_target:
        return detect(files)
    return DraftKind.MEDUSA if files.has_prefix(MEDUSA_2) else DraftKind.MTP


def _standalone(files: DraftFiles, target: Target, target_path: str | Path | None, how: _Options) -> LoadedDraft:
    """A language model; whether these files are one, its own loader knows best, but for heads that it may not say."""
    head = None if is_causal_lm(files) else find(files)
    if head is not None and head in _HEADS:
        found = _HEADS[head][1]
        raise CheckpointError(
            f"{files.directory}: --speculative-algorithm STANDALONE was asked for, but the files hold {found}"
        )
    model = load_standalone(
        files.directory,
        target,
        target_path=target_path,
        context=how.context,
        lookahead=how.lookahead,
        progress=how.progress,
    )
    return LoadedDraft("STANDALONE", model)


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


def _load_eagle(flat: Mapping[str, Any], files: DraftFiles, target: Target, how: _Options) -> EagleHead:
    config = eagle_config(flat, files, target.config)
    check_vocabulary(files, target, target.config.vocab_size)
    files = without_copies(files, target)
    config = replace(
        config,
        layers=how.served(config.layers),
        own_embed="embed_tokens.weight" in files.tensors,
        own_lm_head="lm_head.weight" in files.tensors,
    )
    head = EagleHead(config, how.context + how.lookahead, TargetWeights(target.embed.detach(), target.lm_head))
    _fill(head, files, how)
    return head


def _load_eagle3(flat: Mapping[str, Any], files: DraftFiles, target: Target, how: _Options) -> Eagle3Head:
    config = eagle3_config(flat, files, target.config, overridden=how.overrides)
    check_vocabulary(files, target, config.draft_vocab_size)
    files = without_copies(files, target)
    own_embed, own_lm_head = "embed_tokens.weight" in files.tensors, "lm_head.weight" in files.tensors
    for name, own in (("embed_tokens.weight", own_embed), ("lm_head.weight", own_lm_head)):
        if not own and config.layers.hidden_size != target.config.hidden_size:
            raise CheckpointError(
                f"{files.directory}: {name}: missing; a draft of width {config.layers.hidden_size} cannot share that "
                f"of a target of width {target.config.hidden_size}"
            )
    config = replace(config, layers=how.served(config.layers), own_embed=own_embed, own_lm_head=own_lm_head)
    head = Eagle3Head(config, how.context + how.lookahead, TargetWeights(target.embed.detach(), target.lm_head))
    _fill(head, files, how)
    if head.d2t is not None and head.t2d is not None:
        check_map(head.d2t, head.t2d, files)
    return head


def _load_mtp(flat: Mapping[str, Any], files: DraftFiles, target: Target, how: _Options) -> MtpHead:
    index, files = mtp_layer(files, target.config.num_layers if how.is_target else None)
    config = mtp_config(flat, files, target.config, index)
    check_vocabulary(files, target, target.config.vocab_size)
    files = without_copies(files, target)
    config = replace(
        config,
        layers=how.served(config.layers),
        own_embed="embed_tokens.weight" in files.tensors,
        own_lm_head="lm_head.weight" in files.tensors,
    )
    head = MtpHead(config, how.context + how.lookahead, TargetWeights(target.embed.detach(), target.lm_head))
    views = {mtp_name(canonical_name(name), index): view for name, view in head.weight_views()}
    copy_weights(views, files.tensors, source=files.directory, progress=how.progress)
    return head


def _load_redrafter(flat: Mapping[str, Any], files: DraftFiles, target: Target, how: _Options) -> RedrafterHead:
    config = redrafter_config(flat, files, target.config)
    head = RedrafterHead(config, TargetWeights(target.embed.detach(), target.lm_head))
    _fill(head, files, how)
    return head


def _load_medusa(flat: Mapping[str, Any], files: DraftFiles, target: Target, how: _Options) -> MedusaHeads:
    config, tensors = medusa_files(files, target.config)
    heads = MedusaHeads(config, TargetWeights(target.embed.detach(), target.lm_head))
    copy_weights(dict(heads.weight_views()), tensors, source=files.directory, progress=how.progress)
    return heads


_LOADERS: Mapping[Algorithm, Callable[..., EagleHead | Eagle3Head | MedusaHeads | MtpHead | RedrafterHead]] = {
    "EAGLE": _load_eagle,
    "EAGLE3": _load_eagle3,
    "MEDUSA": _load_medusa,
    "NEXTN": _load_mtp,
    "REDRAFTER": _load_redrafter,
}


def _fill(head: EagleHead | Eagle3Head | RedrafterHead, files: DraftFiles, how: _Options) -> None:
    views = {canonical_name(name): view for name, view in head.weight_views()}
    copy_weights(views, files.tensors, source=files.directory, progress=how.progress)
