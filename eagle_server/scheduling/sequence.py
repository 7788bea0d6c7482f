"""A request on its way through the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from eagle_server.cache.manager import KVAllocation
from eagle_server.plan import GrammarMatcher, RequestSampling
from eagle_server.request import FinishReason, Request, SpecStats, Timing, TokenLogprob


@dataclass
class Times:
    """When a request was queued, first scheduled, and had its prompt computed; seconds of time.monotonic()."""

    queued: float = field(default_factory=time.monotonic)
    scheduled: float | None = None
    prefilled: float | None = None

    def timing(self) -> Timing | None:
        """That of a request which ends now; None before its prompt has been computed."""
        if self.scheduled is None or self.prefilled is None:
            return None
        return Timing(
            queue=self.scheduled - self.queued,
            prefill=self.prefilled - self.scheduled,
            decode=time.monotonic() - self.prefilled,
        )


@dataclass(eq=False)
class Sequence:
    """`tokens` is prompt plus output. Target KV holds positions 0..num_computed_tokens-1; of those, draft KV
    0..draft_computed_tokens-1.

    `num_prefill_tokens` must be prefilled before it decodes: the prompt, and after a preemption all it had.
    """

    request: Request
    sampling: RequestSampling
    stop_ids: frozenset[int]
    arrival: int
    tokens: list[int]
    spec: SpecStats
    grammar_matcher: GrammarMatcher | None = None
    allocation: KVAllocation | None = None
    num_computed_tokens: int = 0
    draft_computed_tokens: int = 0
    num_prefill_tokens: int = 0
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    times: Times = field(default_factory=Times)

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def prefilling(self) -> bool:
        return self.num_computed_tokens < self.num_prefill_tokens

    @property
    def req_pool_index(self) -> int:
        assert self.allocation is not None
        return self.allocation.req_pool_index

    def allow_ends(self) -> None:
        """Once min_tokens are out, no token is forbidden any more, and drawing need not look."""
        if self.sampling.stop_ids and self.output_length >= self.request.sampling.min_tokens:
            self.sampling = replace(self.sampling, stop_ids=())

    def finish_after(self, token: int) -> FinishReason | None:
        """Why the sequence ends with `token`, its newest; None if it goes on.

        The context cannot end it: a request whose prompt and max_tokens exceed that is refused.
        """
        if token in self.stop_ids:
            return FinishReason.STOP
        if self.output_length >= self.request.sampling.max_tokens:
            return FinishReason.LENGTH
        return None
