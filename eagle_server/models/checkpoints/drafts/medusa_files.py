"""Medusa's checkpoint formats. Heads and blocks are counted from the keys, because published configs are often wrong.

Medusa-1      {i}.{j}.linear.weight and .bias for j < n, {i}.{n}.weight
shared head   {i}.{j}.linear.* only; the target's lm_head gives the logits
Medusa-2      the same keys with the prefix `medusa_head.`, in the file of the whole model
"""

from __future__ import annotations

import logging
import re

from eagle_server.algorithms import ALGORITHMS
from eagle_server.models.checkpoints.drafts.draft_format import DraftFiles
from eagle_server.models.checkpoints.drafts.draft_loading import shared_weights
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.weights import Weights, copy_weights
from eagle_server.models.config import CheckpointError, ModelConfig
from eagle_server.models.drafts.medusa import MedusaConfig, MedusaHeads
from eagle_server.models.targets.interface import DraftedTarget

_PREFIXES = (*ALGORITHMS["MEDUSA"].prefixes, "medusa_lm_head.")
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(?:weight|bias)")
_TENSOR = re.compile(r"\d+\.\d+\.(linear\.)?(weight|bias)")
_LM_HEAD = re.compile(r"(\d+)\.(\d+)\.weight")

log = logging.getLogger(__name__)


def recognizes(files: DraftFiles) -> bool:
    """Whether config.json, a prefix or all names are Medusa's. config.json may be missing."""
    named = "medusa_num_heads" in files.config or files.has_prefix(*_PREFIXES, "medusa_heads.")
    return named or (bool(files.tensors) and all(_TENSOR.fullmatch(name) for name in files.tensors))


def kv_config(files: DraftFiles, target: ModelConfig) -> None:
    """See `DraftFormat`: heads of one row each."""


def load(files: DraftFiles, target: DraftedTarget, how: Loading) -> MedusaHeads:
    """All heads of the files."""
    config, tensors = medusa_files(files, target.config)
    heads = MedusaHeads(config, shared_weights(target))
    copy_weights(dict(heads.weight_views()), tensors, source=files.directory, progress=how.progress)
    return heads


def medusa_files(files: DraftFiles, target: ModelConfig) -> tuple[MedusaConfig, Weights]:
    """The config of the heads, and their tensors by the names in `MedusaHeads.weight_views`.

    Raises:
        CheckpointError: vLLM's early format, no heads, or gaps in the numbers of heads or blocks.
    """
    if files.has_prefix("medusa_heads.", "blocks.", "lm_heads."):
        raise CheckpointError(
            f"{files.directory}: heads in vLLM's early Medusa format (blocks.*, lm_heads.*), which is not supported; "
            "use the checkpoint that they were converted from"
        )
    prefix = next((p for p in _PREFIXES if files.has_prefix(p)), "")
    tensors = {name.removeprefix(prefix): t for name, t in files.tensors.items() if name.startswith(prefix)}
    blocks = {(int(m[1]), int(m[2])) for name in tensors if (m := _BLOCK.fullmatch(name))}
    lm_heads = {(int(m[1]), int(m[2])) for name in tensors if (m := _LM_HEAD.fullmatch(name))}
    heads, layers = {i for i, _ in blocks | lm_heads}, {j for _, j in blocks}
    if not heads:
        raise CheckpointError(f"{files.directory}: no Medusa heads here: 0.0.linear.weight is missing")
    for what, numbers in (("heads", heads), ("blocks", layers)):
        if numbers != set(range(len(numbers))):
            raise CheckpointError(f"{files.directory}: the {what} are numbered {sorted(numbers)[:8]}, not from 0 on")
    for key, count in (("medusa_num_heads", len(heads)), ("medusa_num_layers", len(layers))):
        said = files.config.get(key)
        if said not in (None, count):
            log.warning("%s: %s %s: the file has %d, which is what counts", files.config_source, key, said, count)
    return MedusaConfig(len(heads), len(layers), target.hidden_size, target.vocab_size, bool(lm_heads)), tensors
