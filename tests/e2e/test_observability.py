"""The demo's metrics agree with its responses, and every dashboard panel works with a real Prometheus."""

from __future__ import annotations

import json
import math
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import PROMPTS, REPOSITORY, Served
from tests.support.prometheus import BINARY, scraping

DASHBOARD = REPOSITORY / "docker" / "grafana" / "dashboards" / "eagle_server.json"
COUNTED = {
    "vllm:prompt_tokens_total": ("usage", "prompt_tokens"),
    "vllm:generation_tokens_total": ("usage", "completion_tokens"),
    "vllm:prefix_cache_queries_total": ("usage", "prompt_tokens"),
    "vllm:prefix_cache_hits_total": ("usage", "prompt_tokens_details", "cached_tokens"),
    "vllm:spec_decode_num_drafts_total": ("metrics", "speculative_decoding", "num_spec_steps"),
    "vllm:spec_decode_num_draft_tokens_total": ("metrics", "speculative_decoding", "num_draft_tokens"),
    "vllm:spec_decode_num_accepted_tokens_total": ("metrics", "speculative_decoding", "num_accepted_draft_tokens"),
    "eagle_server_accept_length_count": ("metrics", "speculative_decoding", "num_spec_steps"),
}


def scrape(url: str) -> dict[str, float]:
    """Metric values by name and labels, without the labels model_name and engine."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name not in ("model_name", "engine")]
            found["|".join([sample.name, *labels])] = sample.value
    return found


def complete(url: str, **body: object) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()
    assert "usage" in answer, answer
    return answer


def at(answer: dict[str, Any], path: tuple[str, ...]) -> float:
    value: Any = answer
    for name in path:
        value = value[name]
    return float(value)


@pytest.mark.slow
def test_counters_equal_the_sums_over_the_responses(served: Served) -> None:
    before = scrape(served.url)
    bodies = [
        {"prompt": PROMPTS[number % 3], "max_tokens": 8 + 5 * number, "temperature": number % 2, "seed": number}
        for number in range(8)
    ]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda body: complete(served.url, **body), bodies))
    after = scrape(served.url)

    def gained(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    for name, path in COUNTED.items():
        assert gained(name) == sum(at(answer, path) for answer in answers) > 0, name
    details = [answer["usage"]["completion_tokens_details"] for answer in answers]
    accepted, drafted = (gained(f"vllm:spec_decode_num_{kind}_tokens_total") for kind in ("accepted", "draft"))
    assert accepted == sum(each["accepted_prediction_tokens"] for each in details)
    assert drafted - accepted == sum(each["rejected_prediction_tokens"] for each in details)
    for position in range(3):
        histograms = [answer["metrics"]["speculative_decoding"]["acceptance_histogram"] for answer in answers]
        reached = sum(sum(histogram[position + 1 :]) for histogram in histograms)
        assert gained(f"vllm:spec_decode_num_accepted_tokens_per_pos_total|{position}") == reached
    reasons = [answer["choices"][0]["finish_reason"] for answer in answers]
    for reason in ("stop", "length"):
        assert gained(f"vllm:request_success_total|{reason}") == reasons.count(reason)
    assert gained("vllm:e2e_request_latency_seconds_count") == len(answers)
    assert gained("vllm:request_params_max_tokens_sum") == sum(int(body["max_tokens"]) for body in bodies)
    cycles = gained("eagle_server_batch_size_count")
    stages = ("extend", "propose", "build_tree", "verify", "accept", "keep")
    ran = {stage: gained(f"eagle_server_stage_seconds_count|{stage}") for stage in stages}
    assert ran["verify"] == ran["accept"] == cycles
    assert ran["propose"] == ran["build_tree"], "both are of cycles that draft"
    assert cycles / 2 < min(ran.values()) <= max(ran.values()) == cycles, ran
    assert after["eagle_server_engine_process_resident_memory_bytes"] > 0


def expressions() -> list[tuple[str, str]]:
    """(panel, expression) of the dashboard. Grafana's variables are replaced by values."""
    found = []
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$model_name", ".*").replace("$__rate_interval", "60s")
            found.append((f"{panel['title']} {target['refId']}", expression))
    return found


@pytest.mark.slow
@pytest.mark.skipif(BINARY is None, reason="there is no prometheus (Debian: apt-get install prometheus)")
def test_every_panel_of_the_dashboard_shows_something_under_load(served: Served, tmp_path: Path) -> None:
    assert len(expressions()) > 40
    done = threading.Event()

    def load(number: int) -> None:
        while not done.is_set():
            complete(served.url, prompt=PROMPTS[number % len(PROMPTS)], max_tokens=12, temperature=0.7)

    config = REPOSITORY / "docker" / "prometheus.yml"
    with scraping(served.url.removeprefix("http://"), tmp_path, config) as prometheus, ThreadPoolExecutor(2) as pool:
        clients = [pool.submit(load, number) for number in range(2)]
        try:
            prometheus.until(
                "rate(vllm:request_success_total[60s]) > 0 and on() vllm:generation_tokens_total offset 5s"
            )
            problems = []
            for panel, expression in expressions():
                values = [float(series["value"][1]) for series in prometheus.query(expression)]
                if not values or any(math.isnan(value) for value in values):
                    problems.append(f"{panel}: {expression}: {values}")
        finally:
            done.set()
        for client in clients:
            client.result()
    assert not problems, "\n".join(problems)


def test_alert_rules_are_about_metrics_that_the_server_has(served: Served) -> None:
    complete(served.url, prompt=PROMPTS[0], max_tokens=2)
    assert httpx.get(f"{served.url}/nothing").status_code == 404
    known = {name.partition("|")[0] for name in scrape(served.url)}
    (group,) = yaml.safe_load((REPOSITORY / "docker" / "alerts.yml").read_text())["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) > 4
    used = {name for rule in group["rules"] for name in re.findall(r"(?:vllm:|eagle_server_)\w+", rule["expr"])}
    assert len(used) > 4 and used <= known
    assert "alerts.yml" in yaml.safe_load((REPOSITORY / "docker" / "prometheus.yml").read_text())["rule_files"]
