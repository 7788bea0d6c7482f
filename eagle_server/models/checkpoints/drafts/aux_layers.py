"""The residual streams of the target that feed an EAGLE-3 head, as boundaries. Boundary b is the stream after b layers.

Published configs number them in two ways under one key: boundary b is the input of layer b, and output id o is the
output of layer o, so b = o + 1. This module converts both to boundaries and logs the result.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from eagle_server.models.config import CheckpointError

_KEY = "eagle_aux_hidden_state_layer_ids"
_DEEPSPEC_KEY = "target_layer_ids"
_BOUNDARY_KEYS = (_KEY, "aux_hidden_state_layer_ids")
_OUTPUT_KEYS = ("dspark_target_layer_ids", _DEEPSPEC_KEY, "layer_ids")
_SMALLEST_DEFAULT = 7  # layers; with fewer, the default ids are not strictly increasing

log = logging.getLogger(__name__)


def aux_boundaries(config: Mapping[str, Any], layers: int, source: str) -> tuple[int, ...]:
    """The boundaries in a flattened draft config, for a target of `layers` layers.

    The key `aux_boundaries` (from an override) comes first and is used unchanged. A top-level key holds boundaries
    (speculators, vLLM), `target_layer_ids` output ids (DeepSpec). A key in `eagle_config` (SpecForge, SGLang) holds
    output ids, unless the list equals the default boundaries or contains `layers`, which is no output id.

    Raises:
        CheckpointError: the ids are not strictly increasing boundaries of this target, or a small target has none.
    """
    nested = (config.get("eagle_config") or {}).get(_KEY)
    if config.get("aux_boundaries"):
        stated = config["aux_boundaries"]
    elif config.get(_KEY):
        stated = config[_KEY]
    elif config.get(_DEEPSPEC_KEY):
        stated = _from_outputs(_integers(config[_DEEPSPEC_KEY], source), layers, source)
    elif nested:
        stated = _from_nested(_integers(nested, source), layers)
    elif layers < _SMALLEST_DEFAULT:
        raise CheckpointError(
            f"{source}: {_KEY}: a target of {layers} layers has no default aux layers, so the ids must be given "
            f"(the defaults need {_SMALLEST_DEFAULT} layers)"
        )
    else:
        stated = _default(layers)
    boundaries = _integers(stated, source)
    _check(boundaries, layers, source)
    log.info("%s: the draft reads the target's residual stream after layers %s", source, boundaries)
    return boundaries


def block_boundaries(config: Mapping[str, Any], depth: int, layers: int, source: str) -> tuple[int, ...]:
    """The boundaries of a block drafter of `depth` layers, from its flattened config.

    `aux_boundaries`, `eagle_aux_hidden_state_layer_ids` and speculators' `aux_hidden_state_layer_ids` are boundaries.
    `target_layer_ids`, in dflash_config or at the top, and its like are output ids; -1 is the embedding's output.
    Without ids speculators have EAGLE-3's defaults, and others the outputs round(1 + i (layers - 4) / (depth - 1)).

    Raises:
        CheckpointError: see `aux_boundaries`.
    """
    nested = config.get("dflash_config") or {}
    stated = next((config[key] for key in ("aux_boundaries", *_BOUNDARY_KEYS) if config.get(key)), None)
    places = ((nested, _DEEPSPEC_KEY), *((config, key) for key in _OUTPUT_KEYS), (nested, "layer_ids"))
    outputs = next((place[key] for place, key in places if place.get(key)), None)
    if stated is not None:
        boundaries = _integers(stated, source)
    elif outputs is not None:
        boundaries = _from_outputs(_integers(outputs, source), layers, source)
    elif "speculators_model_type" in config:
        boundaries = _default(layers)
    else:
        middle = [round(1 + i * (layers - 4) / (depth - 1)) for i in range(depth)] if depth > 1 else [layers // 2]
        boundaries = tuple(output + 1 for output in middle)
        log.warning("%s: target_layer_ids: not stated; the draft gets the streams after layers %s", source, boundaries)
    _check(boundaries, layers, source)
    return boundaries


def _default(layers: int) -> tuple[int, ...]:
    return (2, layers // 2, layers - 3)


def _from_nested(ids: tuple[int, ...], layers: int) -> tuple[int, ...]:
    if ids == _default(layers) or max(ids) == layers:
        return ids
    shifted = tuple(o + 1 for o in ids)
    if shifted != _default(layers):
        log.warning(
            "eagle_config.%s %s is read as layer outputs, which are boundaries %s; override aux_boundaries if not",
            *(_KEY, ids, shifted),
        )
    return shifted


def _from_outputs(ids: tuple[int, ...], layers: int, source: str) -> tuple[int, ...]:
    """DeepSpec reads transformers' hidden_states, whose last entry is after the final norm, so no residual stream."""
    if max(ids) == layers - 1:
        raise CheckpointError(
            f"{source}: {_DEEPSPEC_KEY}: the output of the last layer, {layers - 1}, is after the final norm there, "
            "which is not supported"
        )
    return tuple(layer + 1 for layer in ids)


def _integers(ids: object, source: str) -> tuple[int, ...]:
    if not isinstance(ids, Sequence) or not ids or not all(type(o) is int for o in ids):
        raise CheckpointError(f"{source}: {_KEY}: a list of integers is expected, found {ids!r}")
    return tuple(ids)


def _check(boundaries: tuple[int, ...], layers: int, source: str) -> None:
    increasing = all(a < b for a, b in zip(boundaries, boundaries[1:], strict=False))
    if not increasing or boundaries[0] < 0 or boundaries[-1] > layers:
        raise CheckpointError(
            f"{source}: {_KEY}: strictly increasing boundaries in 0..{layers} are expected, found {list(boundaries)}"
        )
