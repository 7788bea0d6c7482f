"""Loads targets from Hugging Face checkpoints, strictly: no tensor may be missing or left over."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from eagle_server.models.checkpoints.fused_experts import separate_gates
from eagle_server.models.checkpoints.gguf.tensors import say_types
from eagle_server.models.checkpoints.loading import DEFAULT_LOADING, Loading
from eagle_server.models.checkpoints.packed_cache import PackedCache
from eagle_server.models.checkpoints.padded_values import with_padded_values
from eagle_server.models.checkpoints.quantized import (
    Rounded,
    read_quantization,
    rounded_linears,
    with_dequantized,
    without_added_biases,
)
from eagle_server.models.checkpoints.rank_slices import own_slices, replicated, split_over
from eagle_server.models.checkpoints.transformers_config import transformers_config
from eagle_server.models.checkpoints.weights import (
    QuantizedTensor,
    Weights,
    check_names,
    copy_weights,
    open_weights,
    resolve_checkpoint,
    stored_heads,
    without_drafts,
)
from eagle_server.models.config import CheckpointError, ModelConfig
from eagle_server.models.config_json import read_config, token_ids
from eagle_server.models.layers import Linear, linear_views, pack_linears
from eagle_server.models.ranks import RankGroup
from eagle_server.models.rope import at_context
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.models.targets.interface import Target
from eagle_server.models.targets.registry import find_family, read_target_config
from eagle_server.models.wrappers import MEDIA
from eagle_server.ops.linear.packed import why_not_computed
from eagle_server.ops.linear.quantize import Quantization
from eagle_server.ops.native.library import available
from eagle_server.ops.native.linear import NativeWeight

DtypeName = Literal["auto", "float32", "bfloat16"]
log = logging.getLogger(__name__)

EMBED, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load_target(
    path: str | Path,
    how: Loading = DEFAULT_LOADING,
    *,
    dtype: DtypeName = "auto",
    device: str | torch.device = "cpu",
    quantization_cache: Path | None = None,
    ranks: RankGroup | None = None,
) -> Target:
    """Load the target of a checkpoint directory or Hub id, frozen. transformers runs families that are none of ours.

    The `config` of the result has the served dtype, and the end-of-sequence ids of both config.json and
    generation_config.json.

    Args:
        dtype: "auto" is the checkpoint's dtype. float16 becomes bfloat16, because only float32 and bfloat16 are served.
        quantization_cache: a directory that keeps the rounded weights for the next time.
        ranks: loads only the share of this rank.

    Raises:
        CheckpointError: the checkpoint is not supported, tensors are missing or unexpected, or the directory cannot be
            written.
        ValueError: `quantization` is not possible here.
    """
    directory = resolve_checkpoint(path)
    config = read_model_config(directory)
    stored: Weights = {}
    if config.has_family:
        found = with_dequantized(open_weights(directory), read_config(directory), str(directory / "config.json"))
        own = separate_gates(_without_unused(without_drafts(found, config.num_layers), config))
        config, stored = _as_stored(config, own, directory)
        stored = with_padded_values(stored, config)
        _check_sizes(config, stored, directory)
    how = replace(how, context=how.context or config.max_position)
    quantization = how.quantization
    config = _served(config, directory, dtype, how.context)
    cached = quantization_cache is not None
    if ranks is not None:
        config, stored = _share(config, stored, directory, ranks, cached=cached)
    if quantization is not None:
        _check_quantizable(directory, config, quantization, torch.device(device), cached=cached)
    if not config.has_family:
        from eagle_server.models.checkpoints.load_transformers import load_transformers  # seconds of import

        return load_transformers(
            directory, config, context=how.context, device=device, quantization=quantization, progress=how.progress
        )
    try:
        with created_as(config.dtype, device):
            model = TargetModel(config, how.positions)
    except RuntimeError as error:
        if "allocate" not in str(error):
            raise
        raise CheckpointError(f"{directory}: no memory for the model with texts of {how.context} tokens") from None
    cache = None
    if how.pack and quantization is not None and quantization_cache is not None:
        cache = PackedCache(quantization_cache, directory, stored, quantization, config.dtype)
    kept = None if cache is None else cache.read(model)
    rounded = _fill(model, stored, directory, how, kept)
    model.requires_grad_(requires_grad=False).eval()
    if how.pack:
        pack_linears(model, quantization, rounded, progress=how.progress)
    if cache is not None and kept is None:
        cache.write(model)
    return model


def _without_unused(stored: Weights, config: ModelConfig) -> Weights:
    """Without tensors that files may hold, and no layer reads.

    Projections and norms of keys and values in layers that write none, and weights of experts that give back their
    input.
    """
    shared = [layer for layer in range(config.num_layers) if config.attends(layer) and not config.writes_kv(layer)]
    unused = {f"model.layers.{layer}.self_attn.{part}" for layer in shared for part in ("k_proj", "v_proj", "k_norm")}
    first, count = (config.moe.experts, config.moe.identities) if config.moe is not None else (0, 0)
    identities = tuple(f".mlp.experts.{expert}." for expert in range(first, first + count))
    return {
        name: tensor
        for name, tensor in stored.items()
        if name.rpartition(".")[0] not in unused and not any(part in name for part in identities)
    }


def _share(
    config: ModelConfig, stored: Weights, directory: Path, ranks: RankGroup, *, cached: bool
) -> tuple[ModelConfig, Weights]:
    """What this rank has of the target."""
    if config.recurrent is not None and config.recurrent.rule != "delta":
        raise CheckpointError(
            f"{directory}: --tp-size {ranks.size}: the recurrent layers of {config.architecture} are not split over "
            "ranks yet; drop it"
        )
    if not config.has_family or cached:
        reason = "--quantization-cache keeps whole weights" if config.has_family else "it runs by transformers' code"
        raise CheckpointError(f"{directory}: --tp-size {ranks.size}: not supported, as {reason}")
    share = split_over(config, ranks)
    assert share.split is not None
    if ranks.rank == 0 and (parts := replicated(share)):
        log.warning("%s: does not divide over --tp-size %d: every rank has all %s", directory, ranks.size, parts)
    return share, own_slices(stored, config, share.split)


def _check_sizes(config: ModelConfig, stored: Weights, directory: Path) -> None:
    """Compare the sizes of config.json with the tensors' shapes, before memory is taken for them."""
    layers = len({name.split(".")[2] for name in stored if name.startswith("model.layers.")})
    if layers < config.num_layers:
        raise CheckpointError(
            f"{directory}: num_hidden_layers is {config.num_layers} in config.json, and the files hold {layers} layers"
        )
    hidden = config.hidden_size
    expected = {EMBED: (config.vocab_size, hidden), "model.layers.0.input_layernorm.weight": (hidden,)}
    if config.moe is None:
        expected["model.layers.0.mlp.up_proj.weight"] = (config.intermediate_size, hidden)
    for name, shape in expected.items():
        if name in stored and stored[name].shape != shape:
            found = stored[name]
            raise CheckpointError(f"{found.file}: {found.key}: expected shape {list(shape)}, found {list(found.shape)}")


def _served(config: ModelConfig, directory: Path, dtype: DtypeName, context: int) -> ModelConfig:
    """`config` in the served dtype and context, with the end-of-sequence ids of both files."""
    if config.has_family and config.rope.kind == "dynamic" and context > config.max_position:
        log.warning(
            "%s: dynamic RoPE: every text has the base for %d tokens; without --context-length it is that for %d",
            *(directory, context, config.max_position),
        )
    return replace(
        config,
        dtype=serving_dtype(dtype, config.dtype),
        rope=at_context(config.rope, config.head_dim, context),
        eos_token_ids=_eos_token_ids(directory, config),
    )


def _fill(
    model: TargetModel,
    stored: Weights,
    directory: Path,
    how: Loading,
    kept: Mapping[Linear, NativeWeight] | None,
) -> dict[Linear, Rounded]:
    """Fill the parameters and pack the layers in `kept`. The result: layers to pack from the checkpoint's integers."""
    views, rounded = dict(model.weight_views()), dict[Linear, Rounded]()
    stored = without_added_biases(stored, views)
    check_names(views, stored, directory)
    native = how.pack and available(model.embed.device, model.config.dtype)
    say_types(directory, native=native)
    if kept is None and how.pack and (native or model.embed.device.type == "cuda"):
        rounded = rounded_linears(model, views, stored)
        table = stored[EMBED]
        if native and model.config.tie_word_embeddings and isinstance(table, QuantizedTensor):
            rounded[model.lm_head] = Rounded({EMBED: table}, (views[EMBED],))
        if rounded and how.quantization is not None:
            log.warning("%s is quantized: --quantization %s rounds its other layers only", directory, how.quantization)
    unread = {
        name for linear, parts in linear_views(model, views).items() if linear in (kept or rounded) for name in parts
    }
    views = {name: view for name, view in views.items() if name not in unread}
    stored = {name: tensor for name, tensor in stored.items() if name not in unread}
    copy_weights(views, stored, source=directory, progress=how.progress)
    for linear, weight in (kept or {}).items():
        linear.pack(codes=weight)
    return rounded


def _check_quantizable(
    directory: Path, config: ModelConfig, quantization: Quantization, device: torch.device, *, cached: bool
) -> None:
    asked = f"{directory}: --quantization {quantization}"
    if config.moe is not None and (quantization == "fp8" or not available(device, config.dtype)):
        reason = "has experts, which only the native kernels for CPUs compute in 8 and 4 bits"
        raise CheckpointError(f"{asked}: {config.architecture} {reason} (int8, int4); drop it")
    if not config.has_family and cached:
        raise CheckpointError(f"{asked}: --quantization-cache: transformers' code runs {config.architecture}; drop it")
    if (unable := why_not_computed(quantization, device, config.dtype)) is not None:
        raise CheckpointError(f"{asked}: {unable}")
    if cached and not available(device, config.dtype):
        raise CheckpointError(f"{asked}: --quantization-cache is for native kernels (--cpu-kernels native); drop it")


def load_family_target(
    path: str | Path,
    how: Loading = DEFAULT_LOADING,
    *,
    dtype: DtypeName = "auto",
    device: str | torch.device = "cpu",
) -> TargetModel:
    """`load_target` for our families only, to train heads or to rebuild the model.

    Raises:
        CheckpointError: as `load_target`, or the family is none of ours.
    """
    model = load_target(path, how, dtype=dtype, device=device)
    if not isinstance(model, TargetModel):
        raise CheckpointError(f"{path}: {model.config.architecture} has no class of its own here, which this needs")
    return model


def read_model_config(directory: Path) -> ModelConfig:
    """The sizes and flags of the target in a checkpoint directory.

    Raises:
        CheckpointError: the architecture is not supported, or the weights are quantized.
    """
    raw, source = read_config(directory), str(directory / "config.json")
    read_quantization(raw, source)
    if find_family(raw) is None:
        return transformers_config(directory)
    return read_target_config(raw, source)


def serving_dtype(name: DtypeName, checkpoint: torch.dtype) -> torch.dtype:
    """The dtype to serve in: float32 or bfloat16."""
    if name == "auto":
        return torch.bfloat16 if checkpoint == torch.float16 else checkpoint
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def dtype_name(dtype: torch.dtype) -> DtypeName:
    """The name of a dtype of `serving_dtype`."""
    return "float32" if dtype == torch.float32 else "bfloat16"


@contextmanager
def created_as(dtype: torch.dtype, device: str | torch.device) -> Iterator[None]:
    """Create parameters in this dtype on this device, so that there is never a wider copy of a model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def _eos_token_ids(directory: Path, config: ModelConfig) -> tuple[int, ...]:
    """The ids of both files. In chat models the end-of-turn id is often only in generation_config.json."""
    path = directory / "generation_config.json"
    if not path.is_file():
        return config.eos_token_ids
    try:
        found = json.loads(path.read_text())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: a JSON object is expected")
    return tuple(dict.fromkeys((*config.eos_token_ids, *token_ids(found, str(path)))))


def _as_stored(config: ModelConfig, stored: Weights, directory: Path) -> tuple[ModelConfig, Weights]:
    """`config` as the tensors show it, and the tensors without the copy of a tied embedding. Differences are logged.

    An lm_head that differs from a tied embedding is used, as in transformers.
    """
    raw, source = read_config(directory), str(directory / "config.json")
    attends_first = config.attends(0)  # in some families recurrent layers have projections of these names
    sizes = stored_heads(raw, stored, "model.layers.0.self_attn.", source) if attends_first else {}
    config = read_target_config({**raw, **sizes}, source) if sizes else config
    if MEDIA in raw and "tie_word_embeddings" not in raw:  # the class's default, which differs from wrapper to wrapper
        config = replace(config, tie_word_embeddings=LM_HEAD not in stored)
    if not config.tie_word_embeddings or LM_HEAD not in stored or EMBED not in stored:
        return config, stored
    head, embed = stored[LM_HEAD], stored[EMBED]
    if head.shape == embed.shape and torch.equal(head.read(), embed.read()):
        return config, {name: tensor for name, tensor in stored.items() if name != LM_HEAD}
    log.warning("%s: tie_word_embeddings is true, but %s is not %s; it is used as it is", source, LM_HEAD, EMBED)
    return replace(config, tie_word_embeddings=False), stored
