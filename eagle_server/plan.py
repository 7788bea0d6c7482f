"""What scheduler and worker say to each other each cycle: a plan down, a result back. Host values only.

Terms: `row` is a request's row in req_to_token; `seq_len` its committed length L, so its target KV holds positions
0..L-1; `verified_id` is the token at position L, known and emitted but in no KV yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from eagle_server.request import DraftTree, TokenLogprob


@dataclass(frozen=True)
class Sampling:
    """What drawing one request's tokens needs. `key` seeds its counter-based random numbers.

    `forbidden` tokens (end of sequence, stop ids) have probability zero at positions below `allowed_from`. The first
    `prompt_length` tokens of its text are the prompt. The rest is as in `SamplingParams`, where the order stands too.
    """

    key: int
    temperature: float
    top_k: int
    top_p: float
    forbidden: tuple[int, ...] = ()
    allowed_from: int = 0
    logprobs: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt_length: int = 0

    @cached_property
    def penalized(self) -> bool:
        """Whether a draw depends on how often tokens occurred."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @cached_property
    def lookback(self) -> int:
        """How many of a text's last tokens decide which bad word the next one would complete."""
        return max(map(len, self.bad_words), default=1) - 1


MASK_WORD = 32  # tokens to one number of a GrammarMatcher's masks


class GrammarMatcher(Protocol):
    """What one request's output must be, as far as it is written; it lives as long as the request."""

    words: int  # of a mask, vocab / MASK_WORD rounded up

    def mask(self, text: Sequence[int], path: tuple[int, ...] = ()) -> NDArray[np.int32] | None:
        """Which tokens may come after `text` and `path`: bits of int32 [words], the lowest first, not to be changed.

        None: the path may not stand there, or goes on after the output's end. `text` is the request's own list, which
        grows. What was asked since it grew last is remembered: a tree costs as much level by level as at once.
        """
        ...


def allows(mask: NDArray[np.int32], token: int) -> bool:
    """Whether a token's bit is set; padding, -1, has none."""
    return token >= 0 and bool(int(mask[token // MASK_WORD]) >> token % MASK_WORD & 1)


@dataclass(frozen=True)
class Chunk:
    """A piece of prompt to prefill: `tokens` at positions start, start + 1, ...

    `next_token` is the prompt token after the chunk; None on the last chunk, whose last row draws it. `text` is as a
    Decode's.
    """

    row: int
    start: int
    tokens: tuple[int, ...]
    next_token: int | None
    sampling: Sampling
    prompt_logprobs: bool = False
    text: Sequence[int] = field(default=(), compare=False, repr=False)
    grammar_matcher: GrammarMatcher | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Decode:
    """A running request's turn: draft, verify, accept.

    `text` is all of its tokens, prompt and output, the verified_id last: the scheduler's own list, which grows after
    the cycle. Without `speculative` no draft of it is looked at. `trees`: it wants to know what was drafted.
    """

    row: int
    seq_len: int
    verified_id: int
    sampling: Sampling
    text: Sequence[int] = field(default=(), compare=False, repr=False)
    speculative: bool = True
    grammar_matcher: GrammarMatcher | None = field(default=None, compare=False, repr=False)
    trees: bool = False


@dataclass(frozen=True)
class CyclePlan:
    """One cycle. Rows in `released` ended since the last plan; the worker forgets what it kept for them."""

    chunks: tuple[Chunk, ...] = ()
    decodes: tuple[Decode, ...] = ()
    released: tuple[int, ...] = ()

    @property
    def rows(self) -> list[int]:
        """Every row that takes part, decodes first."""
        return [*(d.row for d in self.decodes), *(c.row for c in self.chunks)]


@dataclass(frozen=True)
class SequenceOutput:
    """What one request got: for a decode the accepted tokens and the bonus, for a last chunk the drawn token.

    `drafted` counts the proposed nodes; accepted drafts are len(tokens) - 1 of a decode. `failed` is a reason to end
    the request after these tokens, if they do not end it: the next one's logits are not finite, or allow no token. All
    tokens of such a decode are accepted drafts. `tree` is there for decodes that asked for it.
    """

    tokens: tuple[int, ...] = ()
    drafted: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    failed: str | None = None
    tree: DraftTree | None = None


@dataclass(frozen=True)
class CycleResult:
    """One entry per chunk and per decode of the plan, in its order."""

    chunks: tuple[SequenceOutput, ...] = ()
    decodes: tuple[SequenceOutput, ...] = ()
    stage_seconds: dict[str, float] = field(default_factory=dict)
