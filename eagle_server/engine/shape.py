"""The numbers an engine is built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from eagle_server.speculation.accept import Acceptance, Lossless

Backend = Literal["torch_native", "flashinfer"]
TreeMode = Literal["auto", "mask", "cascade", "beams"]


@dataclass(frozen=True)
class EngineConfig:
    """The numbers an engine is built from; every one is concrete.

    `num_steps` and `topk` describe a head's trees, `ngram_depth` tries of n-grams (0: none are drafted), and
    `draft_token_num` what is verified of both. Both models' RoPE tables must reach `context_length + window`.
    """

    context_length: int
    max_total_tokens: int
    num_steps: int = 0
    topk: int = 1
    draft_token_num: int = 1
    ngram_depth: int = 0
    ngram_share_tokens: int = 0  # of all requests' texts that tries are made of too; 0: of each request's own alone
    choices: tuple[tuple[int, ...], ...] = ()  # a static tree, see `speculation.medusa_choices`
    page_size: int = 1
    max_running: int = 48
    chunk_tokens: int = 512
    radix: bool = True
    backend: Backend = "torch_native"
    graph_sizes: tuple[int, ...] = ()  # batch sizes that CUDA graphs are captured for
    verify_attention: Literal["auto", "mask", "cascade"] = "auto"  # how flashinfer computes trees
    draft_attention: TreeMode = "auto"  # and draft steps
    acceptance: Acceptance = Lossless()
    poison: bool = False  # fill freed slots with NaN, so that a read of stale KV shows (tests)
    resolved: Mapping[str, Any] = field(default_factory=dict)

    @property
    def window(self) -> int:
        """Lookahead slots per decoding request: what drafting and verifying write past the committed length.

        One for verified_id, which a draft that is a language model reads first; its extend writes as many rows as a
        tree is deep, and one.
        """
        drafting = 0 if self.choices else (self.num_steps - 1) * self.topk + 1
        return max(drafting, self.draft_token_num, self.ngram_depth + 1 if self.ngram_depth else 0)
