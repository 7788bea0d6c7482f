"""A router's view, from events alone, of the demo's prefix cache: in this process, and of a server that is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from eagle_server.worker.worker import do_nothing
from tests.e2e.conftest import PROMPTS, Served, demo_engine, free_port, serving
from tests.support.engines import admit_without_reserve, request, run
from tests.support.kv_events import KVEventSubscriber, MirroredBlocks, cached_prefixes

BLOCK = 16
PATIENCE = 120.0  # seconds; other tests share the cores


def enabled(endpoint: str, replay_endpoint: str) -> tuple[str, str]:
    events = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": replay_endpoint}
    return "--kv-events-config", json.dumps(events)


@pytest.mark.parametrize("page", [pytest.param("1", marks=pytest.mark.deep), "16"])
def test_the_view_is_the_tree_after_evictions_preemptions_and_flushes(page: str, tmp_path: Path) -> None:
    endpoints = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    engine = demo_engine(*enabled(*endpoints), "--page-size", page, "--max-total-tokens", "480", "--cpu-threads", "1")
    admit_without_reserve(engine.scheduler)
    radix, publisher = engine.scheduler.kv.radix, engine._publisher
    assert radix is not None
    assert publisher is not None
    with closing(publisher), closing(KVEventSubscriber(*endpoints)) as subscriber:
        agreed = 0

        def agrees(_: int = 0) -> None:
            nonlocal agreed
            subscriber.follow(0.0)
            agreed += subscriber.mirror.prefixes() == cached_prefixes(radix, BLOCK)

        subscriber.replay()
        subscriber.follow()
        prompts = [[*range(40 * (number % 4), 40 * (number % 4) + 60), number] for number in range(12)]
        salts = (None, "a")
        requests = [
            request(number, prompt, max_tokens=60, ignore_eos=True, cache_salt=salts[number % 3 == 0])
            for number, prompt in enumerate(prompts)
        ]
        run(engine, requests, each_cycle=agrees)
        assert engine.stats().preemptions > 0
        subscriber.follow()
        assert subscriber.mirror.prefixes() == cached_prefixes(radix, BLOCK) != set()
        assert agreed > 10, "also while requests run"
        assert engine.flush_cache().is_done
        subscriber.follow()
        assert subscriber.mirror.blocks == {}


def told(mirror: MirroredBlocks, tokens: list[int]) -> int:
    """How many tokens of a prompt the view says are cached."""
    prefixes = mirror.prefixes()
    ends = [end for end in range(BLOCK, len(tokens) + 1, BLOCK) if (None, tuple(tokens[:end])) in prefixes]
    return max(ends, default=0)


def complete(up: Served, prompt: str, max_tokens: int) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
    answer = httpx.post(f"{up.url}/v1/completions", json=body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def kill_engine(up: Served, meanwhile: Callable[[], None] = do_nothing) -> None:
    """Kill the engine process, and wait until another one serves."""
    children = Path(f"/proc/{up.process.pid}/task/{up.process.pid}/children").read_text().split()
    (engine,) = [int(each) for each in children if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()]
    os.kill(engine, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    for status in (503, 200):
        while httpx.get(f"{up.url}/health").status_code != status:
            assert time.monotonic() < deadline
            meanwhile()
            time.sleep(0.02)


def check_predictions(up: Served, subscriber: KVEventSubscriber) -> int:
    """Every prompt finds the blocks of the view, or a page less at the end. Returns how many tokens were found."""
    found = 0
    for prompt in PROMPTS[:6]:
        tokens = httpx.post(f"{up.url}/tokenize", json={"prompt": prompt}).json()["tokens"]
        subscriber.follow()
        expected = told(subscriber.mirror, tokens)
        cached = complete(up, prompt, 1)["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert expected - 1 <= cached < expected + BLOCK
        found += cached
    return found


@pytest.mark.deep
def test_a_router_predicts_cached_tokens_also_after_the_engine_was_killed(tmp_path: Path) -> None:
    endpoints = f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
    with (
        serving(tmp_path / "log", *enabled(*endpoints), "--max-total-tokens", "1200") as up,
        closing(KVEventSubscriber(*endpoints)) as subscriber,
    ):
        subscriber.replay()
        gauges = httpx.get(f"{up.url}/metrics").text
        assert re.search(r'^vllm:cache_config_info{block_size="16",.*num_gpu_blocks="75"} 1', gauges, re.MULTILINE)
        for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
            assert f"vllm:{name}{{" in gauges
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda prompt: complete(up, prompt, 40), PROMPTS * 2))
        complete(up, PROMPTS[0], 1)  # the others may have been evicted
        assert check_predictions(up, subscriber) > 0
        before = subscriber.next
        kill_engine(up, lambda: subscriber.follow(0.1))  # ZeroMQ subscribes again only in a call
        subscriber.replay()  # as a router does for a server that comes back
        assert subscriber.next is not None
        assert before is not None
        assert subscriber.next > before
        assert subscriber.mirror.blocks == {}
        complete(up, PROMPTS[0], 1)
        assert check_predictions(up, subscriber) > 0
        assert httpx.post(f"{up.url}/flush_cache").status_code == 200
        subscriber.follow()
        assert subscriber.mirror.blocks == {}
