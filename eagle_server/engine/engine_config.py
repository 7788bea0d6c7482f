"""The settings of one engine, all sizes concrete. `assembly/resolve.py` makes them from options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from eagle_server.attention.interface import TreeMode
from eagle_server.speculation.accept import Acceptance, Lossless
from eagle_server.speculation.tree_config import TreeConfig

Backend = Literal["torch_native", "flashinfer"]


@dataclass(frozen=True)
class EngineConfig:
    """The settings of one engine. `resolve` sets all but the last four fields.

    The RoPE tables of target and draft must reach `context_length + num_lookahead_slots`.
    """

    context_length: int
    max_total_tokens: int
    tree: TreeConfig = TreeConfig()
    page_size: int = 1
    max_running_requests: int = 48
    chunked_prefill_size: int = 512
    disable_radix_cache: bool = False
    checkpoints: int = 16  # rows for states of recurrent layers, for the prefix cache
    checkpoint_interval: int = 512  # tokens between checkpoints of a long prompt
    algorithm: str = "NONE"  # the name in /v1/server_info of how tokens are drafted
    backend: Backend = "torch_native"
    graph_sizes: tuple[int, ...] = ()  # batch sizes that CUDA graphs are captured for
    acceptance: Acceptance = Lossless()
    estimating: bool = False  # nodes rank by how often nodes of such a guess and depth were accepted
    adaptive: bool = False  # trees follow cost and load; else every request drafts its largest tree
    coupling: bool = True  # drafters also rank by the noise of the target's draws
    num_lookahead_slots: int = 2  # KV slots after the text of a decoding request; `assemble` asks the drafter
    verify_attention: Literal["auto", "paged", "mask", "cascade"] = (
        "auto"  # how flashinfer computes attention in verification
    )
    draft_attention: TreeMode = "auto"  # the same in draft steps
    poison: bool = False  # fill freed slots with NaN, so that tests notice a read of stale KV

    @property
    def kv_slots(self) -> int:
        """Slots of each KV pool: the pages of `max_total_tokens`, and one page of padding before them."""
        return (self.max_total_tokens // self.page_size + 1) * self.page_size
