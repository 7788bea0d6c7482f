"""The scheduler's state of one request."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from eagle_server.cache.manager import KVAllocation
from eagle_server.cache.node import Keys
from eagle_server.plan import GrammarMatcher, RequestSampling
from eagle_server.request import FinishReason, Request, SpecStats, Timing, TokenLogprob


@dataclass
class Times:
    """When a request was queued, first scheduled, and prefilled. Seconds of time.monotonic()."""

    queued: float = field(default_factory=time.monotonic)
    scheduled: float | None = None
    prefilled: float | None = None

    @property
    def decode(self) -> float:
        """Seconds since the prompt was computed, 0 before."""
        return 0.0 if self.prefilled is None else time.monotonic() - self.prefilled

    def timing(self) -> Timing | None:
        """The timing of a request that ends now; None if its prompt has not been computed."""
        if self.scheduled is None or self.prefilled is None:
            return None
        return Timing(
            queue=self.scheduled - self.queued,
            prefill=self.prefilled - self.scheduled,
            decode=self.decode,
        )


@dataclass(eq=False)
class Sequence:
    """One request with its tokens and its KV. `tokens` is the prompt plus the output.

    Target KV holds positions 0..num_computed_tokens-1. Draft KV holds positions 0..draft_computed_tokens-1 of these.
    `state_from`: the shortest length at which the states of recurrent layers can still be saved. `checkpoints`: the
    lengths at which they are saved while the prompt is computed, in order.
    `num_prefill_tokens` is the number of tokens to prefill before decoding: the prompt, or after a preemption all
    tokens. `keys`: the tokens' keys in the prefix cache, until they are computed; None if the request does not share.
    While it waits, `passed_tokens` counts the tokens of younger requests that started before it, and `leader` is the
    older request whose first `awaited` pages it waits for. `followed`: others have waited for this one. `turn`: its
    place in the starting order, see `RequestQueue`.
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
    state_from: int = 0
    checkpoints: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    keys: Keys | None = None
    leader: Sequence | None = None
    awaited: int = 0
    followed: bool = False
    passed_tokens: int = 0
    turn: int | None = None
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
    def is_ready(self) -> bool:
        """False while a thread computes which tokens the grammar allows next. No token is drawn in these cycles."""
        return self.grammar_matcher is None or self.grammar_matcher.is_ready(self.tokens)

    @property
    def uncomputed_tokens(self) -> int:
        """How many tokens are left to prefill."""
        return self.num_prefill_tokens - self.num_computed_tokens

    @property
    def most_tokens(self) -> int:
        """The most tokens that the request can have."""
        return self.prompt_length + self.request.sampling.max_tokens

    @property
    def is_held(self) -> bool:
        """Whether the leader is still computing the pages that this request waits for."""
        leader = self.leader
        if leader is None or leader.keys is None or leader.allocation is None:
            return False
        return leader.allocation.shared < self.awaited

    @property
    def req_pool_index(self) -> int:
        assert self.allocation is not None
        return self.allocation.req_pool_index

    def start(self, allocation: KVAllocation, page_size: int) -> None:
        """Begin to prefill all tokens, or to go on after the cached ones."""
        self.allocation, self.leader = allocation, None
        self.num_computed_tokens = self.draft_computed_tokens = self.state_from = allocation.shared * page_size
        self.num_prefill_tokens = len(self.tokens)
        if self.times.scheduled is None:  # after a preemption it finds its own KV
            self.times.scheduled = time.monotonic()
            self.cached_tokens = self.num_computed_tokens

    def allow_ends(self) -> None:
        """Stop forbidding end tokens once the output has min_tokens, so that sampling skips the check."""
        if self.sampling.stop_ids and self.output_length >= self.request.sampling.min_tokens:
            self.sampling = replace(self.sampling, stop_ids=())

    def finish_after(self, token: int) -> FinishReason | None:
        """Why the sequence ends with `token`, its newest token; None if it continues.

        The context length needs no check: a request whose prompt and max_tokens exceed it is refused.
        """
        if token in self.stop_ids:
            return FinishReason.STOP
        if self.output_length >= self.request.sampling.max_tokens:
            return FinishReason.LENGTH
        return None
