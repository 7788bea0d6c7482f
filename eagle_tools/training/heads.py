"""New draft heads for a target: the module to train, and the config.json to publish with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.weights import resolve_checkpoint
from eagle_server.models.config import ModelConfig
from eagle_server.models.config_json import read_config, read_whole_config
from eagle_server.models.drafts.eagle import EagleConfig, EagleHead
from eagle_server.models.drafts.eagle3 import Eagle3Config, Eagle3Head
from eagle_server.models.drafts.interface import DraftModel, TargetWeights
from eagle_server.models.drafts.mtp import MtpHead
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.models.targets.registry import read_target_config
from eagle_tools.training.recipes import Kind

_ALGORITHMS: dict[Kind, str] = {"eagle3": "EAGLE3", "eagle": "EAGLE", "mtp": "NEXTN"}
_QUANTIZED = ("quantization_config", "compression_config")  # keys of config.json: a trained layer is not
_SMALLEST_DEFAULT = 7  # layers; a smaller target has no three distinct default boundaries


@dataclass(frozen=True)
class NewHead:
    """A head to train, and its config.json as a dict, which a loader reads."""

    head: Eagle3Head | EagleHead | MtpHead
    config_json: dict[str, Any]

    def draft_ids(self) -> Tensor:
        """The token ids of the head's outputs, int64 [Vd]."""
        device = next(self.head.parameters()).device
        return self.head.target_ids(torch.arange(self.head.draft_vocab_size, device=device))


def default_boundaries(layers: int) -> tuple[int, ...]:
    """EAGLE-3's low, middle and high residual stream of a target with `layers` layers."""
    if layers < _SMALLEST_DEFAULT:
        raise ValueError(
            f"a target of {layers} layers has no default aux layers (they need {_SMALLEST_DEFAULT}): name three "
            f"increasing boundaries in 0..{layers} with --aux-layers, where b is the stream after b layers"
        )
    return (2, layers // 2, layers - 3)


def new_eagle3(target: TargetModel, boundaries: Sequence[int], draft_ids: Tensor, intermediate_size: int) -> NewHead:
    """An EAGLE-3 head with one layer of the target's shape."""
    vocab, count = target.config.vocab_size, len(draft_ids)
    published = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_keys(target.config, intermediate_size),
        "draft_vocab_size": count,
        "target_hidden_size": target.config.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(boundaries),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [boundary - 1 for boundary in boundaries],  # as layer outputs
            "use_aux_hidden_state": True,
        },
    }
    config = Eagle3Config(
        layers=read_target_config(published),
        target_hidden_size=target.config.hidden_size,
        draft_vocab_size=count,
        aux_boundaries=tuple(boundaries),
        vocab_map=count < vocab,
    )
    with torch.device(target.embed.device):
        head = Eagle3Head(config, target.rope.cos.shape[0], _borrowed(target))
    _initialize(head)
    if count < vocab:
        head.set_vocabulary(draft_ids.to(target.embed.device))
    return NewHead(head, published)


def existing_head(target: TargetModel, path: str | Path, kind: Kind, target_path: str | Path | None = None) -> NewHead:
    """The head of a checkpoint directory or Hub id, to train it further. target_path: see `trainable`.

    Raises:
        CheckpointError: no head for this target, or not of this kind.
    """
    head, published = trainable(target, path, _ALGORITHMS[kind], target_path)
    assert isinstance(head, Eagle3Head | EagleHead | MtpHead)
    if isinstance(head, MtpHead):
        published = _not_quantized(read_whole_config(resolve_checkpoint(path)))
    return NewHead(head, published)


def trainable(
    target: TargetModel, path: str | Path, algorithm: str, target_path: str | Path | None = None
) -> tuple[DraftModel, dict[str, Any]]:
    """The head of a checkpoint directory or Hub id with gradients, and its config.json; {}: it has none.

    algorithm: a name in `ALGORITHMS`. target_path: of the target's files, if they may be those that hold the head.

    Raises:
        CheckpointError: no head for this target, or not of this algorithm.
    """
    directory, context = resolve_checkpoint(path), target.rope.cos.shape[0]
    how = Loading(context=context, progress=False, pack=False)
    head = load_draft(directory, target, how, algorithm=algorithm, target_path=target_path)
    head.requires_grad_(requires_grad=True).train()
    return head, read_config(directory) if (directory / "config.json").is_file() else {}


def _not_quantized(config_json: dict[str, Any]) -> dict[str, Any]:
    """Without what says how the weights are quantized, here or in the part of the text decoder."""
    return {
        key: _not_quantized(value) if key == "text_config" else value
        for key, value in config_json.items()
        if key not in _QUANTIZED
    }


def refuse_sizes(start: str | Path, recipe: Any, names: Sequence[str]) -> None:
    """Refuse a recipe, a dataclass, that sets a size of the head that it starts from.

    Raises:
        ValueError: one of the fields `names` is not the default.
    """
    default = type(recipe)()
    if changed := [name for name in names if getattr(recipe, name) != getattr(default, name)]:
        raise ValueError(f"{start}: a head to start from has its own sizes; they cannot be set: {', '.join(changed)}")


def mean_head(target: TargetModel, paths: Sequence[Path], kind: Kind) -> NewHead:
    """The mean of the weights of heads that were trained on from one of them ("model soup", arXiv 2203.05482).

    Each step of a short training moves the weights by much that is noise. The mean keeps what the trainings share.

    Raises:
        CheckpointError: as `existing_head`.
        ValueError: the heads have other shapes or draft vocabularies.
    """
    mean, *others = (existing_head(target, path, kind) for path in paths)
    for other in others:
        if (
            not torch.equal(mean.draft_ids(), other.draft_ids())
            or mean.head.aux_boundaries != other.head.aux_boundaries
        ):
            raise ValueError(f"{paths[0]}: the other heads have another vocabulary or other aux layers")
    with torch.no_grad():
        for name, parameter in mean.head.named_parameters():
            parameter.add_(sum(other.head.get_parameter(name) for other in others)).div_(len(paths))
    return mean


def new_eagle(target: TargetModel, intermediate_size: int) -> NewHead:
    """An EAGLE-1/2 head with one layer of the target's shape. It shares the target's embedding and lm_head."""
    published = {
        "architectures": ["LlamaForCausalLMEagle"],
        **layer_keys(target.config, intermediate_size),
        "bias": False,
    }
    with torch.device(target.embed.device):
        head = EagleHead(
            EagleConfig(read_target_config(published), fc_bias=False), target.rope.cos.shape[0], _borrowed(target)
        )
    _initialize(head)
    return NewHead(head, published)


def _initialize(head: nn.Module) -> None:
    """Matrices from Normal(0, 1 / sqrt(input width)); norms stay ones."""
    for parameter in head.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)


def _borrowed(target: TargetModel) -> TargetWeights:
    return TargetWeights(target.embed.detach(), target.lm_head)


def layer_keys(target: ModelConfig, intermediate_size: int) -> dict[str, Any]:
    """The config keys of every head: one plain Llama layer with the target's attention shape and RoPE base."""
    return {
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope.theta,
        "max_position_embeddings": target.max_position,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": list(target.eos_token_ids) or None,
    }
