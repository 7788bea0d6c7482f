"""ReDrafter's checkpoint format, that of apple/ml-recurrent-drafter. The sizes are counted from the tensors."""

from __future__ import annotations

from eagle_server.models.checkpoints.drafts.draft_format import DraftFiles, flatten
from eagle_server.models.checkpoints.drafts.draft_loading import filled, shared_weights
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.config import CheckpointError, ModelConfig
from eagle_server.models.drafts.redrafter import RedrafterConfig, RedrafterHead
from eagle_server.models.targets.interface import DraftedTarget


def recognizes(files: DraftFiles) -> bool:
    """Whether config.json names the format, or the tensors are those of a recurrent head."""
    return (
        files.config.get("model_type") == "recurrent_drafting_drafter"
        or "rnn_u.weight" in files.tensors
        or ("lm_head.0.linear.weight" in files.tensors and "exit_dim" in files.config)
    )


def kv_config(files: DraftFiles, target: ModelConfig) -> None:
    """See `DraftFormat`: its state is a vector."""


def load(files: DraftFiles, target: DraftedTarget, how: Loading) -> RedrafterHead:
    """The head, which embeds with the target's embedding."""
    return filled(RedrafterHead(redrafter_config(files, target.config), shared_weights(target)), files, how)


def redrafter_config(files: DraftFiles, target: ModelConfig) -> RedrafterConfig:
    """The config of the head, from its tensors. Keys of config.json must not contradict them.

    Raises:
        CheckpointError: the head is for another target, or the config contradicts the tensors.
    """
    flat, source, tensors = flatten(files), files.config_source, files.tensors
    for key, expected in (("vocab_size", target.vocab_size), ("hidden_size", target.hidden_size)):
        if flat.get(key, expected) != expected:
            raise CheckpointError(f"{source}: {key}: the target's is {expected}, found {flat[key]}: another target?")
    layers = 0
    while f"lm_head.{layers}.linear.weight" in tensors:
        layers += 1
    if f"lm_head.{layers}.weight" not in tensors:
        raise CheckpointError(
            f"{files.directory}: missing tensors: lm_head.{layers}.weight, the vocabulary's rows behind "
            f"{layers} residual blocks; found {len(tensors)} tensors"
        )
    sizes = {
        "num_draft_layers": layers,
        "exit_dim": files.matrix(f"lm_head.{layers}.weight")[1],
        "rnn": "rnn_u.weight" in tensors,
    }
    for key, value in sizes.items():
        declared = flat.get(key, value)
        if type(declared) is not type(value) or declared != value:
            raise CheckpointError(f"{source}: {key}: config.json says {declared!r}, but the tensors say {value!r}")
    return RedrafterConfig(target.vocab_size, target.hidden_size, sizes["exit_dim"], layers, bool(sizes["rnn"]))
