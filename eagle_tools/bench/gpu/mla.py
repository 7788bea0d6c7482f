"""Attention of one layer shaped like DeepSeek-V3's: decoding, chains and trees over a compressed KV."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch

from eagle_server.attention.batches import prefill_batch, verify_layout
from eagle_server.attention.flashinfer.backend import AttentionLimits, Workspace
from eagle_server.attention.flashinfer.mla import FlashInferMLAAttention
from eagle_server.attention.interface import AttentionBackend, AttentionBatch, Causal, LayerSpec, Layout, TreeMask
from eagle_server.attention.torch_native import torch_native
from eagle_server.cache.pool import LatentPool, LatentShape
from eagle_server.ops.tree.build import ancestors
from eagle_tools.bench.gpu.engines import BenchEngines
from eagle_tools.bench.gpu.machine import GIGA, brief, is_fatal

SCALE = 192**-0.5  # DeepSeek-V3's head: 128 dimensions without RoPE, 64 with RoPE
CHAIN = 4


def mla(engines: BenchEngines) -> dict[str, Any]:
    """Device time of a layer's attention and host time of its planning, per context."""
    layer = Layer(engines)
    rows = []
    for length in engines.scale.contexts:
        forwards: dict[str, Callable[[int], AttentionBatch]] = {
            "decode": lambda n: layer.chain(n, 1),
            f"chain of {CHAIN}": lambda n: layer.chain(n, CHAIN),
            f"tree of {engines.scale.nodes}": lambda n: layer.tree(n, engines.scale.nodes),
        }
        row: dict[str, Any] = {"context": length, "kv_mb": length * layer.bytes_per_slot / 1e6}
        for name, make in forwards.items():
            try:
                row[name] = layer.measure(make(length))
            except (RuntimeError, ValueError) as error:
                if is_fatal(error):
                    raise
                row[name] = {"failed": brief(error)}
        rows.append(row)
    return {
        "heads": engines.scale.mla_heads,
        "rank": engines.scale.mla_rank,
        "rope": engines.scale.mla_rope,
        "rows": rows,
    }


class Layer:
    """One layer's latents for one request of the longest context."""

    def __init__(self, engines: BenchEngines) -> None:
        scale, device = engines.scale, engines.device
        self._machine, self._heads, self._dim = engines.machine, scale.mla_heads, scale.mla_rank + scale.mla_rope
        self._dtype = engines.dtype
        width = max(scale.contexts) + scale.nodes
        self.pool = LatentPool([LatentShape(scale.mla_rank, scale.mla_rope)], width + 1, self._dtype, device)
        self.pool.data.normal_()
        order = torch.randperm(width, generator=torch.Generator().manual_seed(0)) + 1
        self._table = order.int()[None].to(device)
        self._rows = torch.zeros(1, dtype=torch.int64, device=device)
        self._backend = self._make(engines, width)
        self.bytes_per_slot = self._dim * self._dtype.itemsize

    def _make(self, engines: BenchEngines, width: int) -> AttentionBackend:
        if not engines.flashinfer:
            return torch_native(self.pool)
        return FlashInferMLAAttention(
            self.pool,
            Workspace(engines.device),
            heads=self._heads,
            specs=[(SCALE, 0)],
            limits=AttentionLimits(1, width),
            module=engines.stand_ins.get("flashinfer"),
        )

    def chain(self, length: int, rows: int) -> AttentionBatch:
        """A batch of one request: the last `rows` of `length` tokens, causal."""
        lens = torch.tensor([length], device=self._rows.device)
        return prefill_batch(self._rows, lens, self._table, Causal(), Layout((rows,), (length,)))

    def tree(self, length: int, nodes: int) -> AttentionBatch:
        """A batch of one request: a random tree after a prefix of `length` tokens."""
        rng = random.Random(0)
        parents = torch.tensor([[-1, *(rng.randrange(max(0, n - 9), n) for n in range(1, nodes))]])
        mask, depths = (x.to(self._rows.device) for x in ancestors(parents, nodes))
        lens = torch.tensor([length], device=self._rows.device)
        layout = verify_layout((length,), nodes, topk=2)
        return prefill_batch(self._rows, lens + nodes, self._table, TreeMask(mask, depths, depths), layout)

    def measure(self, batch: AttentionBatch) -> dict[str, float]:
        """Device ms per forward, host ms per plan, and the rate at which the KV was read."""
        rows = batch.layout.q_lens[0]
        q = torch.randn(rows, self._heads, self._dim, device=self._rows.device).to(self._dtype)
        k = torch.randn(rows, 1, self._dim, device=self._rows.device).to(self._dtype)
        v, spec = k[..., : self.pool.rank], LayerSpec(0, SCALE)
        planned = self._backend.plan(batch.layout).bind(batch)
        device = self._machine.seconds(lambda: planned.run(q, k, v, spec))
        began = time.perf_counter()
        for _ in range(5):
            self._backend.plan(batch.layout).bind(batch)
        host = (time.perf_counter() - began) / 5
        read = batch.layout.kv_lens[0] * self.bytes_per_slot
        return {"device_ms": 1e3 * device, "plan_ms": 1e3 * host, "kv_gb_per_s": read / device / GIGA}
