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
_SMALLEST_DEFAULT = 7  # layers; with fewer, the default ids are not strictly increasing

log = logging.getLogger(__name__)


def aux_boundaries(config: Mapping[str, Any], layers: int, source: str) -> tuple[int, ...]:
    """The boundaries in a flattened draft config, for a target of `layers` layers.

    The key `aux_boundaries` (from an override) comes first and is used unchanged. A top-level key holds boundaries
    (speculators, vLLM). A key in `eagle_config` (SpecForge, SGLang) holds output ids, unless the list equals the
    default boundaries or contains `layers`, which is no output id.

    Raises:
        CheckpointError: the ids are not strictly increasing boundaries of this target, or a small target has none.
    """
    nested = (config.get("eagle_config") or {}).get(_KEY)
    if config.get("aux_boundaries"):
        found = config["aux_boundaries"]
    elif config.get(_KEY):
        found = config[_KEY]
    elif nested:
        found = _from_nested(_integers(nested, source), layers)
    elif layers < _SMALLEST_DEFAULT:
        raise CheckpointError(
            f"{source}: {_KEY}: a target of {layers} layers has no default aux layers, so the ids must be given "
            f"(the defaults need {_SMALLEST_DEFAULT} layers)"
        )
    else:
        found = _default(layers)
    boundaries = _integers(found, source)
    _check(boundaries, layers, source)
    log.info("%s: the draft reads the target's residual stream after layers %s", source, boundaries)
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
