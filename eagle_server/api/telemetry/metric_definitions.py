"""Names, types, labels and buckets of all metrics.

Metrics with the prefix `vllm:` have the name, type, labels and buckets of vLLM's V1 engine, so that its dashboards and
autoscalers work here. docs/observability.md says where a meaning differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import count, takewhile

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from eagle_server.request import FinishReason, Ready

LABELS = ("model_name", "engine")
ENGINE = "0"  # there is only one engine

FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
API_SECONDS = (0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICES = (1, 2, 5, 10, 20)
CYCLE_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
NODES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
PREDICTION_RATIOS = (0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.25, 1.5, 2, 4)


class MetricDefinitions:
    """Every metric, bound to its labels. A metric with one more label has a method instead of an attribute."""

    def __init__(self, registry: CollectorRegistry, model_name: str, ready: Ready) -> None:
        self._registry = registry
        self._labels = (model_name, ENGINE)
        self._add_state(ready)
        self._add_counters(ready)
        self._add_requests(ready)
        self._add_cycles(ready)

    def _add_state(self, ready: Ready) -> None:
        self.running = self._gauge("vllm:num_requests_running", "Requests being prefilled or decoded.")
        self.waiting = self._gauge("vllm:num_requests_waiting", "Sequences waiting to be prepared or scheduled.")
        self.waiting_clients = self._gauge(
            "eagle_server_waiting_clients", "Clients with requests that wait; they take turns."
        )
        self.longest_wait = self._gauge(
            "eagle_server_longest_wait_seconds", "Time for which the request that waits longest has waited by now."
        )
        self.kv_cache_usage = self._gauge("vllm:kv_cache_usage_perc", "Share of the KV cache that is in use, 0 to 1.")
        self.draft_warning = self._gauge(
            "eagle_server_draft_warning", "1 if hardly any first draft of 200 greedy trees was accepted, else 0."
        )
        cache = ready.resolved.get("cache", {})
        block_size, slots = cache.get("block_size", 1), cache.get("max_total_tokens") or 0
        values = {
            "block_size": block_size,
            "cache_dtype": ready.resolved.get("model", {}).get("dtype", "auto"),
            "enable_prefix_caching": not cache.get("disable_radix_cache", False),
            "num_gpu_blocks": slots // block_size,
        }
        info = Gauge(
            "vllm:cache_config_info",
            "How the KV cache is configured; its blocks are those of KV events. Always 1.",
            (*LABELS, *values),
            registry=self._registry,
        )
        info.labels(*self._labels, *values.values()).set(1)

    def _add_counters(self, ready: Ready) -> None:
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Tokens of prompts that have been prefilled.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens that the engine generated.")
        self.prefix_cache_queries = self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache."
        )
        self.prefix_cache_hits = self._counter(
            "vllm:prefix_cache_hits", "Prompt tokens that were found in the prefix cache."
        )
        self.preemptions = self._counter("vllm:num_preemptions", "Preempted requests.")
        self._success = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            (*LABELS, "finished_reason"),
            registry=self._registry,
        )
        for reason in FinishReason:
            self.finished(reason)
        self.drafts = self._counter("vllm:spec_decode_num_drafts", "Draft trees that were verified.")
        self.draft_tokens = self._counter(
            "vllm:spec_decode_num_draft_tokens", "Nodes of verified draft trees, without the roots."
        )
        self.accepted_tokens = self._counter(
            "vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted."
        )
        self._accepted = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by their depth in the tree, from 0.",
            (*LABELS, "position"),
            registry=self._registry,
        )
        for position in range(ready.num_steps):
            self.accepted_at(position)
        self.verified_rows = self._counter("eagle_server_verified_rows", "Rows of the verify forwards.")
        self.expected_accepted_tokens = self._counter(
            "eagle_server_expected_accepted_tokens", "Estimated number of drafted tokens that would be accepted."
        )
        self.engine_restarts = self._counter("eagle_server_engine_restarts", "Restarts of the engine process.")

    def _add_requests(self, ready: Ready) -> None:
        sizes = one_two_five(ready.context_length)
        self.request_prompt_tokens = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", sizes)
        self.request_generation_tokens = self._histogram(
            "vllm:request_generation_tokens", "Tokens of a request's answer.", sizes
        )
        self.params_n = self._histogram("vllm:request_params_n", "The parameter n.", CHOICES)
        self.params_max_tokens = self._histogram("vllm:request_params_max_tokens", "The parameter max_tokens.", sizes)
        self.time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From the HTTP header to the first token.", FIRST_TOKEN_SECONDS
        )
        self.inter_token_latency = self._histogram(
            "vllm:inter_token_latency_seconds",
            "Time between successive cycles with tokens of a request.",
            TOKEN_SECONDS,
        )
        self.time_per_output_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Decoding time per token after the first.", TOKEN_SECONDS
        )
        self.e2e_latency = self._seconds("e2e_request_latency", "From the HTTP header to the last token.")
        self.api_seconds = self._histogram(
            "eagle_server_api_seconds",
            "Time of a request in the API: before its submission to the engine and after its last token.",
            API_SECONDS,
        )
        self.queue_time = self._seconds("request_queue_time", "From the HTTP header to the first scheduling.")
        self.prefill_time = self._seconds(
            "request_prefill_time", "From the first scheduling until the prompt was prefilled."
        )
        self.decode_time = self._seconds(
            "request_decode_time", "From the end of the prefill to the end of the request."
        )
        self.inference_time = self._seconds(
            "request_inference_time", "From the first scheduling to the end of the request."
        )

    def _add_cycles(self, ready: Ready) -> None:
        self.iteration_tokens = self._histogram(
            "vllm:iteration_tokens_total", "Prompt tokens computed and tokens generated in a cycle.", ITERATION_TOKENS
        )
        self.cycle_seconds = self._histogram("eagle_server_cycle_seconds", "Time of a cycle.", CYCLE_SECONDS)
        self._bound_stages: dict[str, Histogram] = {}
        self.batch_size = self._histogram("eagle_server_batch_size", "Requests decoded in a cycle.", BATCH_SIZES)
        self.tree_nodes = self._histogram(
            "eagle_server_tree_nodes", "Nodes of a request's tree in a cycle, with the root.", NODES
        )
        self.draft_steps = self._histogram(
            "eagle_server_draft_steps",
            "Draft steps of a cycle with decodes; 0 if none drafted.",
            range(ready.num_steps + 1),
        )
        self.drafting_requests = self._histogram(
            "eagle_server_drafting_requests", "Requests that drafted in a cycle with decodes.", (0, *BATCH_SIZES)
        )
        self.prediction_ratio = self._histogram(
            "eagle_server_cycle_prediction_ratio",
            "Time of a cycle without prefill over the cost model's prediction.",
            PREDICTION_RATIOS,
        )
        lengths = range(1, ready.num_steps + 2)
        self.accept_length = self._histogram(
            "eagle_server_accept_length",
            "Tokens from a draft tree in a cycle, with the bonus token.",
            lengths,
        )

    @cached_property
    def _stages(self) -> Histogram:
        """Registered at the first stage: a router that merges workers' metrics fails at a metric without samples."""
        return Histogram(
            "eagle_server_stage_seconds",
            "Time of a cycle's stage; on a GPU by its events, in one cycle of 16.",
            (*LABELS, "stage"),
            buckets=CYCLE_SECONDS,
            registry=self._registry,
        )

    def finished(self, reason: FinishReason) -> Counter:
        return self._success.labels(*self._labels, reason.value)

    def accepted_at(self, position: int) -> Counter:
        return self._accepted.labels(*self._labels, str(position))

    def stage(self, name: str) -> Histogram:
        if name not in self._bound_stages:  # labels() is slow, and this runs several times per cycle
            self._bound_stages[name] = self._stages.labels(*self._labels, name)
        return self._bound_stages[name]

    def _gauge(self, name: str, wording: str) -> Gauge:
        return Gauge(name, wording, LABELS, registry=self._registry).labels(*self._labels)

    def _counter(self, name: str, wording: str) -> Counter:
        return Counter(name, wording, LABELS, registry=self._registry).labels(*self._labels)

    def _histogram(self, name: str, wording: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, wording, LABELS, buckets=buckets, registry=self._registry).labels(*self._labels)

    def _seconds(self, name: str, wording: str) -> Histogram:
        return self._histogram(f"vllm:{name}_seconds", wording, REQUEST_SECONDS)


def one_two_five(limit: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, ... up to `limit`."""
    return list(takewhile(lambda value: value <= limit, _one_two_five()))


def _one_two_five() -> Iterator[int]:
    for exponent in count():
        yield from (mantissa * 10**exponent for mantissa in (1, 2, 5))
