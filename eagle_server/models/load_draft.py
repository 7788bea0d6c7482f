"""Draft heads from published checkpoints: recognized by their files, checked against their target, loaded strictly."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from eagle_server.models.config import CheckpointError, ModelConfig, read_config
from eagle_server.models.draft import DraftHead, TargetWeights
from eagle_server.models.draft_config import eagle3_config, eagle_config, flatten
from eagle_server.models.draft_format import DraftFiles, DraftKind, canonical_name, clean_names, detect
from eagle_server.models.draft_vocabulary import (
    check_map,
    check_vocabulary,
    load_token_map,
    without_copies,
)
from eagle_server.models.eagle import EagleConfig, EagleHead
from eagle_server.models.eagle3 import Eagle3Config, Eagle3Head
from eagle_server.models.layers import pack_linears
from eagle_server.models.loader import created_as
from eagle_server.models.rope import at_context
from eagle_server.models.target import TargetModel
from eagle_server.models.weights import copy_weights, open_weights, refuse_quantized, resolve_checkpoint

Algorithm = Literal["EAGLE", "EAGLE3"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedDraft:
    """A draft head, and the algorithm that it is for."""

    kind: Algorithm
    head: DraftHead


def load_draft(  # noqa: PLR0913
    path: str | Path,
    target: TargetModel,
    *,
    context: int,
    lookahead: int = 0,
    algorithm: Algorithm | None = None,
    token_map: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    target_path: str | Path | None = None,
    progress: bool = True,
) -> LoadedDraft:
    """The EAGLE-1/2 or EAGLE-3 head of a checkpoint directory or Hub id, in the target's dtype and on its device.

    Its RoPE table covers `context` and `lookahead`, whatever the draft's max_position_embeddings is. `token_map` is an
    FR-Spec file. `overrides` replaces keys of config.json, nested objects key by key; `aux_boundaries` there settles
    the aux layers. The target is not changed: set `target.aux_boundaries = head.aux_boundaries` before using the head.

    Raises:
        CheckpointError: another format, an inexact checkpoint, or one for another target; `algorithm` contradicts it.
    """
    directory, overrides = resolve_checkpoint(path), overrides or {}
    if target_path is not None and directory.resolve() == resolve_checkpoint(target_path).resolve():
        raise CheckpointError(
            f"{path}: this is the target itself, and it is no draft; name a draft checkpoint (drafting with a "
            "target's own MTP layers is not supported yet)"
        )
    raw = read_config(directory)
    refuse_quantized(raw, str(directory / "config.json"))
    files = DraftFiles(directory, raw, clean_names(open_weights(directory), directory))
    kind = _supported(detect(files), algorithm, directory)
    flat = flatten(files, overrides)
    with created_as(target.embed.dtype, target.embed.device):
        head: EagleHead | Eagle3Head
        if kind == "EAGLE":
            eagle = eagle_config(flat, files, target.config)
            eagle = replace(eagle, layers=_served(eagle.layers, context))
            head = _load_eagle(eagle, files, target, context=context + lookahead, progress=progress)
            if token_map is not None:
                head.restrict_vocabulary(load_token_map(token_map, target.config.vocab_size))
        else:
            config = eagle3_config(flat, files, target.config, overridden=overrides)
            config = replace(config, layers=_served(config.layers, context))
            head = _load_eagle3(config, files, target, context=context + lookahead, progress=progress)
            if token_map is not None:
                log.warning("%s: ignored, as an EAGLE-3 head has its own vocabulary", token_map)
    head.requires_grad_(requires_grad=False).eval()
    pack_linears(head)
    return LoadedDraft(kind, head)


def _supported(found: DraftKind, algorithm: Algorithm | None, directory: Path) -> Algorithm:
    if found is not DraftKind.EAGLE and found is not DraftKind.EAGLE3:
        raise CheckpointError(f"{directory}: recognized as {found}; this draft format is not supported yet")
    kind: Algorithm = "EAGLE" if found is DraftKind.EAGLE else "EAGLE3"
    if algorithm is not None and algorithm != kind:
        raise CheckpointError(
            f"{directory}: --speculative-algorithm {algorithm} was asked for, but the files hold an {kind} head"
        )
    return kind


def _served(layers: ModelConfig, context: int) -> ModelConfig:
    """The layers with RoPE as it is at the served context, which the trees' lookahead must not change."""
    return replace(layers, rope=at_context(layers.rope, layers.head_dim, context))


def _load_eagle(
    config: EagleConfig, files: DraftFiles, target: TargetModel, *, context: int, progress: bool
) -> EagleHead:
    check_vocabulary(files, target, target.config.vocab_size)
    files = without_copies(files, target)
    config = replace(
        config,
        own_embed="embed_tokens.weight" in files.tensors,
        own_lm_head="lm_head.weight" in files.tensors,
    )
    head = EagleHead(config, context, TargetWeights(target.embed.detach(), target.lm_head))
    _fill(head, files, progress=progress)
    return head


def _load_eagle3(
    config: Eagle3Config, files: DraftFiles, target: TargetModel, *, context: int, progress: bool
) -> Eagle3Head:
    check_vocabulary(files, target, config.draft_vocab_size)
    files = without_copies(files, target)
    own_embed, own_lm_head = "embed_tokens.weight" in files.tensors, "lm_head.weight" in files.tensors
    for name, own in (("embed_tokens.weight", own_embed), ("lm_head.weight", own_lm_head)):
        if not own and config.layers.hidden_size != target.config.hidden_size:
            raise CheckpointError(
                f"{files.directory}: {name}: missing; a draft of width {config.layers.hidden_size} cannot share that "
                f"of a target of width {target.config.hidden_size}"
            )
    config = replace(config, own_embed=own_embed, own_lm_head=own_lm_head)
    head = Eagle3Head(config, context, TargetWeights(target.embed.detach(), target.lm_head))
    _fill(head, files, progress=progress)
    if head.d2t is not None and head.t2d is not None:
        check_map(head.d2t, head.t2d, files)
    return head


def _fill(head: EagleHead | Eagle3Head, files: DraftFiles, *, progress: bool) -> None:
    views = {canonical_name(name): view for name, view in head.weight_views()}
    copy_weights(views, files.tensors, source=files.directory, progress=progress)
