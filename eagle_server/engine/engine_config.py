"""The numbers that an engine is built from. `engine.resolve` makes them from the options: every size is concrete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from eagle_server.speculation.accept import Acceptance, Lossless

Backend = Literal["torch_native", "flashinfer"]
TreeMode = Literal["auto", "mask", "cascade", "per_node"]


@dataclass(frozen=True)
class TreeConfig:
    """The shape of the draft trees. The default is no tree: plain decoding.

    `num_steps` and `topk` describe the trees of a draft model, `ngram_depth` the n-gram tries. `num_draft_tokens` is
    the number of nodes that the target verifies per request, root included, whichever of the two drafted them.
    """

    num_steps: int = 0
    topk: int = 1
    num_draft_tokens: int = 1
    choices: tuple[tuple[int, ...], ...] = ()  # a static tree, see `speculation.static_tree`; (): a dynamic one
    ngram_depth: int = 0  # 0: no n-grams
    ngram_share_tokens: int = 0  # tokens of all requests' texts to look n-grams up in; 0: the request's own text only

    @property
    def depth(self) -> int:
        """Depth of the deepest tree."""
        return max(self.num_steps, self.ngram_depth)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Pairs (num_steps, num_draft_tokens) of trees that follow the load, the largest first.

        Each has half the steps and nodes of the one before. Static trees and tries have only their own shape.
        """
        shapes = [(self.depth, self.num_draft_tokens)]
        while shapes[-1][0] > 1 and shapes[-1][1] > 2 and not self.choices and not self.ngram_depth:  # noqa: PLR2004
            steps, size = shapes[-1]
            steps = -(-steps // 2)
            pool = self.topk + (steps - 1) * self.topk**2
            shapes.append((steps, steps + 1 if self.topk == 1 else max(2, min(-(-size // 2), pool + 1))))
        return tuple(shapes)

    def captured_shapes(self, *, adaptive: bool) -> tuple[tuple[int, int], ...]:
        """Pairs (num_steps, num_draft_tokens) of the cycles that graphs are captured for, the largest first."""
        return (*self.shapes, (0, 1)) if adaptive else ((self.num_steps, self.num_draft_tokens),)

    @property
    def num_lookahead_slots(self) -> int:
        """Lookahead slots per decoding request: KV slots that drafting and verifying write after its own tokens.

        Draft steps write one slot for verified_id, which a draft language model reads first, and one per node that
        they feed. Verifying writes one per node. Extend writes one row per level of the tree, and one more. At least
        two: the next plain forward may run before its slot is allocated, see `Worker`.
        """
        drafting = 0 if self.choices else (self.num_steps - 1) * self.topk + 1
        return max(2, drafting, self.num_draft_tokens, self.ngram_depth + 1 if self.ngram_depth else 0)


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
