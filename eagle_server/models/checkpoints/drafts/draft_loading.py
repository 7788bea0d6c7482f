"""What the loaders of all draft heads share."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pkgutil import resolve_name
from typing import Protocol, TypeVar, cast

import torch
from torch import nn

from eagle_server.algorithms import Algorithm
from eagle_server.models.checkpoints.drafts.draft_format import DraftFiles, canonical_name
from eagle_server.models.checkpoints.gguf.tensors import say_types
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.quantized import rounded_linears
from eagle_server.models.checkpoints.save import HasWeightViews
from eagle_server.models.checkpoints.weights import check_names, copy_weights
from eagle_server.models.config import ModelConfig
from eagle_server.models.drafts.interface import DraftModel, HeadConfig, TargetWeights
from eagle_server.models.layers import Linear
from eagle_server.models.rope import at_context
from eagle_server.models.targets.interface import DraftedTarget
from eagle_server.ops.native.library import available

log = logging.getLogger(__name__)

Head = TypeVar("Head", bound=HasWeightViews)
Config = TypeVar("Config", bound=HeadConfig)


class DraftFormat(Protocol):
    """A module that reads the files of one algorithm."""

    def recognizes(self, files: DraftFiles) -> bool:
        """Whether the files are of this format."""
        ...

    def kv_config(self, files: DraftFiles, target: ModelConfig) -> ModelConfig | None:
        """The layers whose KV the model writes, as `DraftModel.kv`; None: it writes none.

        Raises:
            CheckpointError: as `load`.
        """
        ...

    def load(self, files: DraftFiles, target: DraftedTarget, how: Loading) -> DraftModel:
        """The model with its weights.

        Raises:
            CheckpointError: tensors are missing, unexpected or for another target.
        """
        ...


def format_of(row: Algorithm) -> DraftFormat:
    """The module that reads the files of an algorithm."""
    return resolve_name(row.files)  # type: ignore[no-any-return]


def filled(head: Head, files: DraftFiles, how: Loading, name_of: Callable[[str], str] = canonical_name) -> Head:
    """The head with the weights of the files. Linear layers whose weights are quantized there are packed as they are.

    name_of: the tensor's name in `files`, of the head's.
    """
    views = {name_of(name): view for name, view in head.weight_views()}
    check_names(views, files.tensors, files.directory)
    place = next(iter(views.values()))
    native, stored = how.pack and available(place.device, place.dtype), files.tensors
    if not files.is_target:
        say_types(files.directory, native=native)
    if how.pack and (native or place.device.type == "cuda"):
        packed = rounded_linears(cast(nn.Module, head), views, stored)
        if packed and how.quantization is not None:
            log.info(
                "%s: quantized weights stay so; those of other layers become %s", files.directory, how.quantization
            )
        for linear, rounded in packed.items():
            if (codes := rounded()) is not None:
                linear.pack(codes=codes)
            views = {name: view for name, view in views.items() if name not in rounded.tensors}
    stored = {name: tensor for name, tensor in stored.items() if name in views}
    copy_weights(views, stored, source=files.directory, progress=how.progress)
    return head


def shared_weights(target: DraftedTarget, config: HeadConfig | None = None) -> TargetWeights:
    """Of a split target only what the head does not have itself: the rest need not be read."""
    own = config if target.config.split is not None else None
    embed = torch.empty(0) if own is not None and own.own_embed else target.embed.detach()
    return TargetWeights(embed, Linear(0, []) if own is not None and own.own_lm_head else target.lm_head)


def as_loaded(config: Config, files: DraftFiles, how: Loading) -> Config:
    """The config with what the files hold, and with RoPE resolved for the served context.

    The lookahead of the trees must not change RoPE.
    """
    layers = config.layers
    return replace(
        config,
        layers=replace(layers, rope=at_context(layers.rope, layers.head_dim, how.context)),
        own_embed="embed_tokens.weight" in files.tensors,
        own_lm_head="lm_head.weight" in files.tensors,
    )
