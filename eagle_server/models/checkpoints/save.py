"""Writes checkpoints in the published format."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
) -> None:
    """Write config.json, and `file` with the published names and floats in `dtype`."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: view.detach().to("cpu", dtype if view.is_floating_point() else view.dtype).clone().contiguous()
        for name, view in model.weight_views()
    }
    weights = directory / file
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors creates files that only the owner may read
    config = {**config_json, "dtype": str(dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
