"""Values that are narrower than keys (MiMo-V2), padded with zeros to the size of keys while they are read.

So attention, its kernels and the KV pool have one size. The output's last numbers of each head are zero, and the
columns of o_proj that would multiply them are zero, too.
"""

from __future__ import annotations

import re

import torch.nn.functional as F
from torch import Tensor

from eagle_server.models.checkpoints.weights import StoredTensor, Weights
from eagle_server.models.config import ModelConfig

_PROJECTION = re.compile(r".*layers\.\d+\.self_attn\.(v_proj|o_proj)\.(weight|bias)")
_SINKS = "self_attn.attention_sink_bias"


def with_padded_values(stored: Weights, config: ModelConfig) -> Weights:
    """`stored` with v_proj and o_proj for values of head_dim, scaled; as they are if the family has no other values."""
    if not config.v_head_dim:
        return stored
    padded = {name.replace(_SINKS, "self_attn.sinks"): tensor for name, tensor in stored.items()}
    for name, tensor in padded.items():
        match = _PROJECTION.fullmatch(name)
        if match is not None and match.groups() != ("o_proj", "bias"):
            padded[name] = _padded(tensor, config, dim=0 if match[1] == "v_proj" else 1)
    return padded


def _padded(tensor: StoredTensor, config: ModelConfig, dim: int) -> StoredTensor:
    narrow, wide = config.v_head_dim, config.head_dim
    if len(tensor.shape) <= dim or tensor.shape[dim] % narrow:
        return tensor  # refused later, for its shape
    heads = tensor.shape[dim] // narrow
    shape = (*tensor.shape[:dim], heads * wide, *tensor.shape[dim + 1 :])

    def read() -> Tensor:
        split = tensor.read().unflatten(dim, (heads, narrow))
        missing = (0, 0) * (split.dim() - 2 - dim) + (0, wide - narrow)
        values = F.pad(split, missing).flatten(dim, dim + 1)
        return values * config.value_scale if dim == 0 else values

    return StoredTensor(tensor.file, tensor.key, shape, read)
