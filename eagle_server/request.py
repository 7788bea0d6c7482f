"""The messages between the API process and the engine process: requests in, token deltas out. Encoded with msgspec."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from typing import Any, Literal

import msgspec


class FinishReason(enum.Enum):
    """Why a request ended. STOP and LENGTH are OpenAI's values.

    REFUSED: it cannot be served, or its parameters allow no further token; the client must change it. ERROR: the server
    failed.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    REFUSED = "refused"
    ERROR = "error"


MAX_GRAMMAR_CHARACTERS = 256 * 1024  # of a source, sent by a client or made for tools


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar that the output must match.

    `source` is a JSON schema, a regular expression, a grammar in EBNF (GBNF) or Lark, a JSON list of texts, or, as
    `calls`, tool calls in llguidance's Lark, where the rules of call number N begin with `call_N`. `json_object` allows
    any JSON object; its source is empty. `calls`, if not empty, are tool calls that may come in place of the answer.
    `thinking` is the grammar of the text before both: llguidance's Lark with the rules `thinking`, and `header` for
    what follows if it is no call. Empty: there is no thinking.

    An error names the client's parameters: `param` has the source, each of `call_params` the schema of one call.
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "ebnf", "calls"]
    source: str = ""
    calls: str = ""
    thinking: str = ""
    param: str = "grammar"
    call_params: tuple[str, ...] = ()


class GrammarError(ValueError):
    """A grammar that cannot be followed, for this `reason`. `param` is the client's parameter that has it."""

    def __init__(self, param: str, reason: str) -> None:
        super().__init__(f"{param} cannot be followed: {reason}")
        self.param, self.reason = param, reason


# Logits are multiplied or divided by the penalty. Outside this range they would overflow.
REPETITION_PENALTIES = (0.01, 100.0)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is drawn. Every value is concrete: the API fills in the defaults and, if needed, the seed.

    The logits l of a row are transformed in this order. Each transform sees the text up to that row, including the
    drafted tokens on its path:

        1. logit_bias is added. These tokens get probability zero: tokens outside allowed_token_ids, tokens that would
           complete one of bad_words, end and stop tokens before min_tokens, and tokens that the grammar forbids.
        2. repetition_penalty r, for tokens of the prompt or the output: l / r if l > 0, else l * r
        3. frequency_penalty f and presence_penalty p, for tokens of the output: l - f * count - p
        4. temperature (0: take the best token and skip the rest), top_k, top_p of what remains, and min_p: at least
           min_p times the probability of the best token

    top_k 0, top_p 1, min_p 0, penalties 0 and repetition_penalty 1 are off. `logprobs` is the number of alternatives
    returned beside the log-probability of each output token (None: no logprobs). Log-probabilities come from the raw
    model distribution, before all transforms.
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

    def problems(self) -> Iterator[str]:
        """The reasons why no token can be drawn with these values. The checks need no vocabulary."""
        unbounded = (item for item in self.logit_bias if not math.isfinite(item[1]))
        biases = {f"the logit_bias of token id {token}": bias for token, bias in unbounded}
        penalties = {"presence_penalty": self.presence_penalty, "frequency_penalty": self.frequency_penalty}
        factors = {"repetition_penalty": self.repetition_penalty, "temperature": self.temperature}
        for name, value in (biases | penalties | factors).items():
            if not math.isfinite(value):
                yield f"{name} is {value}; it must be finite"
        low, high = REPETITION_PENALTIES
        checks = (
            (
                self.grammar is None or not self.ignore_eos,
                "ignore_eos: with a grammar the text ends where the grammar does; drop one of the two",
            ),
            (self.allowed_token_ids != (), "allowed_token_ids is empty: no token could be drawn"),
            (() not in self.bad_words, "bad_words: a word has no tokens"),
            (
                low <= self.repetition_penalty <= high,
                f"repetition_penalty is {self.repetition_penalty}; it must be from {low:g} to {high:g}",
            ),
            (self.temperature >= 0, f"temperature is {self.temperature}; it must not be negative"),
            (0 < self.top_p <= 1, f"top_p is {self.top_p}; it must be above 0 and at most 1"),
            (0 <= self.min_p <= 1, f"min_p is {self.min_p}; it must be from 0 to 1"),
            (self.top_k >= 0, f"top_k is {self.top_k}; it must not be negative"),
        )
        yield from (reason for is_valid, reason in checks if not is_valid)


class Request(msgspec.Struct, frozen=True, kw_only=True, tag="request"):
    """One sequence to generate. `choice` numbers the n choices of one API request and is a key of the random numbers.

    If `speculative` is False, no tokens are drafted; the text is the same either way. If `trees` is True, the deltas
    contain the draft trees. Requests with different values of `cache_salt` share no cached KV and never draft from each
    other's text; None is a value of its own. Requests of different clients (`client`) take turns. `began`: when the
    header of the HTTP request came, by time.monotonic(), which all processes of a machine share; None: there was none.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    choice: int = 0
    prompt_logprobs: bool = False
    speculative: bool = True
    trees: bool = False
    cache_salt: str | None = None
    client: str = ""
    began: float | None = None


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End this request and free its KV: the client disconnected, or a stop string was found."""

    request_id: str


class FlushCache(msgspec.Struct, frozen=True, tag="flush_cache"):
    """Drop the prefix cache. The answer is Flushed."""


class SpecStats(msgspec.Struct, kw_only=True):
    """Counters of one request's speculative cycles. All published statistics are derived from them.

    Only cycles in which nodes of this request were verified count. histogram[a] counts those that accepted exactly `a`
    drafted tokens (without the bonus); it has steps + 1 buckets. `drafted` counts the nodes without the roots. `lossy`
    names the acceptance rule if it changes the output distribution, else None.
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
        """Tokens per cycle with drafts, the bonus token included; 0.0 before the first one."""
        return 1 + self.accepted / self.cycles if self.cycles else 0.0


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log-probability of an output or prompt token, and the most likely alternatives as (token id, logprob)."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a request in seconds: waiting for its first cycle since it came, computing the prompt, decoding."""

    queue: float
    prefill: float
    decode: float


class DraftTree(msgspec.Struct, frozen=True):
    """The draft tree of one request in one cycle, and which of its nodes were accepted.

    Node 0 is the root, the newest token before the cycle. Parents come before children. `path` lists the accepted nodes
    after the root. Their tokens, then the bonus, are the cycle's tokens. `bonus` is None if the request ended before
    it. `steps` counts the levels that the budget let the request draft; not all of their nodes are verified. `seconds`
    is the time in the engine from the request's first token to the end of the cycle.
    """

    token_ids: list[int]
    parents: list[int]  # node numbers, -1 for the root
    scores: list[float] | None  # logs of the estimated chances that the paths are accepted, 0 for the root
    path: list[int]
    bonus: int | None
    steps: int = 0
    seconds: float = 0.0

    def cut(self, count: int) -> DraftTree:
        """The same tree, for a request that ended after the first `count` of the cycle's tokens."""
        bonus = self.bonus if count > len(self.path) else None
        return msgspec.structs.replace(self, path=self.path[:count], bonus=bonus)


class TokenDelta(msgspec.Struct, kw_only=True):
    """The tokens that one cycle added to one request. The last delta has a finish_reason, and may have no tokens.

    The first delta has `prompt_logprobs` if the request asks for them: one entry for every prompt token except the
    first. Every delta of a decode has a `tree` if the request asks for trees; the delta of a prefill has none. The last
    delta has `timing`, unless the request ended before its prompt was computed. `param` names the client's parameter
    that has the grammar that an `error` is about.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    param: str | None = None
    cached_tokens: int = 0
    spec: SpecStats | None = None
    timing: Timing | None = None
    tree: DraftTree | None = None


class SpeculationState(msgspec.Struct, frozen=True, kw_only=True):
    """The present choice of an adaptive budget, and the costs behind it.

    `choice` describes it in words, with the reason if nothing is drafted. A node is verified if the chance that its
    path is accepted is at least `least_chance`. The two speeds are estimates for all requests together: without drafts,
    and with the best trees. `costs`: milliseconds of a cycle's stages by their number of rows.
    """

    choice: str
    steps: int
    least_chance: float
    plain_tokens_per_second: float
    tokens_per_second: float
    costs: dict[str, Any]


class EngineStats(msgspec.Struct, kw_only=True):
    """A snapshot of the engine: load, KV use, and totals since the start. Times are in seconds.

    `waiting_clients` counts the clients with waiting requests. `longest_wait` is the longest time that one of these
    requests has waited. `waiting` also counts requests whose grammars are being compiled; the other two do not.
    `stage_seconds` is the sum over the `measured_cycles`: all cycles on a CPU, some on a GPU.
    `speculation` is sent from time to time; None: it has not changed, or trees do not follow the load.
    `draft_warning`: hardly any draft was accepted, see `FirstDrafts`; None: enough was, or there was too little to see.
    """

    running: int
    waiting: int
    waiting_clients: int
    longest_wait: float
    kv_slots_total: int
    kv_slots_free: int
    kv_slots_cached: int
    cycles: int
    generated_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    preemptions: int
    measured_cycles: int
    stage_seconds: dict[str, float]
    speculation: SpeculationState | None = None
    draft_warning: str | None = None


class CycleStats(msgspec.Struct, kw_only=True):
    """Statistics of one cycle. `seconds` is the whole cycle, `stage_seconds` its stages; {}: not measured.

    `verified` has one (drafted, accepted) for every decode, counted as in SpecStats; (0, 0) means no draft. `computed`
    counts the prompt tokens that the target computed in this cycle. `prompt_tokens` counts all prompt tokens of the
    requests whose prefill ended in this cycle. Of these, `cache_queries` tokens were looked up in the prefix cache, and
    `cache_hits` were found.

    `drafting` counts the requests that drafted, `steps` their levels (0: none drafted), and `rows` the rows of the
    verify forward.
    `expected` is the estimated number of accepted drafted tokens, and `predicted_seconds` the cost model's prediction
    for all stages but prefill; 0 in cycles that do not update the estimates or the model.
    """

    seconds: float = 0.0
    stage_seconds: dict[str, float] = msgspec.field(default_factory=dict)
    verified: list[tuple[int, int]] = msgspec.field(default_factory=list)
    computed: int = 0
    prompt_tokens: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    preemptions: int = 0
    steps: int = 0
    drafting: int = 0
    rows: int = 0
    expected: float = 0.0
    predicted_seconds: float = 0.0


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine's first message: the model and its limits.

    `max_request_tokens` is the largest sum of prompt and output tokens that both the context and the KV pool allow.
    `media_token_ids`: the tokens that stand for images, video and audio, if the model reads them. Only its text is
    served. None: the model reads text only.
    `pid` is the engine process; None if the engine runs in the caller's process.
    """

    context_length: int
    max_request_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    speculative_algorithm: str
    num_steps: int
    resolved: dict[str, Any]
    media_token_ids: tuple[int, ...] | None = None
    pid: int | None = None


class Deltas(msgspec.Struct, frozen=True, tag="deltas"):
    """All deltas of one cycle, and the engine's state after it. `cycle` is None if no cycle ran."""

    deltas: list[TokenDelta]
    stats: EngineStats
    cycle: CycleStats | None = None


class Flushed(msgspec.Struct, frozen=True, kw_only=True, tag="flushed"):
    """The answer to FlushCache: how many KV slots became free. Running or waiting requests prevent a flush."""

    freed_slots: int = 0
    running: int = 0
    waiting: int = 0

    @property
    def is_done(self) -> bool:
        return not (self.running or self.waiting)


Inbound = Request | Abort | FlushCache
Outbound = Ready | Deltas | Flushed
