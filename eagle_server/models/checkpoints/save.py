"""Writes checkpoints in the published format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file

from eagle_server.models.layers import Views


class HasWeightViews(Protocol):
    """A target or draft head that lists its published tensors."""

    def weight_views(self) -> Views: ...


def save_checkpoint(
    model: HasWeightViews,
    directory: Path,
    config_json: Mapping[str, Any],
    dtype: torch.dtype = torch.bfloat16,
    *,
    file: str = "model.safetensors",
    name_of: Callable[[str], str] = str,
) -> None:
    """Write config.json, and `file` with the published names and floats in `dtype`.

    Biases by which routers choose stay float32, as published ones are: small differences choose other experts.
    name_of: the name in the file, of a name in `weight_views`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, view in model.weight_views():
        rounds = view.is_floating_point() and not name.endswith(".e_score_correction_bias")
        tensors[name_of(name)] = view.detach().to("cpu", dtype if rounds else view.dtype).clone().contiguous()
    weights = directory / file
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors creates files that only the owner may read
    config = {**config_json, "dtype": str(dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
