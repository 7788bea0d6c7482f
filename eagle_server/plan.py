"""What scheduler and worker exchange each cycle: a plan down, a result back. Host values only.

Terms: `req_pool_index` is a request's row in req_to_token. `seq_len` is its computed length L: its target KV holds
positions 0..L-1. `verified_id` is the token at position L: sampled and sent, but not in KV yet.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from eagle_server.request import DraftTree, FinishReason, SamplingParams, TokenLogprob

TRACED_STAGE = "stage "  # prefix of the names of `CycleResult.stage_seconds` in a profiler's trace

TEMPERATURE_EDGES = (1e-9, 0.85)
TEMPERATURE_BINS = len(TEMPERATURE_EDGES) + 1


@dataclass(frozen=True)
class RequestSampling:
    """How one request's tokens are drawn: its parameters, and what the engine adds to them."""

    params: SamplingParams
    key: int  # seeds the request's counter-based random numbers
    prompt_length: int = 0  # the first tokens of its text, which penalties count separately
    stop_ids: tuple[int, ...] = ()  # end-of-sequence and stop tokens; probability zero before min_tokens

    @property
    def allowed_from(self) -> int:
        """The first position at which stop_ids may be drawn."""
        return self.prompt_length + self.params.min_tokens

    @cached_property
    def penalized(self) -> bool:
        """Whether a draw depends on how often tokens occurred."""
        params = self.params
        return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0

    @cached_property
    def temperature_bin(self) -> int:
        """Class of requests with about the same acceptance: 0 for greedy ones, then by temperature."""
        return sum(self.params.temperature >= edge for edge in TEMPERATURE_EDGES)

    # The lists of `params` as arrays. They are built once, because batches change often and lists may be long.

    @cached_property
    def biases(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Tokens and the values added to their logits: logit_bias, and -inf for bad words of one token."""
        forbidden = [word[0] for word in self.params.bad_words if len(word) == 1]
        tokens, values = [token for token, _ in self.params.logit_bias], [value for _, value in self.params.logit_bias]
        values += [-math.inf] * len(forbidden)
        return np.array(tokens + forbidden, dtype=np.int64), np.array(values, dtype=np.float32)

    @cached_property
    def allowed(self) -> NDArray[np.bool_] | None:
        """Whether each token up to the largest of allowed_token_ids is one of them. None: all tokens are allowed."""
        if self.params.allowed_token_ids is None:
            return None
        tokens = np.array(self.params.allowed_token_ids, dtype=np.int64)
        allowed = np.zeros(tokens.max(initial=-1) + 1, dtype=np.bool_)
        allowed[tokens] = True
        return allowed

    @cached_property
    def long_words(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The bad words of several tokens: their tokens, one word after the other, and their lengths [words]."""
        words = [word for word in self.params.bad_words if len(word) > 1]
        tokens = np.fromiter(chain.from_iterable(words), dtype=np.int64)
        return tokens, np.array([len(word) for word in words], dtype=np.int64)

    @cached_property
    def early_stop_ids(self) -> NDArray[np.int64]:
        """stop_ids as an array."""
        return np.array(self.stop_ids, dtype=np.int64)


MASK_WORD = 32  # tokens to one integer of a token mask


class GrammarMatcher(Protocol):
    """Which tokens a grammar allows after one request's text. It lives as long as the request."""

    words: int  # integers of a mask, vocab / MASK_WORD rounded up
    failure: str | None  # why no token may follow; None: some may, or the output is complete

    def is_ready(self, tokens: Sequence[int]) -> bool:
        """Whether `mask(tokens)` is quick. If not, a thread computes it: ask again, and do not call `mask` before."""
        ...

    def mask(self, tokens: Sequence[int], path: tuple[int, ...] = ()) -> NDArray[np.int32] | None:
        """The tokens allowed after `tokens` and then `path`: bits of int32 [words], lowest first. Do not change it.

        None: the grammar refuses the path, the path goes on after the output's end, or this cycle's masks take too
        long. `tokens` is the scheduler's list, which grows. Results are kept until it grows, so asking for a tree level
        by level costs no more than asking for all of it.
        """
        ...


def allows(mask: NDArray[np.int32], token: int) -> bool:
    """Whether a token's bit is set. False for padding, -1."""
    return token >= 0 and bool(int(mask[token // MASK_WORD]) >> token % MASK_WORD & 1)


class StateSave(NamedTuple):
    """The state of a request's text at this length becomes a checkpoint, which is a row of the state pool."""

    req_pool_index: int
    length: int
    checkpoint: int


@dataclass(frozen=True)
class Chunk:
    """A piece of prompt to prefill: `tokens` at positions start, start + 1, ..."""

    req_pool_index: int
    start: int
    tokens: tuple[int, ...]
    next_token: int | None  # the prompt token after the chunk; None: the last chunk, whose last row draws a token
    sampling: RequestSampling
    prompt_logprobs: bool = False
    all_tokens: Sequence[int] = field(default=(), compare=False, repr=False)  # see Decode
    grammar_matcher: GrammarMatcher | None = field(default=None, compare=False, repr=False)
    saves: tuple[StateSave, ...] = ()  # states to save at lengths that the chunk reaches

    @property
    def end(self) -> int:
        """The position behind the chunk."""
        return self.start + len(self.tokens)

    @property
    def following(self) -> tuple[int, ...]:
        """The next prompt token after each of the chunk's tokens. The prompt's last token has none."""
        return self.tokens[1:] + (() if self.next_token is None else (self.next_token,))


class Decode(msgspec.Struct, frozen=True):
    """A request to decode in this cycle: draft, verify, accept.

    A Struct, as is its output: each cycle makes one per request, 0.15 us instead of 1 us for a dataclass.
    """

    req_pool_index: int
    seq_len: int
    verified_id: int
    sampling: RequestSampling
    # All of its tokens, prompt and output, verified_id last: the scheduler's own list, which grows after the cycle.
    all_tokens: Sequence[int] = ()
    speculative: bool = True  # False: nothing is drafted for it
    grammar_matcher: GrammarMatcher | None = None
    trees: bool = False  # return its draft tree
    tokens_left: int = sys.maxsize  # the most tokens that it may still get, at least 1
    ends: frozenset[int] = frozenset()  # tokens that end the request

    def kept(self, tokens: Sequence[int]) -> int:
        """The number of these new tokens that the request keeps."""
        kept, left = len(tokens), self.tokens_left
        if self.ends and not self.ends.isdisjoint(tokens):
            kept = next(count for count, token in enumerate(tokens, 1) if token in self.ends)
        return kept if kept < left else left


@dataclass(frozen=True)
class StateMoves:
    """States of recurrent layers that are copied before a cycle's forwards: all saves, then all restores.

    A save may belong to a request that has left. A later save to the same checkpoint replaces an earlier one.
    restores: (checkpoint, req_pool_index).
    """

    saves: tuple[StateSave, ...] = ()
    restores: tuple[tuple[int, int], ...] = ()


NO_MOVES = StateMoves()


class TreeShape(NamedTuple):
    """The trees of a cycle: levels, the most nodes with the root, and nodes that each draft step feeds (0: all)."""

    steps: int
    nodes: int
    topk: int = 0


@dataclass(frozen=True)
class CyclePlan:
    """One cycle. The requests in `released` have left since the last plan; the worker drops their state."""

    chunks: tuple[Chunk, ...] = ()
    decodes: tuple[Decode, ...] = ()
    released: tuple[int, ...] = ()  # req_pool_indices
    states: StateMoves = NO_MOVES
    warm_up: TreeShape | None = None  # a cycle of padding, before the first request: its trees; nothing is learned

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.chunks or self.decodes or self.released or self.states != NO_MOVES)


@dataclass(frozen=True)
class Failure:
    """Why a request must end. REFUSED: its own parameters allow no token. ERROR: the server failed."""

    reason: FinishReason
    message: str


class SequenceOutput(msgspec.Struct, frozen=True):
    """The output of a scheduled request. A decode gets accepted tokens and the bonus, a last chunk the first token."""

    tokens: tuple[int, ...] = ()
    drafted: int = 0  # verified nodes without the root; unless `failed`, len(tokens) - 1 of them were accepted
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    # The request must end after these tokens: the next logits are not finite, or allow no token. All tokens of such a
    # decode are accepted drafts.
    failed: Failure | None = None
    tree: DraftTree | None = None  # for decodes that asked for it


@dataclass(frozen=True)
class CycleResult:
    """One output per chunk and per decode of the plan, in its order.

    draft_computed_tokens: how many first tokens of each decode the drafter has computed; (): it reads no features, so
    as many as the target. settled: the states of recurrent layers have already moved along the accepted paths, so no
    shorter length can be saved. `CycleStats` describes the fields from `steps` on.
    """

    chunks: tuple[SequenceOutput, ...] = ()
    decodes: tuple[SequenceOutput, ...] = ()
    stage_seconds: dict[str, float] = field(default_factory=dict)
    draft_computed_tokens: tuple[int, ...] = ()
    settled: bool = True
    steps: int = 0
    drafting: int = 0
    rows: int = 0
    expected: float = 0.0
    predicted_seconds: float = 0.0
