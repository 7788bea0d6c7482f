"""The numbers that an engine is built from, all sizes concrete. `engine/build/resolve.py` makes them from options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from eagle_server.speculation.accept import Acceptance, Lossless
from eagle_server.speculation.tree_config import TreeConfig

Backend = Literal["torch_native", "flashinfer"]
TreeMode = Literal["auto", "mask", "cascade", "per_node"]


@dataclass(frozen=True)
class EngineConfig:
    """The numbers that an engine is built from.

    The RoPE tables of target and draft must reach `context_length + tree.num_lookahead_slots`.
    """

    context_length: int
    max_total_tokens: int
    tree: TreeConfig = TreeConfig()
    page_size: int = 1
    max_running_requests: int = 48
    chunked_prefill_size: int = 512
    disable_radix_cache: bool = False
    algorithm: str = "NONE"  # of drafting, as /v1/server_info names it
    backend: Backend = "torch_native"
    graph_sizes: tuple[int, ...] = ()  # batch sizes that CUDA graphs are captured for
    verify_attention: Literal["auto", "mask", "cascade"] = "auto"  # how flashinfer computes attention in verification
    draft_attention: TreeMode = "auto"  # and in draft steps
    acceptance: Acceptance = Lossless()
    estimating: bool = False  # trees have the nodes that were accepted most often, by the drafter's guess and depth
    adaptive: bool = False  # trees follow cost and load; else every request drafts its largest tree
    coupling: bool = True  # drafters rank by the noise of the target's draws as well
    poison: bool = False  # fill freed slots with NaN, so that tests notice a read of stale KV

    @property
    def kv_slots(self) -> int:
        """Slots of each KV pool: those of `max_total_tokens`, and the first page, which is padding."""
        return (self.max_total_tokens // self.page_size + 1) * self.page_size
