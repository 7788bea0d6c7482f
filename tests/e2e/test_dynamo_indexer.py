"""Dynamo's own indexer of KV events follows the demo's server: `pip install --no-deps ai-dynamo-runtime uvloop`."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import PROMPTS, Served, free_port, serving
from tests.e2e.test_kv_events import BLOCK, PATIENCE, complete, enabled, kill_engine

pytestmark = [
    pytest.mark.third_party,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("dynamo") is None, reason="needs ai-dynamo-runtime"),
]


@contextmanager
def indexing(log: Path) -> Iterator[httpx.Client]:
    """Dynamo's standalone indexer."""
    port = free_port()
    with log.open("wb") as sink:
        command = [sys.executable, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
        process = subprocess.Popen(command, stdout=sink, stderr=sink)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            deadline = time.monotonic() + PATIENCE
            while time.monotonic() < deadline:
                assert process.poll() is None, log.read_text()
                try:
                    client.get("/health")
                    break
                except httpx.TransportError:
                    time.sleep(0.1)
            yield client
    finally:
        process.kill()
        process.wait()


def indexed(indexer: httpx.Client, up: Served, prompt: str) -> int:
    """How many tokens of a prompt the indexer finds on the server."""
    tokens = httpx.post(f"{up.url}/tokenize", json={"prompt": prompt}).json()["tokens"]
    answer = indexer.post("/query", json={"token_ids": tokens, "model_name": "demo"})
    assert answer.status_code == 200, answer.text
    return int(answer.json()["scores"].get("1", {}).get("0", 0))


def until_indexed(indexer: httpx.Client, up: Served, prompt: str, *, found: bool) -> None:
    deadline = time.monotonic() + PATIENCE
    while (indexed(indexer, up, prompt) > 0) is not found:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_dynamos_indexer_predicts_cached_tokens_also_after_the_engine_was_killed(tmp_path: Path) -> None:
    events, replay = f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
    with (
        serving(tmp_path / "log", *enabled(events, replay), "--max-total-tokens", "1200") as up,
        indexing(tmp_path / "indexer") as indexer,
    ):
        complete(up, PROMPTS[0], 4)  # the indexer gets this one with a replay
        worker = {"instance_id": 1, "endpoint": events, "replay_endpoint": replay}
        indexer.post("/register", json={**worker, "model_name": "demo", "block_size": BLOCK}).raise_for_status()
        time.sleep(1)  # until it has subscribed
        for prompt in PROMPTS[1:6]:
            complete(up, prompt, 20)
        until_indexed(indexer, up, PROMPTS[5], found=True)
        for prompt in PROMPTS[:6]:
            score = indexed(indexer, up, prompt)
            cached = complete(up, prompt, 1)["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert score - 1 <= cached < score + BLOCK
            assert score > 0
        assert httpx.post(f"{up.url}/flush_cache").status_code == 200
        until_indexed(indexer, up, PROMPTS[5], found=False)
        complete(up, PROMPTS[0], 1)
        until_indexed(indexer, up, PROMPTS[0], found=True)
        kill_engine(up)
        complete(up, PROMPTS[1], 1)
        deadline = time.monotonic() + PATIENCE
        while not indexed(indexer, up, PROMPTS[1]):
            assert time.monotonic() < deadline
            complete(up, f"{time.monotonic()} {PROMPTS[2]}", 1)  # it sees a gap at an event after it has reconnected
            complete(up, PROMPTS[1], 1)  # and this is not evicted
        assert indexed(indexer, up, PROMPTS[0]) == 0, "what the killed engine had cached is forgotten"
