"""Targets from Hugging Face checkpoints, strictly: every tensor has its place, and every place its tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors.torch import save_file

from eagle_server.models.checkpoints.draft_format import MEDUSA_2
from eagle_server.models.checkpoints.transformers_config import transformers_config
from eagle_server.models.checkpoints.weights import (
    Weights,
    copy_weights,
    open_weights,
    refuse_quantized,
    resolve_checkpoint,
)
from eagle_server.models.config import CheckpointError, ModelConfig
from eagle_server.models.config_json import read_config
from eagle_server.models.layers import Views, pack_linears
from eagle_server.models.rope import at_context
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.models.targets.interface import Target
from eagle_server.models.targets.registry import find_family, read_target_config

DtypeName = Literal["auto", "float32", "bfloat16"]
_EMBED, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


class HasWeightViews(Protocol):
    """A model that lists its published tensors: targets and draft heads."""

    def weight_views(self) -> Views: ...


def load_target(
    path: str | Path,
    *,
    dtype: DtypeName = "auto",
    context: int | None = None,
    lookahead: int = 0,
    device: str | torch.device = "cpu",
    progress: bool = True,
    pack: bool = True,
) -> Target:
    """The target of a checkpoint directory or Hub id, frozen, in `dtype`, with packed linears.

    `context` (default: max_position_embeddings) and `lookahead`, the positions that drafting may write beyond it, size
    the RoPE table; a dynamic RoPE base follows `context` alone. dtype "auto" is the checkpoint's own, where float16
    becomes bfloat16: the two that are served are float32 and bfloat16. The result's `config` has the dtype served, and
    the end-of-sequence ids of generation_config.json beside those of config.json. `pack=False` keeps every plain
    weight, for training. An architecture that is not native is run by transformers' code.

    Raises:
        CheckpointError: the files are not a supported, complete and exact checkpoint.
    """
    directory = resolve_checkpoint(path)
    config = read_model_config(directory)
    context = context or config.max_position
    config = replace(
        config,
        dtype=serving_dtype(dtype, config.dtype),
        rope=at_context(config.rope, config.head_dim, context),
        eos_token_ids=_eos_token_ids(directory, config),
    )
    if not config.native:
        from eagle_server.models.checkpoints.load_transformers import load_transformers  # seconds of import

        return load_transformers(directory, config, context=context, device=device)
    with created_as(config.dtype, device):
        model = TargetModel(config, context + lookahead)
    stored = _without_inert(open_weights(directory), config)
    copy_weights(dict(model.weight_views()), stored, source=directory, progress=progress)
    model.requires_grad_(requires_grad=False).eval()
    if pack:
        pack_linears(model)
    return model


def load_native_target(
    path: str | Path,
    *,
    dtype: DtypeName = "auto",
    context: int | None = None,
    device: str | torch.device = "cpu",
    progress: bool = True,
    pack: bool = True,
) -> TargetModel:
    """`load_target` where the layers must be those that are written here: to train heads, or to rebuild the model.

    Raises:
        CheckpointError: also for an architecture that transformers' code would run.
    """
    model = load_target(path, dtype=dtype, context=context, device=device, progress=progress, pack=pack)
    if not isinstance(model, TargetModel):
        raise CheckpointError(f"{path}: {model.config.architecture} has no class of its own here, which this needs")
    return model


def read_model_config(directory: Path) -> ModelConfig:
    """What config.json says of a target.

    Raises:
        CheckpointError: an architecture that is not supported, or quantized weights.
    """
    raw, source = read_config(directory), str(directory / "config.json")
    refuse_quantized(raw, source)
    return transformers_config(directory) if find_family(raw) is None else read_target_config(raw, source)


def serving_dtype(name: DtypeName, checkpoint: torch.dtype) -> torch.dtype:
    """float32 or bfloat16."""
    if name == "auto":
        return torch.bfloat16 if checkpoint == torch.float16 else checkpoint
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


@contextmanager
def created_as(dtype: torch.dtype, device: str | torch.device) -> Iterator[None]:
    """Parameters made inside are of this dtype on this device, so that no wider copy of a model is ever held."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def save_checkpoint(
    model: HasWeightViews,
    directory: Path,
    config_json: Mapping[str, Any],
    dtype: torch.dtype = torch.bfloat16,
    *,
    file: str = "model.safetensors",
) -> None:
    """Write `file`, under the published names and with floats in `dtype`, and config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: view.detach().to("cpu", dtype if view.is_floating_point() else view.dtype).clone().contiguous()
        for name, view in model.weight_views()
    }
    weights = directory / file
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors writes files that only their owner may read
    config = {**config_json, "dtype": str(dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _eos_token_ids(directory: Path, config: ModelConfig) -> tuple[int, ...]:
    """The ids of both files: chat models often end a turn with an id that only generation_config.json names."""
    path = directory / "generation_config.json"
    if not path.is_file():
        return config.eos_token_ids
    try:
        found = json.loads(path.read_text()).get("eos_token_id")
    except (ValueError, AttributeError):
        raise CheckpointError(f"{path}: a JSON object is expected") from None
    more = found if isinstance(found, list) else [] if found is None else [found]
    return tuple(dict.fromkeys((*config.eos_token_ids, *more)))


def _without_inert(stored: Weights, config: ModelConfig) -> Weights:
    """Drop what is not the target's: what drafts, RoPE frequencies, the copy of a tied embedding if it is one."""
    drafting = (MEDUSA_2, *(f"model.layers.{config.num_layers + k}." for k in range(config.nextn_layers)))
    kept = {
        name: tensor
        for name, tensor in stored.items()
        if not name.endswith("rotary_emb.inv_freq") and not name.startswith(drafting)
    }
    if config.tie_word_embeddings and _LM_HEAD in kept and _EMBED in kept:
        head = kept.pop(_LM_HEAD)
        if head.shape != kept[_EMBED].shape or not torch.equal(head.read(), kept[_EMBED].read()):
            raise CheckpointError(
                f"{head.file}: {_LM_HEAD}: config.json has tie_word_embeddings, so a copy of {_EMBED} is expected; "
                "found other values"
            )
    return kept
