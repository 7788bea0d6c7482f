"""The engine: each step schedules a cycle, runs it and commits its result."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from eagle_server.plan import RequestSampling
from eagle_server.request import (
    CycleStats,
    EngineStats,
    FinishReason,
    Flushed,
    GrammarError,
    Ready,
    Request,
    SamplingParams,
    SpeculationState,
    TokenDelta,
)
from eagle_server.scheduling.scheduler import Scheduler
from eagle_server.speculation.random import request_key
from eagle_server.worker.warm_up import warm_up_mixed
from eagle_server.worker.worker import Worker, do_nothing

if TYPE_CHECKING:
    from eagle_server.engine.grammars.grammars import CompiledGrammar, Grammars
    from eagle_server.engine.kv_events import KVEventPublisher

NO_END_OF_SEQUENCE = "grammar: this engine cannot follow one: the model names no end of sequence"
_COMPILE_WAIT = 0.01  # seconds to wait for a grammar before the engine reads its messages again
_STATE_EVERY = 1.0  # seconds
_MASK_WAIT = 0.002  # seconds, the same for a token mask


class Engine:
    """Takes requests and returns token deltas. Each `step` runs one cycle."""

    def __init__(
        self,
        scheduler: Scheduler,
        worker: Worker,
        ready: Ready,
        grammars: Grammars | None = None,
        publisher: KVEventPublisher | None = None,
        cores: AbstractContextManager[None] | None = None,
    ) -> None:
        """`cores` is entered for every cycle."""
        self.scheduler, self.worker = scheduler, worker
        self._cores = cores or nullcontext()
        self._ready, self._grammars, self._publisher = ready, grammars, publisher
        self._compiling: dict[str, tuple[Request, Future[CompiledGrammar]]] = {}
        self._outbox: list[TokenDelta] = []
        self._measured_cycles = 0
        self._stages: defaultdict[str, float] = defaultdict(float)
        self._cycle: CycleStats | None = None
        self._state_due = 0.0
        self._publish()

    def ready(self) -> Ready:
        """The model and limits of this engine."""
        return self._ready

    def preload(self) -> None:
        """Start to load, on a thread, what grammars need. Otherwise the first request with a grammar waits for it."""
        if self._grammars is not None:
            self._grammars.preload()

    @property
    def lacks_graphs(self) -> bool:
        """Whether mixed forwards were launched eagerly because no graph held them."""
        return bool(self.worker.uncaptured)

    def capture_graph(self) -> None:
        """Capture a graph for one of them. No request may run."""
        with self._cores:
            uncaptured = self.worker.uncaptured
            warm_up_mixed(self.worker, *uncaptured.pop(next(iter(uncaptured))))

    def add(self, request: Request) -> None:
        """Queue a request. If it can never be served, the next `step` returns its error."""
        stop_ids = self._stop_ids(request.sampling)
        reason = self.scheduler.refusal(request) or _refusal(request, self._ready.vocab_size, stop_ids)
        grammar = request.sampling.grammar
        if reason is None and grammar is not None and self._grammars is None:
            reason = NO_END_OF_SEQUENCE
        if reason is not None:
            self._refuse(request, reason)
        elif grammar is None or self._grammars is None:
            self._queue(request)
        else:
            future = self._grammars.compile(grammar, request.cache_salt, request.client)
            self._compiling[request.request_id] = (request, future)
            if future.done():
                self._end_compiling(request.request_id)

    def _queue_compiled(self, timeout: float = 0.0) -> None:
        """Queue the requests whose grammars are compiled. Wait at most `timeout` seconds for the first of them."""
        wait([future for _, future in self._compiling.values()], timeout, FIRST_COMPLETED)
        for name in [name for name, (_, future) in self._compiling.items() if future.done()]:
            self._end_compiling(name)

    def _end_compiling(self, request_id: str) -> None:
        request, future = self._compiling.pop(request_id)
        error = future.exception()
        if error is None:
            self._queue(request, future.result())
        else:
            self._refuse(request, error)

    def _refuse(self, request: Request, reason: str | BaseException) -> None:
        """End a request. Its client must change it, unless the reason is an exception of the server's own."""
        delta = TokenDelta(request_id=request.request_id, token_ids=[], error=str(reason))
        is_own = isinstance(reason, BaseException) and not isinstance(reason, GrammarError)
        delta.finish_reason = FinishReason.ERROR if is_own else FinishReason.REFUSED
        delta.param = reason.param if isinstance(reason, GrammarError) else None
        self._outbox.append(delta)

    def _queue(self, request: Request, compiled: CompiledGrammar | None = None) -> None:
        params, prompt_length = request.sampling, len(request.prompt_token_ids)
        stop_ids = self._stop_ids(params)
        grammar_matcher = None if compiled is None else compiled.matcher(prompt_length, stop_ids)
        if grammar_matcher is not None:
            grammar_matcher.is_ready(request.prompt_token_ids)  # starts the first mask, beside the prefill
        sampling = RequestSampling(
            params,
            key=request_key(params.seed, request.choice),
            prompt_length=prompt_length,
            stop_ids=tuple(sorted(stop_ids)) if params.min_tokens else (),
        )
        self.scheduler.add(request, sampling, stop_ids, grammar_matcher)

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """The tokens that end the request, end of sequence included."""
        ends = () if params.ignore_eos else self._ready.eos_token_ids
        # A checkpoint's config may name an end of sequence outside the vocabulary. That token can never be drawn.
        return frozenset(i for i in (*ends, *params.stop_token_ids) if 0 <= i < self._ready.vocab_size)

    def abort(self, request_id: str) -> None:
        """End a request and free its KV. An unknown id is ignored."""
        delta = self.scheduler.abort(request_id)
        if (waiting := self._compiling.pop(request_id, None)) is not None:
            request, future = waiting
            grammar = request.sampling.grammar
            if grammar and self._grammars and not any(other is future for _, other in self._compiling.values()):
                self._grammars.cancel(grammar, request.cache_salt)
            delta = TokenDelta(request_id=request_id, token_ids=[], finish_reason=FinishReason.ABORT)
        if delta is not None:
            self._outbox.append(delta)

    def has_work(self) -> bool:
        return bool(self._outbox or self._compiling) or self.scheduler.has_work()

    @property
    def overlaps(self) -> bool:
        """Whether the device computes while the host works, so that `step` has time for other things."""
        return self.worker.overlaps

    def step(self, meanwhile: Callable[[], None] = do_nothing) -> list[TokenDelta]:
        """Run one cycle. If there is nothing to run, wait a short time for a grammar to be compiled.

        `meanwhile` is called once: while the device computes, or before.
        """
        if self._compiling:
            self._queue_compiled(0.0 if self._outbox or self.scheduler.has_work() else _COMPILE_WAIT)
        deltas, self._outbox = self._outbox, []
        if not self.scheduler.has_work():
            meanwhile()
        else:
            began = time.perf_counter()
            plan = self.scheduler.schedule()
            if plan.is_empty:  # every running request waits for its grammar's mask
                meanwhile()
                time.sleep(_MASK_WAIT)
                return deltas
            guided = sum(decode.grammar_matcher is not None for decode in plan.decodes)
            if guided and self._grammars is not None:
                self._grammars.budget.share(guided)
            with self._cores:
                result = self.worker.run(plan, meanwhile)
            deltas.extend(self.scheduler.commit(result))
            self._measured_cycles += bool(result.stage_seconds)
            for stage, seconds in result.stage_seconds.items():
                self._stages[stage] += seconds
            self._cycle = self.scheduler.cycle
            self._cycle.stage_seconds, self._cycle.rows = result.stage_seconds, result.rows
            self._cycle.steps, self._cycle.drafting = result.steps, result.drafting
            self._cycle.expected, self._cycle.predicted_seconds = result.expected, result.predicted_seconds
            self._cycle.seconds = time.perf_counter() - began
        self._publish()
        return deltas

    def catch_up(self) -> None:
        """Do the work that the last step's deltas do not need. If this is not called, the next step does it."""
        with self._cores:
            self.worker.read_prompts()

    def _publish(self) -> None:
        """Publish what entered and left the prefix cache."""
        if self._publisher is not None and (events := self.scheduler.kv.take_events()):
            self._publisher.publish(events)

    def take_cycle(self) -> CycleStats | None:
        """Statistics of the newest cycle; None if no cycle ran since the last call."""
        cycle, self._cycle = self._cycle, None
        return cycle

    def stats(self) -> EngineStats:
        """Load, KV use, and totals since the start."""
        kv, totals, first_drafts = self.scheduler.kv, self.scheduler.totals, self.worker.drafting.first_drafts
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.queue.since) + len(self._compiling),
            waiting_clients=self.scheduler.queue.waiting_clients,
            longest_wait=self.scheduler.queue.longest_wait,
            kv_slots_total=kv.allocator.num_pages * kv.page_size,
            kv_slots_free=kv.available_pages * kv.page_size,
            kv_slots_cached=(kv.radix.cached_pages if kv.radix else 0) * kv.page_size,
            cycles=totals.cycles,
            generated_tokens=totals.generated,
            drafted_tokens=totals.drafted,
            accepted_tokens=totals.accepted,
            preemptions=totals.preemptions,
            measured_cycles=self._measured_cycles,
            stage_seconds=dict(self._stages),
            speculation=self._speculation(),
            draft_warning=None if first_drafts is None else first_drafts.warning,
        )

    def _speculation(self) -> SpeculationState | None:
        """The budget's state, at most once in _STATE_EVERY seconds while there is work."""
        now = time.monotonic()
        if now < self._state_due and self.has_work():
            return None
        self._state_due = now + _STATE_EVERY
        return self.worker.drafting.budget.state()

    def flush_cache(self) -> Flushed:
        """Drop the prefix cache. Does nothing if requests are running or waiting."""
        scheduler = self.scheduler
        if scheduler.has_work() or self._compiling:
            waiting = len(scheduler.queue.since) + len(self._compiling)
            return Flushed(running=len(scheduler.running), waiting=waiting)
        free = scheduler.kv.allocator.free_pages
        scheduler.kv.clear()
        self._publish()
        return Flushed(freed_slots=(scheduler.kv.allocator.free_pages - free) * scheduler.kv.page_size)

    def check(self) -> None:
        """Assert by counters that no KV page is lost."""
        self.scheduler.kv.check_counts()


def _refusal(request: Request, vocab_size: int, stop_ids: Collection[int]) -> str | None:
    """The first reason why a request can never be served; None if there is none. `stop_ids` are in the vocabulary."""
    params = request.sampling
    named: dict[str, Sequence[int]] = {
        "token": request.prompt_token_ids,
        "logit_bias": [token for token, _ in params.logit_bias],
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words": [token for word in params.bad_words for token in word],
    }
    outside = (_outside(name, tokens, vocab_size) for name, tokens in named.items())
    problem = next((reason for reason in (*outside, *params.problems()) if reason is not None), None)
    return problem or _contradiction(params, vocab_size, stop_ids)


def _outside(name: str, tokens: Sequence[int], vocab_size: int) -> str | None:
    if not tokens or (min(tokens) >= 0 and max(tokens) < vocab_size):
        return None
    wrong = next(token for token in tokens if not 0 <= token < vocab_size)
    where = "token id" if name == "token" else f"{name}: token id"
    return f"{where} {wrong} is outside the vocabulary of {vocab_size}"


def _contradiction(params: SamplingParams, vocab_size: int, stop_ids: Collection[int]) -> str | None:
    """Why no token may be the first, whatever the prompt. Bad words of several tokens depend on the text."""
    forbidden = {word[0] for word in params.bad_words if len(word) == 1}
    if params.min_tokens:
        forbidden.update(stop_ids)
    if params.allowed_token_ids is None:
        return "bad_words and min_tokens together forbid every token" if len(forbidden) >= vocab_size else None
    if forbidden.issuperset(params.allowed_token_ids):
        return "allowed_token_ids: bad_words and min_tokens forbid every one of them"
    return None
