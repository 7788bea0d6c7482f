"""Which KV pool a model's attention writes."""

from __future__ import annotations

import torch

from eagle_server.cache.pool import KVPool, LatentPool
from eagle_server.models.config import ModelConfig


def make_pool(config: ModelConfig, slots: int, device: torch.device) -> KVPool | LatentPool:
    """The KV pool of a model, with `slots` slots."""
    if config.mla is not None:
        rank, rope_dim = config.mla.kv_lora_rank, config.mla.qk_rope_head_dim
        return LatentPool(config.num_layers, slots, rank, rope_dim, config.dtype, device)
    return KVPool(config.num_layers, slots, config.num_kv_heads, config.head_dim, config.dtype, device)


def bytes_per_slot(config: ModelConfig) -> int:
    """Bytes of one slot of `make_pool`, all layers together."""
    if config.mla is not None:
        rank, rope_dim = config.mla.kv_lora_rank, config.mla.qk_rope_head_dim
        return LatentPool.bytes_per_slot(config.num_layers, rank, rope_dim, config.dtype)
    return KVPool.bytes_per_slot(config.num_layers, config.num_kv_heads, config.head_dim, config.dtype)
