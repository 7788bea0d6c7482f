"""From loaded models and plain numbers to an engine: pools, backends, drafter, worker, scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from eagle_server.attention.torch_native import TorchNativeAttention
from eagle_server.cache.allocator import PageAllocator
from eagle_server.cache.lease import KVLeases
from eagle_server.cache.page_table import PageTable
from eagle_server.cache.pool import KVPool
from eagle_server.cache.radix import RadixCache
from eagle_server.engine.engine import Engine
from eagle_server.models.config import ModelConfig
from eagle_server.models.draft import DraftHead
from eagle_server.models.target import TargetModel
from eagle_server.request import Ready
from eagle_server.scheduling.scheduler import Limits, Scheduler
from eagle_server.worker.batch import Batches
from eagle_server.worker.drafters.eagle import EagleDrafter
from eagle_server.worker.drafters.interface import Drafter
from eagle_server.worker.drafters.none import NoDrafter
from eagle_server.worker.verifier import Verifier
from eagle_server.worker.worker import Worker


@dataclass(frozen=True)
class Shape:
    """The numbers an engine is built from; every one is concrete.

    `num_steps`, `topk` and `draft_token_num` describe the trees; without a head they stay at their defaults. Both
    models' RoPE tables must reach `context_length + window`.
    """

    context_length: int
    max_total_tokens: int
    num_steps: int = 0
    topk: int = 1
    draft_token_num: int = 1
    page_size: int = 1
    max_running: int = 48
    chunk_tokens: int = 512
    radix: bool = True
    poison: bool = False  # fill freed slots with NaN, so that a read of stale KV shows (tests)
    resolved: Mapping[str, Any] = field(default_factory=dict)

    @property
    def window(self) -> int:
        """Lookahead slots per decoding request: what drafting and verifying write past the committed length."""
        return max((self.num_steps - 1) * self.topk, self.draft_token_num)


def assemble(target: TargetModel, head: DraftHead | None, shape: Shape, *, algorithm: str = "NONE") -> Engine:
    """An engine over `target`, drafting with `head` (None: plain decoding)."""
    device = target.embed.device
    _check(head, shape)
    slots = (shape.max_total_tokens // shape.page_size + 1) * shape.page_size  # the first page is padding
    target.aux_boundaries = head.aux_boundaries if head is not None else ()
    pools = [_pool(target.config, slots, device)]
    drafter: Drafter[Any] = NoDrafter()
    if head is not None:
        pools.append(_pool(head.config, slots, device))
        drafter = EagleDrafter(
            head,
            TorchNativeAttention(pools[1]),
            num_steps=shape.num_steps,
            topk=shape.topk,
            draft_token_num=shape.draft_token_num,
        )
    allocator = PageAllocator(shape.max_total_tokens // shape.page_size, shape.page_size)
    table = PageTable(shape.max_running, shape.context_length + shape.window, shape.page_size)

    def poison(pages: list[int]) -> None:
        first = torch.tensor(pages)[:, None] * shape.page_size
        for pool in pools:
            pool.poison((first + torch.arange(shape.page_size)).view(-1).to(device))

    if shape.poison:
        poison(list(range(1, allocator.num_pages + 1)))
    radix = RadixCache(shape.page_size) if shape.radix else None
    kv = KVLeases(allocator, table, radix, poison if shape.poison else None)
    steps = shape.num_steps if head is not None else 0
    limits = Limits(
        context_length=shape.context_length,
        max_running=shape.max_running,
        chunk_tokens=shape.chunk_tokens,
        window=shape.window,
        spec_steps=steps,
        draft_feeds=drafter.feeds,
    )
    worker = Worker(
        Verifier(target, TorchNativeAttention(pools[0]), pools[0]), drafter, Batches(table, device, spec_steps=steps)
    )
    ready = Ready(
        context_length=shape.context_length,
        max_request_tokens=min(shape.context_length, allocator.num_pages * shape.page_size - shape.window),
        vocab_size=target.config.vocab_size,
        eos_token_ids=target.config.eos_token_ids,
        speculative_algorithm=algorithm,
        num_steps=steps,
        resolved=dict(shape.resolved),
    )
    return Engine(Scheduler(limits, kv), worker, ready)


def _pool(config: ModelConfig, slots: int, device: torch.device) -> KVPool:
    return KVPool(config.num_layers, slots, config.num_kv_heads, config.head_dim, config.dtype, device)


def _check(head: DraftHead | None, shape: Shape) -> None:
    """Refuse numbers with which no request could be served."""
    usable = shape.max_total_tokens // shape.page_size * shape.page_size
    if usable < shape.window + 2:
        raise ValueError(
            f"--max-total-tokens {shape.max_total_tokens}: {usable} slots in pages of {shape.page_size} hold no "
            f"request; drafting and verifying alone need {shape.window}"
        )
    if head is not None and shape.topk > head.draft_vocab_size:
        raise ValueError(f"--speculative-eagle-topk {shape.topk}: the head drafts from {head.draft_vocab_size} tokens")
