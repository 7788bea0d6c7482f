"""The engine: schedule, run, commit."""

from __future__ import annotations

import time
from collections import defaultdict

from eagle_server.engine.refusals import refusal
from eagle_server.plan import Sampling
from eagle_server.request import CycleStats, EngineStats, FinishReason, Flushed, Ready, Request, TokenDelta
from eagle_server.scheduling.scheduler import Scheduler
from eagle_server.speculation.random import request_key
from eagle_server.worker.worker import Worker


class Engine:
    """Requests in, token deltas out, one cycle per `step`."""

    def __init__(self, scheduler: Scheduler, worker: Worker, ready: Ready) -> None:
        self.scheduler, self.worker = scheduler, worker
        self._ready = ready
        self._outbox: list[TokenDelta] = []
        self._stages: defaultdict[str, float] = defaultdict(float)
        self._cycle: CycleStats | None = None

    def ready(self) -> Ready:
        """What this engine serves."""
        return self._ready

    def add(self, request: Request) -> None:
        """Queue a request. One that can never be served gets its error with the next `step`."""
        reason = self.scheduler.refusal(request) or refusal(request, self._ready.vocab_size)
        if reason is not None:
            error = TokenDelta(
                request_id=request.request_id, token_ids=[], finish_reason=FinishReason.REFUSED, error=reason
            )
            self._outbox.append(error)
            return
        params = request.sampling
        ends = () if params.ignore_eos else self._ready.eos_token_ids
        # A checkpoint's config may name an end of sequence beyond its vocabulary; it can never be drawn.
        stop_ids = frozenset(i for i in (*ends, *params.stop_token_ids) if 0 <= i < self._ready.vocab_size)
        sampling = Sampling(
            key=request_key(params.seed, request.choice),
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            forbidden=tuple(sorted(stop_ids)) if params.min_tokens else (),
            allowed_from=len(request.prompt_token_ids) + params.min_tokens,
            logprobs=params.logprobs,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            logit_bias=params.logit_bias,
            allowed_token_ids=params.allowed_token_ids,
            bad_words=params.bad_words,
            prompt_length=len(request.prompt_token_ids),
        )
        self.scheduler.add(request, sampling, stop_ids)

    def abort(self, request_id: str) -> None:
        """End a request and free its KV; an unknown id is ignored."""
        delta = self.scheduler.abort(request_id)
        if delta is not None:
            self._outbox.append(delta)

    def has_work(self) -> bool:
        return bool(self._outbox) or self.scheduler.has_work()

    def step(self) -> list[TokenDelta]:
        """One cycle."""
        deltas, self._outbox = self._outbox, []
        if self.scheduler.has_work():
            began = time.perf_counter()
            plan = self.scheduler.schedule()
            result = self.worker.run(plan)
            deltas.extend(self.scheduler.commit(result))
            for stage, seconds in result.stage_seconds.items():
                self._stages[stage] += seconds
            self._cycle = self.scheduler.cycle
            self._cycle.stage_seconds = result.stage_seconds
            self._cycle.seconds = time.perf_counter() - began
        return deltas

    def take_cycle(self) -> CycleStats | None:
        """What the cycle did that was run since the last call."""
        cycle, self._cycle = self._cycle, None
        return cycle

    def stats(self) -> EngineStats:
        """Load, KV use and totals since start."""
        kv, totals = self.scheduler.kv, self.scheduler.totals
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_slots_total=kv.allocator.num_pages * kv.page_size,
            kv_slots_free=kv.available_pages * kv.page_size,
            kv_slots_cached=(kv.radix.cached_pages if kv.radix else 0) * kv.page_size,
            cycles=totals.cycles,
            generated_tokens=totals.generated,
            drafted_tokens=totals.drafted,
            accepted_tokens=totals.accepted,
            preemptions=totals.preemptions,
            stage_seconds=dict(self._stages),
        )

    def flush_cache(self) -> Flushed:
        """Drop the prefix cache, unless there are requests."""
        scheduler = self.scheduler
        if scheduler.has_work():
            return Flushed(running=len(scheduler.running), waiting=len(scheduler.waiting))
        free = scheduler.kv.allocator.free_pages
        scheduler.kv.clear()
        return Flushed(freed_slots=(scheduler.kv.allocator.free_pages - free) * scheduler.kv.page_size)

    def check(self) -> None:
        """Assert that no KV page is lost or held twice."""
        self.scheduler.kv.check()
