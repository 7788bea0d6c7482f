"""The format of google/gemma-4-*-it-assistant: Gemma 4 layers over the target's own KV."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from eagle_server.models.checkpoints.drafts.draft_format import DraftFiles
from eagle_server.models.checkpoints.drafts.draft_loading import filled, shared_weights
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.config import CheckpointError, ModelConfig, SharedKV
from eagle_server.models.config_json import integer
from eagle_server.models.drafts.gemma4_assistant import AssistantConfig, Gemma4Assistant
from eagle_server.models.targets.interface import DraftedTarget
from eagle_server.models.targets.registry import read_target_config


def recognizes(files: DraftFiles) -> bool:
    """Whether config.json names the format, or the tensors are those of an assistant."""
    return files.config.get("model_type") == "gemma4_assistant" or "pre_projection.weight" in files.tensors


def kv_config(files: DraftFiles, target: ModelConfig) -> None:
    """See `DraftFormat`: it reads the target's."""


def load(files: DraftFiles, target: DraftedTarget, how: Loading) -> Gemma4Assistant:
    """The assistant, which embeds with the target's embedding and attends to its KV.

    Raises:
        CheckpointError: it is for another target, or the target's KV is split over ranks.
    """
    if target.config.split is not None:
        raise CheckpointError(
            f"{files.directory}: --tp-size: an assistant reads the target's KV, of which each rank has a part; drop it"
        )
    tensors = {name: tensor for name, tensor in files.tensors.items() if name != "lm_head.weight"}  # a copy
    config = assistant_config(files, target.config)
    return filled(Gemma4Assistant(config, how.positions, shared_weights(target)), replace(files, tensors=tensors), how)


def assistant_config(files: DraftFiles, target: ModelConfig) -> AssistantConfig:
    """The sizes of an assistant for this target, and which layers of the target's KV it reads.

    Raises:
        CheckpointError: sizes are missing, or they are not the target's.
    """
    raw, source = {**files.required_config, **files.overrides}, files.config_source
    text: dict[str, Any] = {**(raw.get("text_config") or {}), "model_type": "gemma4_text", "num_kv_shared_layers": 0}
    text.pop("architectures", None)
    assistant = read_target_config({"hidden_size_per_layer_input": 0, **text}, f"{source}: text_config")
    hidden = integer(raw, "backbone_hidden_size", source)
    for key, value, expected in (
        ("backbone_hidden_size", hidden, target.hidden_size),
        ("vocab_size", assistant.vocab_size, target.vocab_size),
    ):
        if value != expected:
            raise CheckpointError(f"{source}: {key}: the target's is {expected}, found {value}: another target?")
    last = _last_layers(target)
    for layer in range(assistant.num_layers):
        slides = bool(assistant.windows[layer])
        own, shared = assistant.kv_shape(layer), last.get(slides)
        if shared is None or own != shared.shape:
            raise CheckpointError(
                f"{source}: layer {layer} reads {'sliding' if slides else 'global'} layers with (KV heads, size) "
                f"{tuple(own)}, and the target's have {shared and tuple(shared.shape)}: another target?"
            )
    states = tuple((last[bool(window)],) for window in assistant.windows)
    uses_centroids = bool(raw.get("use_ordered_embeddings"))
    return AssistantConfig(
        layers=replace(assistant, states=states, dtype=target.dtype),
        target_hidden_size=hidden,
        centroids=integer(raw, "num_centroids", source, default=2048) if uses_centroids else 0,
        best_centroids=integer(raw, "centroid_intermediate_top_k", source, default=32) if uses_centroids else 0,
    )


def _last_layers(target: ModelConfig) -> dict[bool, SharedKV]:
    """The KV that the target's last layer with a window writes (True), and the last one without (False)."""
    written = [layer for layer in range(target.num_layers) if target.writes_kv(layer)]
    windows = target.windows or (0,) * target.num_layers
    return {bool(windows[layer]): SharedKV(target.pool_layer(layer), target.kv_shape(layer)) for layer in written}
