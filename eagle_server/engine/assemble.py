"""From loaded models and plain numbers to an engine: pools, backends, drafter, worker, scheduler."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from eagle_server.cache.allocator import PageAllocator
from eagle_server.cache.manager import KVCacheManager
from eagle_server.cache.page_table import PageTable
from eagle_server.cache.pool import Pool
from eagle_server.cache.radix import RadixCache
from eagle_server.engine.backends import Backends
from eagle_server.engine.drafters import Draft, Workbench, make_drafter
from eagle_server.engine.engine import Engine
from eagle_server.engine.grammars import Grammars
from eagle_server.engine.pools import make_pool
from eagle_server.engine.shape import EngineConfig
from eagle_server.models.config import ModelConfig
from eagle_server.models.targets.interface import Target
from eagle_server.request import Ready
from eagle_server.scheduling.scheduler import Scheduler, SchedulerLimits
from eagle_server.worker.batch import Batches
from eagle_server.worker.graphs import CudaRecorder, Graphs, Recorder
from eagle_server.worker.verifier import Verifier
from eagle_server.worker.warm_up import warm_up
from eagle_server.worker.worker import Worker


def assemble(
    target: Target,
    head: Draft | None,
    shape: EngineConfig,
    *,
    algorithm: str = "NONE",
    flashinfer: Any = None,
    recorder: Recorder | None = None,
    tokenizer: Callable[[], Tokenizer] | None = None,
) -> Engine:
    """An engine over `target`, drafting with `head` (None: plain decoding).

    `flashinfer` and `recorder` stand in for the library and for CUDA graphs (tests). `tokenizer` is read with the first
    grammar that a request asks for; without it no grammar is followed.
    """
    device = target.embed.device
    _check(head, shape)
    slots = (shape.max_total_tokens // shape.page_size + 1) * shape.page_size  # the first page is padding
    target.aux_boundaries = head.aux_boundaries if head is not None else ()
    backends = Backends(shape, device, flashinfer)
    graphs = Graphs(_recorder(shape, device) if recorder is None else recorder)
    bench = Workbench(shape, slots, device, backends, graphs)
    drafter, draft_pools = make_drafter(head, bench)
    pools = [make_pool(target.config, slots, device), *draft_pools]
    kv = _kv_cache(shape, pools, device)
    steps = max(shape.num_steps if head is not None else 0, shape.ngram_depth)
    limits = SchedulerLimits(
        context_length=shape.context_length,
        max_running=shape.max_running,
        chunk_tokens=shape.chunk_tokens,
        window=shape.window,
        spec_steps=steps,
        draft_feeds=drafter.feeds,
        lossy=shape.acceptance.lossy,
    )
    attention = backends.make(target, pools[0], (shape.draft_token_num,), shape.verify_attention)
    vocab_size = target.config.vocab_size
    batches = Batches(kv.table, device, vocab_size=vocab_size, spec_steps=steps, sizes=shape.graph_sizes)
    worker = Worker(Verifier(target, attention, pools[0], graphs), drafter, batches, shape.acceptance)
    if shape.graph_sizes:
        _capture(worker, graphs, backends, shape)
    ready = Ready(
        context_length=shape.context_length,
        max_request_tokens=min(shape.context_length, kv.allocator.num_pages * shape.page_size - shape.window),
        vocab_size=vocab_size,
        eos_token_ids=target.config.eos_token_ids,
        speculative_algorithm=algorithm,
        num_steps=steps,
        resolved=dict(shape.resolved),
        pid=os.getpid(),
    )
    return Engine(Scheduler(limits, kv), worker, ready, _grammars(tokenizer, target.config))


def _kv_cache(shape: EngineConfig, pools: Sequence[Pool], device: torch.device) -> KVCacheManager:
    """All pages free; with `poison` filled with what must never be read, now and whenever they become free again."""
    allocator = PageAllocator(shape.max_total_tokens // shape.page_size, shape.page_size)
    width = shape.context_length + shape.window
    table = PageTable(shape.max_running, width, shape.page_size, mirrored=device.type != "cpu")

    def poison(pages: list[int]) -> None:
        first = torch.tensor(pages)[:, None] * shape.page_size
        for pool in pools:
            pool.poison((first + torch.arange(shape.page_size)).view(-1).to(device))

    if shape.poison:
        poison(list(range(1, allocator.num_pages + 1)))
    radix = RadixCache(shape.page_size) if shape.radix else None
    return KVCacheManager(allocator, table, radix, poison if shape.poison else None)


def _grammars(tokenizer: Callable[[], Tokenizer] | None, config: ModelConfig) -> Grammars | None:
    """None for models that no grammar could end."""
    ends = [token for token in config.eos_token_ids if 0 <= token < config.vocab_size]
    return Grammars(tokenizer, config.vocab_size, ends) if tokenizer is not None and ends else None


def _capture(worker: Worker, graphs: Graphs, backends: Backends, shape: EngineConfig) -> None:
    """Size the workspace, and then capture every graph that serving will want."""
    lengths = (2, shape.context_length)  # attention to trees may take another form over long texts
    graphs.paused = True
    # The largest batch too: it may lie beyond the graphs, and the workspace cannot grow once they hold its address.
    warm_up(worker, sorted({*shape.graph_sizes, shape.max_running}), lengths)
    backends.freeze()
    graphs.paused = False
    sizes = tqdm(shape.graph_sizes[::-1], desc="capture graphs", unit="batch size", disable=None)
    warm_up(worker, sizes, lengths)


def _recorder(shape: EngineConfig, device: torch.device) -> Recorder | None:
    return CudaRecorder() if shape.graph_sizes and device.type == "cuda" else None


def _check(head: Draft | None, shape: EngineConfig) -> None:
    """Refuse numbers with which no request could be served."""
    usable = shape.max_total_tokens // shape.page_size * shape.page_size
    if usable < shape.window + 2:
        raise ValueError(
            f"--max-total-tokens {shape.max_total_tokens}: {usable} slots in pages of {shape.page_size} hold no "
            f"request; drafting and verifying alone need {shape.window}"
        )
    if head is not None and shape.topk > head.draft_vocab_size:
        raise ValueError(f"--speculative-eagle-topk {shape.topk}: the head drafts from {head.draft_vocab_size} tokens")
