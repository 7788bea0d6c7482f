"""GET /metrics over the fake engine: names, exact counts, and the counts after a restart."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from eagle_server.api.generation import generate
from eagle_server.api.telemetry import exposition
from eagle_server.api.telemetry.metric_definitions import one_two_five
from eagle_server.client.client import EngineClient
from eagle_server.config import Config, parse_args
from tests.api.conftest import LocalEngine, http_client
from tests.api.fake_engine import (
    BREAK,
    DRAFTED_PER_CYCLE,
    EOS,
    EXPECTED_PER_CYCLE,
    PLAIN,
    REFUSE,
    SLOW,
    SPEC_STEPS,
    STALL,
    FakeEngine,
)

VLLM = {
    "gauge": ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"],
    "counter": [
        "prefix_cache_queries",
        "prefix_cache_hits",
        "num_preemptions",
        "prompt_tokens",
        "generation_tokens",
        "request_success",
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
    ],
    "histogram": [
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_params_n",
        "request_params_max_tokens",
        "iteration_tokens_total",
    ],
}
OURS = {
    "gauge": ["waiting_clients", "longest_wait_seconds"],
    "histogram": [
        "api_seconds",
        "accept_length",
        "stage_seconds",
        "cycle_seconds",
        "cycle_prediction_ratio",
        "batch_size",
        "tree_nodes",
        "draft_steps",
        "drafting_requests",
    ],
    "counter": ["engine_restarts", "verified_rows", "expected_accepted_tokens"],
}
Samples = dict[str, float]


async def scrape(http: httpx.AsyncClient) -> Samples:
    """All samples except buckets, by name and the labels other than model_name and engine."""
    found: Samples = {}
    for family in parse_text((await http.get("/metrics")).text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            if "le" not in labels:
                found[sample.name + "".join(f"|{value}" for value in labels.values())] = sample.value
    return found


async def complete(http: httpx.AsyncClient, **body: object) -> dict[str, object]:
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, object] = response.json()
    return answer


async def test_an_idle_server_names_no_metric_without_samples(http: httpx.AsyncClient) -> None:
    """sglang-router refuses to merge such a metric with that of a busy worker."""
    empty = [family.name for family in parse_text((await http.get("/metrics")).text) if not family.samples]
    assert empty == []


async def test_a_flood_of_scrapes_shares_pages_and_gets_no_old_one(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, make = list[exposition.Encode](), exposition.Pages._make

    def counted(pages: exposition.Pages, encode: exposition.Encode) -> bytes:
        made.append(encode)
        return make(pages, encode)

    monkeypatch.setattr(exposition.Pages, "_make", counted)
    monkeypatch.setattr(exposition, "time", SimpleNamespace(monotonic=lambda: 1.0))  # all come at the same time
    await http.get("/metrics")
    scrapes = [asyncio.create_task(http.get("/metrics")) for _ in range(50)]
    assert len({(await each).text for each in scrapes}) == 1
    assert made == [made[0]] * 2
    await http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert len(made) == 3 and made[2] != made[0], "another format is another page"
    await complete(http, prompt="abc", max_tokens=7)
    assert (await scrape(http))["vllm:generation_tokens_total"] == 7


async def test_names_types_and_labels_are_vllms(http: httpx.AsyncClient) -> None:
    await complete(http, prompt="abc", max_tokens=9)
    families = {family.name: family for family in parse_text((await http.get("/metrics")).text)}
    for prefix, types in (("vllm:", VLLM), ("eagle_server_", OURS)):
        for kind, names in types.items():
            for name in names:
                family = families[prefix + name]
                assert family.type == kind, name
                for sample in family.samples:
                    assert (sample.labels["model_name"], sample.labels["engine"]) == ("fake", "0"), name
    assert "process_resident_memory_bytes" in families


async def test_openmetrics_where_the_client_prefers_it(http: httpx.AsyncClient) -> None:
    await complete(http, prompt="abc", max_tokens=9)
    plain = await http.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3"
    response = await http.get("/metrics", headers={"accept": accept})
    assert response.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    names = {family.name for family in parse_openmetrics(response.text)}
    assert {"vllm:generation_tokens", "eagle_server_accept_length"} <= names


async def test_who_waits_and_for_how_long_is_the_engines_word(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.waiting_clients, engine.longest_wait = 3, 12.5
    await complete(http, prompt="abc", max_tokens=9)
    found = await scrape(http)
    assert (found["eagle_server_waiting_clients"], found["eagle_server_longest_wait_seconds"]) == (3, 12.5)


async def test_who_is_being_prepared_waits_from_the_header_on(
    http: httpx.AsyncClient, engine_client: EngineClient
) -> None:
    with engine_client.prepare("a", 3, time.monotonic() - 100):
        found = await scrape(http)
    assert (found["vllm:num_requests_waiting"], found["eagle_server_waiting_clients"]) == (3, 1)
    assert found["eagle_server_longest_wait_seconds"] >= 100


async def test_latencies_begin_with_the_header(
    http: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.monotonic() - 100
    monkeypatch.setattr(generate, "began", lambda: began)
    await complete(http, prompt="abc", max_tokens=9)
    found = await scrape(http)
    assert engine.requests[-1].began == began, "the engine's times begin there, too"
    for name in ("time_to_first_token", "e2e_request_latency"):
        assert found[f"vllm:{name}_seconds_sum"] >= 100


async def test_a_draft_that_is_never_accepted_is_a_gauge_and_a_reason(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    for warning in (None, "only 0 % of the first drafts were accepted"):
        engine.draft_warning = warning
        await complete(http, prompt="abc", max_tokens=3)
        assert (await scrape(http))["eagle_server_draft_warning"] == (warning is not None)
        assert (await http.get("/v1/server_info")).json()["engine"]["draft_warning"] == warning


async def test_counts_are_those_of_the_answers(http: httpx.AsyncClient) -> None:
    bodies = [{"prompt": "abcdefgh" * count, "max_tokens": 5 + 7 * count, "seed": count} for count in range(1, 6)]
    answers = await asyncio.gather(*(complete(http, **body) for body in bodies))
    found = await scrape(http)

    usages = [answer["usage"] for answer in answers]
    specs = [answer["metrics"]["speculative_decoding"] for answer in answers]
    assert found["vllm:prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages)
    assert found["vllm:generation_tokens_total"] == sum(usage["completion_tokens"] for usage in usages)
    assert found["vllm:prefix_cache_queries_total"] == sum(usage["prompt_tokens"] for usage in usages)
    assert found["vllm:prefix_cache_hits_total"] == sum(
        usage["prompt_tokens_details"]["cached_tokens"] for usage in usages
    )
    drafts, accepted = "num_spec_steps", "num_accepted_draft_tokens"
    assert found["vllm:spec_decode_num_drafts_total"] == sum(spec[drafts] for spec in specs)
    assert found["vllm:spec_decode_num_draft_tokens_total"] == sum(spec["num_draft_tokens"] for spec in specs)
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == sum(spec[accepted] for spec in specs)
    for position in range(SPEC_STEPS):
        reached = sum(sum(spec["acceptance_histogram"][position + 1 :]) for spec in specs)
        assert found[f"vllm:spec_decode_num_accepted_tokens_per_pos_total|{position}"] == reached
    assert found["eagle_server_accept_length_count"] == sum(spec[drafts] for spec in specs)
    assert found["eagle_server_accept_length_sum"] == sum(spec[drafts] + spec[accepted] for spec in specs)
    assert found["vllm:request_success_total|length"] == 5
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_time_per_output_token"):
        assert found[f"vllm:{name}_seconds_count"] == 5
    assert found["vllm:request_queue_time_seconds_sum"] == 5 * 0.25
    assert found["vllm:request_inference_time_seconds_sum"] == 5 * 1.5
    assert found["vllm:request_params_max_tokens_sum"] == sum(body["max_tokens"] for body in bodies)
    assert found["vllm:request_generation_tokens_sum"] == found["vllm:generation_tokens_total"]


async def test_the_budget_of_cycles_is_counted_beside_what_came_of_it(http: httpx.AsyncClient) -> None:
    answers = [
        await complete(http, prompt="abcdefgh", max_tokens=20, seed=1),
        await complete(http, prompt=f"abcdefgh{PLAIN}", max_tokens=20, seed=1),
    ]
    found = await scrape(http)
    drafts = answers[0]["metrics"]["speculative_decoding"]["num_spec_steps"]
    cycles = found["eagle_server_batch_size_count"]
    assert found["eagle_server_draft_steps_count"] == found["eagle_server_drafting_requests_count"] == cycles > drafts
    assert found["eagle_server_draft_steps_sum"] == SPEC_STEPS * drafts
    assert found["eagle_server_drafting_requests_sum"] == found["vllm:spec_decode_num_drafts_total"] == drafts
    assert found["eagle_server_verified_rows_total"] == DRAFTED_PER_CYCLE * drafts + cycles
    assert found["eagle_server_verified_rows_total"] == found["eagle_server_tree_nodes_sum"]
    assert found["eagle_server_expected_accepted_tokens_total"] == EXPECTED_PER_CYCLE * drafts
    assert found["eagle_server_cycle_prediction_ratio_count"] == cycles  # one request at a time: none prefills
    assert found["eagle_server_cycle_prediction_ratio_sum"] == pytest.approx(1.25 * cycles)


async def test_the_apis_own_time_is_a_part_of_an_answers(http: httpx.AsyncClient) -> None:
    start = time.perf_counter()
    await complete(http, prompt=["abc", SLOW], n=2, max_tokens=4)
    elapsed = time.perf_counter() - start
    await http.post("/v1/completions", json={"prompt": f"ab{BREAK}", "max_tokens": 20})
    found = await scrape(http)
    assert found["eagle_server_api_seconds_count"] == 1
    assert 0 < found["eagle_server_api_seconds_sum"] < elapsed - 0.1  # the engine took at least 0.1 s


async def test_a_stop_string_ends_a_request_with_stop_and_its_answers_tokens(http: httpx.AsyncClient) -> None:
    answer = await complete(http, prompt="abcdefghij", max_tokens=200, stop=["c"], seed=3)
    found = await scrape(http)
    assert answer["usage"]["completion_tokens"] == 3
    assert found["vllm:request_success_total|stop"] == 1
    assert found["vllm:request_generation_tokens_sum"] == 3
    assert found["vllm:generation_tokens_total"] >= 3


async def test_n_counts_once_per_prompt(http: httpx.AsyncClient) -> None:
    await complete(http, prompt=["abc", "defg"], n=3, max_tokens=4)
    found = await scrape(http)
    assert (found["vllm:request_params_n_count"], found["vllm:request_params_n_sum"]) == (2, 6)
    assert found["vllm:request_success_total|length"] == 6


@pytest.mark.parametrize(("prompt", "reason"), [(f"a{EOS}", "stop"), (REFUSE, "refused"), (f"ab{BREAK}", "error")])
async def test_every_request_ends_with_one_reason(http: httpx.AsyncClient, prompt: str, reason: str) -> None:
    await http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 20})
    found = {name: value for name, value in (await scrape(http)).items() if name.startswith("vllm:request_success_to")}
    assert found[f"vllm:request_success_total|{reason}"] == 1
    assert sum(found.values()) == 1


async def test_a_client_that_leaves_is_an_abort_without_latencies(
    http: httpx.AsyncClient, engine_client: EngineClient
) -> None:
    call = asyncio.create_task(http.post("/v1/completions", json={"prompt": STALL, "max_tokens": 20}))
    while engine_client.stats is None or not engine_client.stats.running:
        await asyncio.sleep(0.001)
    assert (await scrape(http))["vllm:num_requests_running"] == 1
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    found = await scrape(http)
    assert found["vllm:request_success_total|abort"] == 1
    assert found["vllm:e2e_request_latency_seconds_count"] == 0


async def test_a_restart_is_counted_and_no_counter_goes_back(
    config: Config, engine_client: EngineClient, tokenizer_dir: Path
) -> None:
    async with http_client(config, engine_client, tokenizer_dir) as http:
        for life in (1, 2):
            task = asyncio.create_task(LocalEngine(FakeEngine(), engine_client).run())
            await engine_client.until_available()
            await complete(http, prompt="abc", max_tokens=9)
            stalled = asyncio.create_task(http.post("/v1/completions", json={"prompt": STALL, "max_tokens": 20}))
            while not engine_client.stats.running:
                await asyncio.sleep(0.001)
            task.cancel()
            engine_client.detach("the engine died")
            assert (await stalled).status_code == 503
            found = await scrape(http)
            assert found["vllm:generation_tokens_total"] == 9 * life
            assert found["vllm:request_success_total|length"] == life
            assert found["vllm:request_success_total|error"] == life
            assert found["eagle_server_engine_restarts_total"] == 2 * life - 1
            engine_client.detach("the next one does not start")
            assert found["vllm:num_requests_running"] == 0


async def test_metrics_need_no_key_and_servers_count_for_themselves(
    tokenizer_dir: Path, http: httpx.AsyncClient
) -> None:
    await complete(http, prompt="abc", max_tokens=9)
    locked = parse_args(["--model-path", str(tokenizer_dir), "--api-key", "key"], environ={})
    async with http_client(locked, EngineClient(), tokenizer_dir) as other:
        response = await other.get("/metrics")
        assert response.status_code == 200
        assert "vllm:" not in response.text  # the engine is not up yet


def test_buckets_of_sizes_end_at_the_limit() -> None:
    assert one_two_five(2048) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]
    assert one_two_five(50) == [1, 2, 5, 10, 20, 50]
