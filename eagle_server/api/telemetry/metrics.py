"""Follows every engine request from submission to end, and updates the metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from functools import cached_property

from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter, GCCollector, PlatformCollector, ProcessCollector

from eagle_server.api.telemetry.metric_definitions import MetricDefinitions
from eagle_server.api.telemetry.request_record import EngineRequestRecord, RequestRecord, current_request
from eagle_server.api.telemetry.summary import Summary, kv_cache_usage
from eagle_server.client.observer import Observer
from eagle_server.request import CycleStats, Deltas, EngineStats, FinishReason, Ready, Request, TokenDelta

METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS"})
ANSWERED = (FinishReason.STOP, FinishReason.LENGTH)


class ServerMetrics(Observer):
    """Metrics with their own registry, so that one process may run several servers. Counters survive engine restarts.

    Most metrics appear when the engine is up for the first time, because their buckets depend on what it serves.
    """

    def __init__(self, model_name: str, stats: Callable[[], EngineStats | None], summary: Summary) -> None:
        """`summary` gets the same cycles."""
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._stats = stats
        self._summary = summary
        self._records: dict[str, EngineRequestRecord] = {}
        self._definitions: MetricDefinitions | None = None
        self._engine_pid: int | None = None
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        # With an invalid pid it collects nothing.
        ProcessCollector(
            namespace="eagle_server_engine", pid=lambda: self._engine_pid or "none", registry=self.registry
        )

    @cached_property
    def _responses(self) -> Counter:
        """Created with its first sample, as is the next one: some routers fail at a metric without samples."""
        return Counter(
            "eagle_server_http_responses",
            "Answers of the API, those of limits and refusals included, by path (other: one that does not exist).",
            ("path", "method", "status"),
            registry=self.registry,
        )

    @cached_property
    def _key_tokens(self) -> Counter:
        return Counter(
            "eagle_server_api_key_tokens",
            "Tokens of prompts and answers by the name of the API key.",
            ("key", "kind"),
            registry=self.registry,
        )

    # --- The engine client's events. ---

    def attached(self, ready: Ready) -> None:
        self._engine_pid = ready.pid
        if self._definitions is not None:
            return
        self._definitions = MetricDefinitions(self.registry, self._model_name, ready)
        self._definitions.running.set_function(lambda: self._state(lambda stats: stats.running))
        self._definitions.waiting.set_function(lambda: self._state(lambda stats: stats.waiting))
        self._definitions.waiting_clients.set_function(lambda: self._state(lambda stats: stats.waiting_clients))
        self._definitions.longest_wait.set_function(lambda: self._state(lambda stats: stats.longest_wait))
        self._definitions.kv_cache_usage.set_function(lambda: self._state(kv_cache_usage))
        self._definitions.draft_warning.set_function(lambda: self._state(lambda stats: stats.draft_warning is not None))

    def detached(self) -> None:
        if self._definitions is not None:
            self._definitions.engine_restarts.inc()  # of those too that end before they are ready
        for record in self._records.values():
            record.engine_died = True

    def submitted(self, requests: Sequence[Request]) -> None:
        http_request = current_request.get()
        # the choices of one prompt share its list of tokens
        prompts = {id(request.prompt_token_ids) for request in requests}
        n = len(requests) // max(len(prompts), 1)
        for request in requests:
            prompt = id(request.prompt_token_ids)
            record = EngineRequestRecord(request, n if prompt in prompts else None)
            prompts.discard(prompt)
            self._records[request.request_id] = record
            if http_request is not None:
                http_request.engine_requests.append(record)

    def dispatched(self, message: Deltas) -> None:
        now = time.monotonic()
        generated = 0
        for delta in message.deltas:
            generated += len(delta.token_ids)
            record = self._records.get(delta.request_id)
            if record is not None:
                self._advance(record, delta, now)
        if message.cycle is not None:
            self._cycle(message.cycle, generated)
            self._summary.cycle(message.cycle, generated, message.stats, now)

    def completed(self, request_id: str, kept: int) -> None:
        if request_id in self._records:
            self._records[request_id].kept = kept

    def left(self, requests: Sequence[Request]) -> None:
        for request in requests:
            record = self._records.pop(request.request_id, None)
            if record is not None:
                self._finished(record)

    # --- Updates. ---

    def _state(self, value: Callable[[EngineStats], float]) -> float:
        stats = self._stats()
        return 0.0 if stats is None else value(stats)

    def _advance(self, record: EngineRequestRecord, delta: TokenDelta, now: float) -> None:
        if delta.token_ids:
            if record.newest_token is None:
                record.first_token = now
                self._defined.time_to_first_token.observe(now - record.began)
            else:
                self._defined.inter_token_latency.observe(now - record.newest_token)
            record.newest_token = now
            record.tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            # Keep nothing that takes memory: the record stays until the HTTP request ends.
            record.last, record.ended = replace(delta, logprobs=None, prompt_logprobs=None, tree=None), now

    def _cycle(self, cycle: CycleStats, generated: int) -> None:
        """A cycle ended in which the engine generated `generated` tokens."""
        metrics = self._defined
        metrics.prompt_tokens.inc(cycle.prompt_tokens)
        metrics.generation_tokens.inc(generated)
        metrics.prefix_cache_queries.inc(cycle.cache_queries)
        metrics.prefix_cache_hits.inc(cycle.cache_hits)
        metrics.preemptions.inc(cycle.preemptions)
        metrics.iteration_tokens.observe(cycle.computed + generated)
        metrics.cycle_seconds.observe(cycle.seconds)
        for stage, seconds in cycle.stage_seconds.items():
            metrics.stage(stage).observe(seconds)
        if cycle.verified:
            metrics.batch_size.observe(len(cycle.verified))
            self._budget(cycle)
        for drafted, _ in cycle.verified:
            metrics.tree_nodes.observe(drafted + 1)
        accepted = [accepted for drafted, accepted in cycle.verified if drafted]
        if accepted:
            metrics.draft_tokens.inc(sum(drafted for drafted, _ in cycle.verified))
            self._accept(accepted)

    def _budget(self, cycle: CycleStats) -> None:
        """Count the budget's choice for a cycle with decodes, and the quality of its estimates."""
        metrics = self._defined
        metrics.draft_steps.observe(cycle.steps)
        metrics.drafting_requests.observe(cycle.drafting)
        metrics.verified_rows.inc(cycle.rows)
        metrics.expected_accepted_tokens.inc(cycle.expected)
        if cycle.predicted_seconds and not cycle.computed:
            metrics.prediction_ratio.observe(cycle.seconds / cycle.predicted_seconds)

    def _accept(self, accepted: list[int]) -> None:
        """`accepted` has the number of accepted tokens of each drafted tree."""
        metrics = self._defined
        metrics.drafts.inc(len(accepted))
        metrics.accepted_tokens.inc(sum(accepted))
        for position in range(max(accepted)):
            metrics.accepted_at(position).inc(sum(length > position for length in accepted))
        for length in accepted:
            metrics.accept_length.observe(length + 1)

    def _finished(self, record: EngineRequestRecord) -> None:
        """An engine request has ended."""
        metrics = self._defined
        metrics.finished(record.reason).inc()
        if record.reason not in ANSWERED or record.ended is None:
            return
        request, tokens = record.request, record.answer_tokens
        metrics.request_prompt_tokens.observe(len(request.prompt_token_ids))
        metrics.request_generation_tokens.observe(tokens)
        metrics.params_max_tokens.observe(request.sampling.max_tokens)
        if record.n is not None:
            metrics.params_n.observe(record.n)
        metrics.e2e_latency.observe(record.ended - record.began)
        timing = record.last.timing if record.last is not None else None
        if timing is None:
            return
        metrics.queue_time.observe(timing.queue)
        metrics.prefill_time.observe(timing.prefill)
        metrics.decode_time.observe(timing.decode)
        metrics.inference_time.observe(timing.prefill + timing.decode)
        if record.tokens > 1:
            metrics.time_per_output_token.observe(timing.decode / (record.tokens - 1))

    # --- The events of HTTP. ---

    def malformed(self) -> None:
        """What came is no HTTP request, and was answered with 400."""
        self._responses.labels("other", "other", "400").inc()

    def responded(self, paths: Collection[str], record: RequestRecord) -> None:
        """An HTTP request has ended. Paths that are not among `paths`, and other methods, have one label each."""
        path = record.path if record.path in paths else "other"
        method = record.method if record.method in METHODS else "other"
        self._responses.labels(path, method, str(int(record.status))).inc()
        if record.key and record.engine_requests:
            self._key_tokens.labels(record.key, "prompt").inc(record.prompt_tokens)
            self._key_tokens.labels(record.key, "answer").inc(record.output_tokens)

    def answered(self, record: RequestRecord) -> None:
        """An HTTP request that reached the engine has ended now."""
        reasons = {request.reason for request in record.engine_requests}
        if reasons <= set(ANSWERED):
            self._defined.api_seconds.observe(record.api_seconds(time.monotonic()))

    @property
    def _defined(self) -> MetricDefinitions:
        assert self._definitions is not None  # requests need an engine, which defines the metrics when it attaches
        return self._definitions
