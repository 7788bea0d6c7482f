"""Loads drafts from published checkpoints: detects the format, checks it against the target, loads strictly.

The format is detected from the files alone, never from a flag.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle_server.algorithms import ALGORITHMS, Algorithm
from eagle_server.models.checkpoints.drafts.draft_format import DraftFiles, clean_names
from eagle_server.models.checkpoints.drafts.draft_loading import format_of
from eagle_server.models.checkpoints.drafts.draft_vocabulary import load_token_map
from eagle_server.models.checkpoints.drafts.other_formats import unsupported_format
from eagle_server.models.checkpoints.load_target import created_as
from eagle_server.models.checkpoints.loading import DEFAULT_LOADING, Loading
from eagle_server.models.checkpoints.quantized import with_dequantized
from eagle_server.models.checkpoints.weights import open_weights, resolve_checkpoint
from eagle_server.models.checkpoints.whole_vocabulary import WholeVocabulary
from eagle_server.models.config import CheckpointError, ModelConfig
from eagle_server.models.config_json import read_config
from eagle_server.models.drafts.interface import DraftModel
from eagle_server.models.layers import pack_linears
from eagle_server.models.targets.interface import DraftedTarget, Target

_CONFIG = "config.json"
log = logging.getLogger(__name__)


def load_draft(
    path: str | Path,
    target: Target,
    how: Loading = DEFAULT_LOADING,
    *,
    algorithm: str | None = None,
    token_map: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    target_path: str | Path | None = None,
) -> DraftModel:
    """Load the draft of a directory or Hub id, in the target's dtype and on its device.

    Args:
        path: may be `target_path`, if the target's files hold the draft.
        algorithm: a name in `ALGORITHMS`; None accepts any head.
        token_map: an FR-Spec file, see `load_token_map`.
        overrides: replaces keys of config.json, nested objects key by key. `aux_boundaries` sets the aux layers.

    Raises:
        CheckpointError: the format is unknown or not `algorithm`, or tensors are missing, unexpected or for another
            target.
    """
    files = draft_files(path, target_path, overrides)
    how = replace(how, context=how.context or target.config.max_position)
    row = _asked_for(files, algorithm)
    if row.is_model:
        model = format_of(row).load(files, target, how)
        return model if token_map is None else _restricted(model, token_map, target, how)
    drafted_for: DraftedTarget = target
    if target.config.split is not None:
        assert target_path is not None, "a split target is read again, whole"
        drafted_for = WholeVocabulary(
            target.config, resolve_checkpoint(target_path), target.embed.device, how.quantization
        )
    with created_as(target.embed.dtype, target.embed.device):
        head = format_of(row).load(files, drafted_for, how)
    return _ready(head, how) if token_map is None else _restricted(head, token_map, target, how)


def _restricted(draft: DraftModel, token_map: Path, target: Target, how: Loading) -> DraftModel:
    """`_ready`, with the tokens of a file alone."""
    draft.restrict_vocabulary(load_token_map(token_map, target.config.vocab_size).to(target.embed.device))
    log.info("%s: drafts %d of %d tokens", token_map, draft.draft_vocab_size, draft.vocab_size)
    return _ready(draft, how)


def _ready(draft: DraftModel, how: Loading) -> DraftModel:
    """For inference: frozen and packed."""
    draft.requires_grad_(requires_grad=False).eval()
    if how.pack:
        pack_linears(draft, how.quantization)
    return draft


def draft_files(
    path: str | Path, target_path: str | Path | None = None, overrides: Mapping[str, Any] | None = None
) -> DraftFiles:
    """The files of a directory or Hub id. No tensor is read."""
    directory, target = resolve_checkpoint(path), None if target_path is None else resolve_checkpoint(target_path)
    raw = read_config(directory) if (directory / _CONFIG).is_file() else {}
    stored = with_dequantized(open_weights(directory), raw, str(directory / _CONFIG))
    return DraftFiles(directory, raw, clean_names(stored, directory), overrides or {}, target)


def own_draft(directory: Path, target: ModelConfig) -> Algorithm | None:
    """The algorithm for which the target's own files hold all that it needs; None: there is none.

    Raises:
        CheckpointError: they hold a draft that is not supported.
    """
    files, row = draft_files(directory, directory), next(r for r in ALGORITHMS.values() if r.stored == "in the target")
    form = format_of(row)
    if not form.recognizes(files):
        return None
    form.kv_config(files, target)  # by the names of tensors and config.json
    return row


def detect(files: DraftFiles) -> Algorithm:
    """The algorithm that the files are for.

    Raises:
        CheckpointError: the format is unknown or not supported.
    """
    rows = ALGORITHMS.values()
    if files.is_target:
        both = (row for row in rows if row.stored == "both" and format_of(row).recognizes(files))
        return next(both, None) or next(row for row in rows if row.stored == "in the target")
    declared = files.config.get("speculators_model_type")
    if declared is not None:
        by_type = {name: row for row in rows for name in row.speculators}
        if declared not in by_type:
            raise CheckpointError(
                f"{files.config_source}: speculators_model_type {declared!r} is not supported yet, only "
                f"{' and '.join(map(repr, by_type))} is"
            )
        return by_type[declared]
    if (unsupported := unsupported_format(files)) is not None:
        raise CheckpointError(f"{files.directory}: recognized as {unsupported}; this draft format is not supported yet")
    known = next((row for row in rows if format_of(row).recognizes(files)), None)
    if known is None:
        some = ", ".join(sorted(files.tensors)[:8])
        raise CheckpointError(f"{files.directory}: not a draft format known here; its tensors are {some}, ...")
    return known


def _asked_for(files: DraftFiles, name: str | None) -> Algorithm:
    """The row of these files, which must be the one of this name. A language model checks its files itself."""
    if name is not None and ALGORITHMS[name].is_model:
        return ALGORITHMS[name]
    row = detect(files)
    if row.is_model:
        raise CheckpointError(
            f"{files.directory}: holds {row.holds}, not a draft head; to draft with it, add "
            f"--speculative-algorithm {row.name}"
        )
    if name not in (None, row.name):
        raise CheckpointError(
            f"{files.directory}: --speculative-algorithm {name} was asked for, but the files hold {row.holds}"
        )
    return row
