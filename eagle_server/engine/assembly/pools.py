"""The KV pool that a model's attention writes, and the states of its recurrent layers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from eagle_server.cache.block_events import block_size_of
from eagle_server.cache.pool import KVPool, LatentPool, pool_of
from eagle_server.cache.states import StatePool
from eagle_server.models.config import ModelConfig


def make_pool(config: ModelConfig, slots: int, device: torch.device) -> KVPool | LatentPool:
    """The KV pool of a model, with `slots` slots."""
    return pool_of(config.pool_layers, slots, config.dtype, device)


def bytes_per_slot(config: ModelConfig) -> int:
    """Bytes of one slot of `make_pool`, all layers together."""
    return make_pool(config, 1, torch.device("meta")).bytes_per_slot


def make_states(
    config: ModelConfig, requests: int, nodes: int, device: torch.device, checkpoints: int = 0
) -> StatePool | None:
    """The states of `requests` requests, whose trees have at most `nodes` nodes. None: no layer is recurrent."""
    if config.recurrent is None:
        return None
    layers = len(config.recurrent_layers)
    return StatePool(layers, requests, nodes, config.recurrent, config.dtype, device, checkpoints)


def state_bytes(config: ModelConfig, requests: int, nodes: int) -> int:
    """Bytes of `make_states` without checkpoints; 0 if no layer is recurrent."""
    if config.recurrent is None:
        return 0
    sizes = (len(config.recurrent_layers), config.recurrent, config.dtype)
    return (requests + 1) * (StatePool.bytes_per_request(*sizes) + nodes * StatePool.bytes_per_node(*sizes))


@dataclass(frozen=True)
class CheckpointPlan:
    """The number of state checkpoints: two for each `interval` tokens of KV, each of `size` bytes.

    One is for the interval in a long prompt, one for the end of a prompt or of a request. The interval is a multiple of
    the chunks of prompts, and its KV takes at least as many bytes as a checkpoint. So checkpoints take at most two
    thirds of the memory for both.
    """

    size: int
    interval: int

    @classmethod
    def of(cls, config: ModelConfig, slot_bytes: int, chunk: int, page_size: int) -> CheckpointPlan | None:
        """slot_bytes: a slot in all KV pools together. chunk: tokens. None: no layer is recurrent."""
        if config.recurrent is None:
            return None
        size = StatePool.bytes_per_request(len(config.recurrent_layers), config.recurrent, config.dtype)
        block, chunks = block_size_of(page_size), math.ceil(size / (slot_bytes * chunk))
        return cls(size, math.ceil(chunk * max(chunks, 1) / block) * block)

    def count(self, slots: int) -> int:
        """The checkpoints for this many slots of KV."""
        return 2 * math.ceil(slots / self.interval)

    @property
    def least(self) -> int:
        """Bytes of the fewest checkpoints."""
        return self.count(1) * self.size

    def slots_that_fit(self, memory: int, slot_bytes: int) -> int:
        """Slots of KV that fit into `memory` bytes with their checkpoints, after `least` bytes are taken."""
        return max(0, int(memory / (slot_bytes + 2 * self.size / self.interval)))
