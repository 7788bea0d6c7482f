"""What crosses process borders: requests towards the engine, token deltas back. Encoded with msgspec."""

from __future__ import annotations

import enum
from typing import Any, Literal

import msgspec


class FinishReason(enum.Enum):
    """Why a request ended; STOP and LENGTH are OpenAI's words. REFUSED: it could never be served; ERROR: it failed."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    REFUSED = "refused"
    ERROR = "error"


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """What the output must be: `source` is a JSON schema, regular expression, EBNF grammar, a JSON list of texts, or
    one of xgrammar's structural tags (JSON, too).

    `json_object` is any JSON object; its source is empty.
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "ebnf", "structural_tag"]
    source: str = ""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is drawn. Every value is concrete: the API fills in defaults, and draws a seed if need be.

    Transforms of a row's logits, in this order, each given the text up to that row, drafted tokens included:

        logit_bias is added; tokens outside allowed_token_ids, tokens that would complete one of bad_words, end and stop
        tokens before min_tokens, and tokens that the grammar forbids get probability zero
        repetition_penalty r, for tokens of prompt or output: l / r where l > 0, else l * r
        frequency_penalty and presence_penalty, for tokens of the output: l - f * count - p
        temperature (0: the best token now, nothing further), top-k, top-p on what remains, min_p times the best

    top_k 0, top_p 1, min_p 0, penalties 0 and repetition_penalty 1 are off. `logprobs` asks for that many alternatives
    beside each emitted token's own log-probability (None: no logprobs); they are those of the raw model distribution,
    before all transforms.
    """

    max_tokens: int
    seed: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True, tag="request"):
    """One sequence to generate. `choice` numbers the n choices of one API request and keys their random numbers.

    `speculative` False: nothing is drafted for it. Its text is the same either way. `trees`: its deltas tell what was
    drafted.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    choice: int = 0
    prompt_logprobs: bool = False
    speculative: bool = True
    trees: bool = False


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """The client went away, or a stop string was found: end this request and free its KV."""

    request_id: str


class FlushCache(msgspec.Struct, frozen=True, tag="flush_cache"):
    """Drop the prefix cache; answered with Flushed."""


class SpecStats(msgspec.Struct, kw_only=True):
    """Counters of one request's speculative cycles; everything published is derived from them.

    histogram[a] counts cycles that accepted exactly a drafted tokens (bonus not included), so it has spec_steps + 1
    buckets, and sum(histogram) is the number of cycles. `drafted` counts proposed tree nodes without the root. `lossy`
    names the rule that kept drafts which plain decoding might not have written, if there was one.
    """

    histogram: list[int]
    drafted: int = 0
    lossy: str | None = None

    @property
    def cycles(self) -> int:
        return sum(self.histogram)

    @property
    def accepted(self) -> int:
        return sum(length * count for length, count in enumerate(self.histogram))

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per target forward, the bonus token included; 0.0 before the first cycle."""
        return 1 + self.accepted / self.cycles if self.cycles else 0.0


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log-probability of an emitted (or prompt) token, and the most likely alternatives as (token id, logprob)."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a request in the engine: until first scheduled, until its prompt was computed, until its end."""

    queue: float
    prefill: float
    decode: float


class DraftTree(msgspec.Struct, frozen=True):
    """What one cycle drafted for one request, and what of it was kept.

    Node 0 is the root, the newest token before the cycle; parents come before children. `path` are the accepted nodes
    after the root, so that their tokens and the bonus are the cycle's tokens. There is no bonus where the request ended
    before it.
    """

    token_ids: list[int]
    parents: list[int]  # node numbers, -1 for the root
    scores: list[float] | None  # log-probabilities of the paths, 0 for the root; None where the drafter has none
    path: list[int]
    bonus: int | None

    def cut(self, count: int) -> DraftTree:
        """The same tree of a request that kept only the first `count` of the cycle's tokens."""
        bonus = self.bonus if count > len(self.path) else None
        return msgspec.structs.replace(self, path=self.path[:count], bonus=bonus)


class TokenDelta(msgspec.Struct, kw_only=True):
    """What one cycle added to one request. The last delta of a request has a finish_reason (and may have no tokens).

    prompt_logprobs, if asked for, comes with the first delta: one entry per prompt token but the first. `tree`, if
    asked for, is there unless the token was drawn by a prompt's prefill. The last delta has the timing, unless the
    request ended before its prompt was computed.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    cached_tokens: int = 0
    spec: SpecStats | None = None
    timing: Timing | None = None
    tree: DraftTree | None = None


class EngineStats(msgspec.Struct, kw_only=True):
    """A snapshot of the engine: load, KV use and totals since start. Times are seconds."""

    running: int
    waiting: int
    kv_slots_total: int
    kv_slots_free: int
    kv_slots_cached: int
    cycles: int
    generated_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    preemptions: int
    stage_seconds: dict[str, float]


class CycleStats(msgspec.Struct, kw_only=True):
    """What one cycle did and how many seconds it took, all of it and stage by stage.

    `verified` has (drafted, accepted) of every request that decoded, counted as in SpecStats; 0 drafted is no draft.
    `computed` prompt tokens went through the target. `prompt_tokens` are those of the requests whose prompts were
    computed to their end, of which `cache_queries` were looked up in the prefix cache and `cache_hits` found.
    """

    seconds: float = 0.0
    stage_seconds: dict[str, float] = msgspec.field(default_factory=dict)
    verified: list[tuple[int, int]] = msgspec.field(default_factory=list)
    computed: int = 0
    prompt_tokens: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    preemptions: int = 0


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine's first message: what it serves. max_request_tokens, prompt and output, is the tightest limit.

    `pid` is the engine process; None where it has none of its own.
    """

    context_length: int
    max_request_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    speculative_algorithm: str
    num_steps: int
    resolved: dict[str, Any]
    pid: int | None = None


class Deltas(msgspec.Struct, frozen=True, tag="deltas"):
    """Everything one cycle produced, and the engine's state after it. `cycle` is None where none was run."""

    deltas: list[TokenDelta]
    stats: EngineStats
    cycle: CycleStats | None = None


class Flushed(msgspec.Struct, frozen=True, kw_only=True, tag="flushed"):
    """KV slots of the prefix cache that are free now. Nothing is flushed while requests are running or waiting."""

    freed_slots: int = 0
    running: int = 0
    waiting: int = 0

    @property
    def is_done(self) -> bool:
        return not (self.running or self.waiting)


Inbound = Request | Abort | FlushCache
Outbound = Ready | Deltas | Flushed
