"""An engine without a model: it repeats the prompt, and special tokens in the prompt make it misbehave.

Every cycle gives each request 1 to 4 tokens, as speculation would.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from eagle_server.request import (
    CycleStats,
    DraftTree,
    EngineStats,
    FinishReason,
    Flushed,
    Ready,
    Request,
    SpecStats,
    Timing,
    TokenDelta,
    TokenLogprob,
)
from eagle_server.text.tools.formats import HARMONY

EOS = "<|eos|>"  # the reply ends here
REFUSE = "<|refuse|>"  # the engine refuses the request
BREAK = "<|break|>"  # the request fails after some tokens
DEAD_END = "<|dead end|>"  # after some tokens, none is allowed
STALL = "<|stall|>"  # no token ever comes
SLOW = "<|slow|>"  # one token per 50 ms
BURN = "<|burn|>"  # every cycle computes for 0.2 s
CRASH = "<|crash|>"  # the engine process dies with an exception
EXIT = "<|exit|>"  # it dies without one
HANG = "<|hang|>"  # a cycle never ends
PLAIN = "<|plain|>"  # nothing is speculated
CONTROLS = (EOS, REFUSE, BREAK, STALL, SLOW, BURN, CRASH, EXIT, HANG, PLAIN, DEAD_END)
MARKER = "[TOOL_CALLS]"  # not a control: a special token that stays in the reply
ID = {text: 256 + index for index, text in enumerate((*CONTROLS, MARKER, *HARMONY))}

CONTEXT_LENGTH = 2048
MAX_REQUEST_TOKENS = 2000
SPEC_STEPS = 3
DRAFTED_PER_CYCLE = 12
EXPECTED_PER_CYCLE = 1.5  # accepted tokens per tree


def byte_tokenizer() -> Tokenizer:
    """One token per byte (id = byte), and the special tokens above."""
    vocabulary = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ID])
    return tokenizer


def _byte_symbols() -> list[str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


@dataclass
class Sequence:
    request: Request
    reply: list[int]
    cycles: int = 0
    emitted: int = 0
    resume: float = 0.0
    spec: SpecStats = field(default_factory=lambda: SpecStats(histogram=[0] * (SPEC_STEPS + 1)))

    def asks_for(self, control: str) -> bool:
        return ID[control] in self.request.prompt_token_ids

    def token(self, position: int) -> int:
        return self.reply[position % len(self.reply)]


class FakeEngine:
    def __init__(self, step_seconds: float = 0.0) -> None:
        self.step_seconds = step_seconds
        self.sequences: dict[str, Sequence] = {}
        self.aborted: list[str] = []
        self.requests: list[Request] = []
        self._said: list[TokenDelta] = []
        self._cycles = self._tokens = 0
        self._cycle: CycleStats | None = None
        self.cached = 0
        self.waiting_clients, self.longest_wait = 0, 0.0  # what its statistics say: it lets nobody wait
        self.draft_warning: str | None = None  # the same

    def preload(self) -> None:
        pass

    lacks_graphs = False

    def capture_graph(self) -> None:
        raise AssertionError("there are no graphs")

    def ready(self) -> Ready:
        return Ready(
            context_length=CONTEXT_LENGTH,
            max_request_tokens=MAX_REQUEST_TOKENS,
            vocab_size=256 + len(ID),
            eos_token_ids=(ID[EOS],),
            speculative_algorithm="EAGLE3",
            num_steps=SPEC_STEPS,
            resolved={"dtype": "float32"},
        )

    def add(self, request: Request) -> None:
        self.requests.append(request)
        controls = {ID[control] for control in CONTROLS if control != EOS}
        reply = [token for token in request.prompt_token_ids if token not in controls] or [ord("x")]
        sequence = Sequence(request, reply)
        if sequence.asks_for(REFUSE):
            self._end(request.request_id, FinishReason.REFUSED, error="it does not fit")
            return
        self.sequences[request.request_id] = sequence

    def abort(self, request_id: str) -> None:
        sequence = self.sequences.pop(request_id, None)
        if sequence is not None:
            self.aborted.append(request_id)
            spec = None if sequence.asks_for(PLAIN) else sequence.spec
            self._end(request_id, FinishReason.ABORT, spec=spec)

    def has_work(self) -> bool:
        return bool(self._said or self.sequences)

    overlaps = False

    def step(self, meanwhile: Callable[[], None]) -> list[TokenDelta]:
        meanwhile()
        said, self._said = self._said, []
        time.sleep(self.step_seconds)
        self._cycles += 1
        self._cycle = CycleStats(seconds=0.01, stage_seconds={"verify": 0.008, "emit": 0.001})
        for sequence in list(self.sequences.values()):
            self._misbehave(sequence)
            if not sequence.asks_for(STALL) and time.monotonic() >= sequence.resume:
                said.append(self._advance(sequence))
        if not said:
            time.sleep(0.001)
        return said

    def check(self) -> None:
        assert not self.sequences

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.sequences),
            waiting=0,
            waiting_clients=self.waiting_clients,
            longest_wait=self.longest_wait,
            kv_slots_total=1000,
            kv_slots_free=1000 - len(self.sequences),
            kv_slots_cached=0,
            cycles=self._cycles,
            generated_tokens=self._tokens,
            drafted_tokens=0,
            accepted_tokens=0,
            preemptions=0,
            measured_cycles=0,
            stage_seconds={},
            draft_warning=self.draft_warning,
        )

    def catch_up(self) -> None:
        """There is nothing to catch up with."""

    def take_cycle(self) -> CycleStats | None:
        cycle, self._cycle = self._cycle, None
        return cycle

    def flush_cache(self) -> Flushed:
        if self.sequences:
            return Flushed(running=len(self.sequences))
        freed, self.cached = self.cached, 0
        return Flushed(freed_slots=freed)

    def _end(
        self,
        request_id: str,
        reason: FinishReason,
        error: str | None = None,
        param: str | None = None,
        spec: SpecStats | None = None,
    ) -> None:
        delta = TokenDelta(
            request_id=request_id, token_ids=[], finish_reason=reason, error=error, param=param, spec=spec
        )
        self._said.append(delta)

    def _misbehave(self, sequence: Sequence) -> None:
        if sequence.asks_for(CRASH):
            raise RuntimeError("asked to crash")
        if sequence.asks_for(HANG):
            time.sleep(3600)
        if sequence.asks_for(EXIT) and sequence.emitted >= 3:
            os._exit(7)
        if sequence.asks_for(BURN):
            end = time.monotonic() + 0.2
            while time.monotonic() < end:
                hashlib.sha256(bytes(1_000_000))

    def _advance(self, sequence: Sequence) -> TokenDelta:
        request, params = sequence.request, sequence.request.sampling
        first = sequence.cycles == 0
        count = 1 if sequence.asks_for(SLOW) else 1 + (params.seed + request.choice + sequence.cycles) % 4
        sequence.resume = time.monotonic() + 0.05 if sequence.asks_for(SLOW) else 0.0
        sequence.cycles += 1
        tokens, reason = self._take(sequence, count)
        if first:
            self._count_prompt(request)
        else:
            self._count_draft(sequence, max(len(tokens) - 1, 0))
        error = None
        if sequence.asks_for(BREAK) and not first:
            reason, error = FinishReason.ERROR, "the logits are not finite"
        if sequence.asks_for(DEAD_END) and not first:
            reason, error = FinishReason.REFUSED, "no token may follow"
        if reason is not None:
            del self.sequences[request.request_id]
        speculated = reason is not None and sequence.spec.drafted and not sequence.asks_for(PLAIN)
        return TokenDelta(
            request_id=request.request_id,
            token_ids=tokens,
            logprobs=None if params.logprobs is None else [logprob(token, params.logprobs) for token in tokens],
            prompt_logprobs=[logprob(token, params.logprobs or 0) for token in request.prompt_token_ids[1:]]
            if first and request.prompt_logprobs
            else None,
            finish_reason=reason,
            error=error,
            cached_tokens=len(request.prompt_token_ids) // 2,
            spec=sequence.spec if speculated else None,
            timing=None if reason is None else Timing(queue=0.25, prefill=0.5, decode=1.0),
            tree=None if first or not request.trees else tree_of(sequence, tokens),
        )

    def _count_prompt(self, request: Request) -> None:
        assert self._cycle is not None
        length = len(request.prompt_token_ids)
        self._cycle.prompt_tokens += length
        self._cycle.computed += length - length // 2
        self._cycle.cache_queries += length
        self._cycle.cache_hits += length // 2

    def _count_draft(self, sequence: Sequence, accepted: int) -> None:
        assert self._cycle is not None
        plain = sequence.asks_for(PLAIN)
        self._cycle.verified.append((0, 0) if plain else (DRAFTED_PER_CYCLE, accepted))
        self._cycle.rows += 1 if plain else DRAFTED_PER_CYCLE + 1
        if not plain:
            self._cycle.steps = SPEC_STEPS
            self._cycle.drafting += 1
            self._cycle.expected += EXPECTED_PER_CYCLE
        self._cycle.predicted_seconds = 0.008
        sequence.spec.histogram[accepted] += 1
        sequence.spec.drafted += DRAFTED_PER_CYCLE

    def _take(self, sequence: Sequence, count: int) -> tuple[list[int], FinishReason | None]:
        params = sequence.request.sampling
        ends = {*params.stop_token_ids} | (set() if params.ignore_eos else {ID[EOS]})
        tokens: list[int] = []
        while len(tokens) < count and sequence.emitted < params.max_tokens:
            token = sequence.token(sequence.emitted)
            tokens.append(token)
            sequence.emitted += 1
            self._tokens += 1
            self.cached += 1
            self._tokens += 1
            if token in ends and sequence.emitted >= params.min_tokens:
                return tokens, FinishReason.STOP
        return tokens, FinishReason.LENGTH if sequence.emitted >= params.max_tokens else None


def logprob(token: int, alternatives: int) -> TokenLogprob:
    top = [((token + i) % 256, -0.25 - i) for i in range(alternatives)]
    return TokenLogprob(token, -0.25, top)


def tree_of(sequence: Sequence, tokens: list[int]) -> DraftTree:
    """A tree below the previous token: the cycle's tokens except the last, each with a wrong sibling."""
    root = sequence.token(sequence.emitted - len(tokens) - 1)
    nodes, parents, path = [root], [-1], list[int]()
    for token in tokens[:-1]:
        above = path[-1] if path else 0
        nodes += [(token + 1) % 256, token]
        parents += [above, above]
        path.append(len(nodes) - 1)
    scores = [-0.5 * node for node in range(len(nodes))]
    bonus = tokens[-1] if tokens else None
    return DraftTree(nodes, parents, scores, path, bonus, steps=SPEC_STEPS, seconds=0.01 * (sequence.cycles - 1))


def build(step_seconds: float = 0.0) -> FakeEngine:
    return FakeEngine(step_seconds)


def build_but_fail_second(marks: str) -> FakeEngine:
    """The second attempt fails; each leaves a file in `marks`."""
    attempts = len(os.listdir(marks)) + 1
    Path(marks, str(attempts)).touch()
    if attempts == 2:
        raise OSError("the disk is away")
    return FakeEngine()


def build_with_bad_configuration() -> FakeEngine:
    raise ValueError("config.json: no such\n  architecture")


def build_with_bug() -> FakeEngine:
    raise RuntimeError("a bug")


def serve(function: str = "build", module: str = "tests.api.fake_engine") -> None:
    """The real server around an engine: `python -c 'from tests.api.fake_engine import serve; serve()' FLAGS`."""
    from eagle_server.__main__ import run
    from eagle_server.config import parse_args
    from eagle_server.engine.process import EngineFactory

    sys.exit(run(parse_args(sys.argv[1:]), EngineFactory(module, function)))
