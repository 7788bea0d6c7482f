"""A language model as a draft: loaded like a target, and its vocabulary compared with the target's."""

from __future__ import annotations

import logging
from dataclasses import replace

from eagle_server.algorithms import ALGORITHMS
from eagle_server.models.checkpoints.drafts.draft_format import DraftFiles
from eagle_server.models.checkpoints.drafts.draft_loading import format_of
from eagle_server.models.checkpoints.drafts.draft_vocabulary import token_ids
from eagle_server.models.checkpoints.load_target import dtype_name, load_target, read_model_config
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.config import CheckpointError, ModelConfig
from eagle_server.models.drafts.standalone import DraftLM
from eagle_server.models.targets.interface import DraftedTarget

log = logging.getLogger(__name__)


def recognizes(files: DraftFiles) -> bool:
    """Whether the tensors or the class name are those of a language model. Other families have other tensor names."""
    names = files.config.get("architectures") or ()
    return _has_llamas_names(files) or any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in names)


def kv_config(files: DraftFiles, target: ModelConfig) -> ModelConfig:
    """See `DraftFormat`."""
    return replace(read_model_config(files.directory), dtype=target.dtype)


def load(files: DraftFiles, target: DraftedTarget, how: Loading) -> DraftLM:
    """The language model, in the target's dtype and on its device.

    If the target's files are known, the tokenizers are compared too. Embeddings of other sizes are then taken, if the
    tokenizer needs none of the rows in which they differ.

    Raises:
        CheckpointError: the files hold a head, the model cannot be loaded as a target, or its vocabulary is not the
            target's.
    """
    heads = (row for row in ALGORITHMS.values() if not row.is_model and format_of(row).recognizes(files))
    head = None if _has_llamas_names(files) else next(heads, None)
    if head is not None:
        raise CheckpointError(
            f"{files.directory}: --speculative-algorithm STANDALONE was asked for, but the files hold {head.holds}"
        )
    directory = files.directory
    config = read_model_config(directory)
    if config.recurrent is not None:
        raise CheckpointError(
            f"{directory}: {config.architecture} has recurrent layers: it can be a target, but a draft model must "
            "have keys and values alone; choose another draft"
        )
    wanted = target.config.vocab_size
    used = token_ids(files)
    if config.vocab_size != wanted and (used is None or used > min(config.vocab_size, wanted)):
        why = "their tokenizers cannot be compared" if used is None else f"the tokenizer has {used} ids"
        raise CheckpointError(
            f"{directory}: vocab_size {config.vocab_size}, but the target's is {wanted}, and {why}: a draft model must "
            "have the target's vocabulary; choose a smaller model of the same family"
        )
    if config.max_position < how.context:
        log.warning(
            "%s: trained for %d positions and the target is served with %d: beyond them few drafts will be accepted",
            *(directory, config.max_position, how.context),
        )
    model = load_target(
        directory,
        how,
        dtype=dtype_name(target.config.dtype),
        device=target.embed.device,
    )
    return DraftLM(model, wanted)


def _has_llamas_names(files: DraftFiles) -> bool:
    needed = {"embed_tokens.weight", "norm.weight", "layers.0.input_layernorm.weight"}
    return needed <= set(files.tensors) and "fc.weight" not in files.tensors
