"""Random weights in the blocks of GGUF files: every code, and every factor of a scale."""

from __future__ import annotations

import numpy as np
import torch

from eagle_server.ops.linear.blocks import FORMATS, BlockRows


def random_rows(name: str, outputs: int, inputs: int, seed: int = 0) -> BlockRows:
    """Weights of about 1 / sqrt(inputs). inputs: whole blocks."""
    form, source = FORMATS[name], np.random.default_rng(seed)
    shape = (outputs, inputs // form.inputs)
    blocks = source.integers(0, 256, (*shape, form.bytes), dtype=np.uint8)
    largest = {4: 8, 5: 16, 6: 32, 8: 128}[form.bits] * {16: 128, 32: 64}[form.group] ** (form.inputs > form.group)
    places = [208] if name == "Q6_K" else [0, 2] if name.endswith(("_1", "4_K", "5_K")) else [0]
    for place in places:
        low = place == 2
        scales = source.uniform(-2, 2, shape) / (inputs**0.5 * (largest if not low or form.inputs > 32 else 1))
        blocks[..., place : place + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    return BlockRows(name, torch.from_numpy(blocks.reshape(outputs, -1)))
