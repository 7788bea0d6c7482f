"""P-EAGLE checkpoints of speculators, AWS, SpecForge and AutoModel: EAGLE-3's with `mask_hidden` and a mask token."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eagle_server.models.checkpoints.drafts import eagle3_files
from eagle_server.models.checkpoints.drafts.draft_format import DraftFiles, flatten
from eagle_server.models.checkpoints.drafts.draft_loading import filled, shared_weights
from eagle_server.models.checkpoints.drafts.draft_vocabulary import mask_token_id_of, with_target_rows
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.weights import StoredTensor
from eagle_server.models.config import CheckpointError, ModelConfig
from eagle_server.models.config_json import integer
from eagle_server.models.drafts.peagle import PEagleConfig, PEagleHead
from eagle_server.models.targets.interface import DraftedTarget

_KNOWN = {  # keys of eagle_config
    *("use_aux_hidden_state", "eagle_aux_hidden_state_layer_ids", "norm_before_residual", "norm_before_fc", "fc_norm"),
    *("use_aux_norm", "norm_output", "next_layer_regular", *eagle3_files.FIXED_FLAGS),
}

log = logging.getLogger(__name__)


def recognizes(files: DraftFiles) -> bool:
    """Whether there is a mask slot's input, or config.json names a mask token of an EAGLE-3 head."""
    named = {"ptd_token_id", "pard_token"} & set(files.config) or files.config.get("parallel_drafting") is True
    return "mask_hidden" in files.tensors or (bool(named) and eagle3_files.recognizes(files))


def kv_config(files: DraftFiles, target: ModelConfig) -> ModelConfig:
    """See `DraftFormat`."""
    return eagle3_files.kv_config(files, target)


def load(files: DraftFiles, target: DraftedTarget, how: Loading) -> PEagleHead:
    """The head, with the target's embedding or lm_head where it has none of its own."""
    files = with_target_rows(files, target, has_map=True)
    config = peagle_config(files, target.config)
    config, files = eagle3_files.completed(config, _in_one_shape(files), target, how)
    head = filled(PEagleHead(config, how.positions, shared_weights(target, config)), files, how)
    log.info("%s: %s", files.directory, _described(config))
    return head


def peagle_config(files: DraftFiles, target: ModelConfig) -> PEagleConfig:
    """The config of a P-EAGLE head.

    Raises:
        CheckpointError: see `eagle3_config`; a key that is not known, or no mask token.
    """
    flat, source = flatten(files), files.config_source
    unknown = sorted(set(flat.get("eagle_config") or {}) - _KNOWN)
    if unknown:
        raise CheckpointError(f"{source}: eagle_config: {', '.join(unknown)}: not supported; drop it, or update")
    config = eagle3_files.eagle3_config(files, target)
    if not config.aux_boundaries:
        raise CheckpointError(f"{source}: use_aux_hidden_state: false is not supported in a P-EAGLE head")
    return PEagleConfig(
        **vars(config),
        mask_token_id=mask_token_id_of(flat.get, target.vocab_size, source),
        num_drafts=_num_drafts(flat, source),
    )


def _num_drafts(flat: Mapping[str, Any], source: str) -> int | None:
    """The levels of the training: AutoModel's `num_depths`, or what speculators wrote of it."""
    methods = (flat.get("speculators_config") or {}).get("proposal_methods") or [{}]
    if flat.get("num_depths") is not None:
        return integer(flat, "num_depths", source)
    if methods[0].get("speculative_tokens") is not None:
        return integer(methods[0], "speculative_tokens", source)
    return None


def _in_one_shape(files: DraftFiles) -> DraftFiles:
    """`files` with mask_hidden as [1, 1, n * Ht]: AutoModel and others leave out leading ones."""
    stored = files.tensors.get("mask_hidden")
    if stored is None or any(size != 1 for size in stored.shape[:-1]):
        return files
    shape, read = (1, 1, *stored.shape[-1:]), stored.read
    whole = StoredTensor(stored.file, stored.key, shape, lambda: read().view(shape))
    return replace(files, tensors={**files.tensors, "mask_hidden": whole})


def _described(config: PEagleConfig) -> str:
    windows = sorted({window for window in config.layers.windows if window})
    drafts = "any number of" if config.num_drafts is None else config.num_drafts
    return (
        f"a P-EAGLE head: next-token layout, {drafts} drafts, {config.layers.num_layers} causal layers, window "
        f"{windows or 'none'}, mask token {config.mask_token_id}, streams after layers {config.aux_boundaries}"
    )
