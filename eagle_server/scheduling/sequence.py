"""The scheduler's state of one request, and what a plan says of it."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from eagle_server.cache.manager import KVAllocation
from eagle_server.cache.node import Keys
from eagle_server.plan import Chunk, Decode, GrammarMatcher, RequestSampling
from eagle_server.request import FinishReason, Request, SpecStats, Timing, TokenLogprob

# Tokens that a preempted request adds before it is preempted for another client again. To resume costs a cycle or two,
# in which the tokens are computed that the prefix cache has not kept.
LEAST_PROGRESS = 32


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
    older request whose first `awaited` pages it waits for. `followed`: others have waited for this one. `turn`: the one
    that it brought, or with which it started, see `RequestQueue`. `is_resumed`: it has been preempted.
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
    is_resumed: bool = False
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    times: Times = field(default_factory=Times)

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def output_length(self) -> int:
        return len(self.tokens) - len(self.request.prompt_token_ids)

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
    def may_give_way(self) -> bool:
        """Whether the running request may be preempted for another client."""
        return not self.is_resumed or len(self.tokens) - self.num_prefill_tokens >= LEAST_PROGRESS

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

    def append(self, tokens: Seq[int]) -> tuple[list[int], FinishReason | None]:
        """Append tokens up to the first that ends the sequence. Returns them, and why it ends; None: it continues.

        The context length needs no check: a request whose prompt and max_tokens exceed it is refused.
        """
        left, stop_ids = self.request.sampling.max_tokens - self.output_length, self.stop_ids
        kept, reason = list(tokens[:left]), FinishReason.LENGTH if len(tokens) >= left else None
        if stop_ids and not stop_ids.isdisjoint(kept):
            end = next(count for count, token in enumerate(kept, 1) if token in stop_ids)
            kept, reason = kept[:end], FinishReason.STOP
        self.tokens.extend(kept)
        return kept, reason

    def chunk(self, length: int) -> Chunk:
        """The next `length` tokens to prefill."""
        start, end = self.num_computed_tokens, self.num_computed_tokens + length
        return Chunk(
            req_pool_index=self.req_pool_index,
            start=start,
            tokens=tuple(self.tokens[start:end]),
            next_token=self.tokens[end] if end < self.num_prefill_tokens else None,
            sampling=self.sampling,
            prompt_logprobs=self.request.prompt_logprobs and self.output_length == 0,
            all_tokens=self.tokens,
            grammar_matcher=self.grammar_matcher,
        )

    def decode(self) -> Decode:
        """Its part of a cycle once it has no tokens left to prefill."""
        return Decode(
            req_pool_index=self.req_pool_index,
            seq_len=self.num_computed_tokens,
            verified_id=self.tokens[-1],
            sampling=self.sampling,
            all_tokens=self.tokens,
            speculative=self.request.speculative,
            grammar_matcher=self.grammar_matcher,
            trees=self.request.trees,
            tokens_left=self.request.sampling.max_tokens - self.output_length,
            ends=self.stop_ids,
        )


def make_chunks(prefilling: Seq[Sequence], budget: int) -> list[tuple[Sequence, Chunk]]:
    """The next chunks of `prefilling`, which are in order of arrival: `budget` tokens at most.

    Half of the budget goes to the oldest request. The rest goes to the others, the shortest first: lengths are rounded
    up to half budgets, and equal ones keep the order of arrival. A short prompt does not wait for a long one; and
    every prompt has half of the budget at the latest when all older ones are computed.
    """
    if not prefilling:
        return []
    half = -(-budget // 2)
    # The last token waits until the grammar's mask is ready.
    rest = {sequence: sequence.uncomputed_tokens - (not sequence.is_ready) for sequence in prefilling}
    lengths = dict.fromkeys(prefilling, 0)
    shares = [(prefilling[0], half), *((sequence, budget) for sequence in _shortest_first(prefilling, half))]
    for sequence, most in shares:
        length = min(rest[sequence] - lengths[sequence], most, budget)
        lengths[sequence] += length
        budget -= length
    return [(sequence, sequence.chunk(length)) for sequence, length in lengths.items() if length]


def _shortest_first(prefilling: Seq[Sequence], unit: int) -> list[Sequence]:
    return sorted(prefilling, key=lambda sequence: -(-sequence.uncomputed_tokens // unit))
