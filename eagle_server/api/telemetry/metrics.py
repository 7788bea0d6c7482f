"""What is measured when: from cycles and ends of requests to metric families."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from eagle_server.api.telemetry.calls import Call, Generation
from eagle_server.api.telemetry.families import Families
from eagle_server.api.telemetry.summary import kv_cache_usage
from eagle_server.request import CycleStats, EngineStats, FinishReason, Ready

ANSWERED = (FinishReason.STOP, FinishReason.LENGTH)


class Metrics:
    """A registry of its own, so that several servers may live in one process. What counts, counts across restarts.

    Most families appear when the engine is up for the first time, since their buckets depend on what it serves.
    """

    def __init__(self, model_name: str, stats: Callable[[], EngineStats | None]) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._stats = stats
        self._families: Families | None = None
        self._engine_pid: int | None = None
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        # A pid that nobody has makes it collect nothing.
        ProcessCollector(
            namespace="eagle_server_engine", pid=lambda: self._engine_pid or "none", registry=self.registry
        )

    def attached(self, ready: Ready) -> None:
        self._engine_pid = ready.pid
        if self._families is not None:
            self._families.engine_restarts.inc()
            return
        self._families = Families(self.registry, self._model_name, ready)
        self._families.running.set_function(lambda: self._state(lambda stats: stats.running))
        self._families.waiting.set_function(lambda: self._state(lambda stats: stats.waiting))
        self._families.kv_cache_usage.set_function(lambda: self._state(kv_cache_usage))

    def _state(self, value: Callable[[EngineStats], float]) -> float:
        stats = self._stats()
        return 0.0 if stats is None else value(stats)

    def cycle(self, cycle: CycleStats, generated: int) -> None:
        """A cycle ended in which the engine generated so many tokens."""
        families = self._running_families
        families.prompt_tokens.inc(cycle.prompt_tokens)
        families.generation_tokens.inc(generated)
        families.prefix_cache_queries.inc(cycle.cache_queries)
        families.prefix_cache_hits.inc(cycle.cache_hits)
        families.preemptions.inc(cycle.preemptions)
        families.iteration_tokens.observe(cycle.computed + generated)
        families.cycle_seconds.observe(cycle.seconds)
        for stage, seconds in cycle.stage_seconds.items():
            families.stage(stage).observe(seconds)
        if cycle.verified:
            families.batch_size.observe(len(cycle.verified))
        for drafted, _ in cycle.verified:
            families.tree_nodes.observe(drafted + 1)
        accepted = [accepted for drafted, accepted in cycle.verified if drafted]
        if accepted:
            families.draft_tokens.inc(sum(drafted for drafted, _ in cycle.verified))
            self._accept(accepted)

    def _accept(self, accepted: list[int]) -> None:
        """As many trees were drafted, of which so many tokens were accepted."""
        families = self._running_families
        families.drafts.inc(len(accepted))
        families.accepted_tokens.inc(sum(accepted))
        for position in range(max(accepted)):
            families.accepted_at(position).inc(sum(length > position for length in accepted))
        for length in accepted:
            families.accept_length.observe(length + 1)

    def first_token(self, seconds: float) -> None:
        """A request's first token came so long after its submission."""
        self._running_families.time_to_first_token.observe(seconds)

    def next_tokens(self, seconds: float) -> None:
        """Further tokens of a request came so long after those before."""
        self._running_families.inter_token_latency.observe(seconds)

    def finished(self, generation: Generation) -> None:
        """Nobody waits for a request any more."""
        families = self._running_families
        families.finished(generation.reason).inc()
        if generation.reason not in ANSWERED or generation.ended is None:
            return
        request, tokens = generation.request, generation.answer_tokens
        families.request_prompt_tokens.observe(len(request.prompt_token_ids))
        families.request_generation_tokens.observe(tokens)
        families.params_max_tokens.observe(request.sampling.max_tokens)
        if generation.n is not None:
            families.params_n.observe(generation.n)
        families.e2e_latency.observe(generation.ended - generation.submitted)
        timing = generation.last.timing if generation.last is not None else None
        if timing is None:
            return
        families.queue_time.observe(timing.queue)
        families.prefill_time.observe(timing.prefill)
        families.decode_time.observe(timing.decode)
        families.inference_time.observe(timing.prefill + timing.decode)
        if generation.tokens > 1:
            families.time_per_output_token.observe(timing.decode / (generation.tokens - 1))

    def answered(self, call: Call) -> None:
        """A call that reached the engine has ended now."""
        reasons = {each.reason for each in call.generations}
        if reasons <= set(ANSWERED):
            self._running_families.api_seconds.observe(call.own_seconds(time.monotonic()))

    @property
    def _running_families(self) -> Families:
        assert self._families is not None  # there are no requests before there is an engine
        return self._families
