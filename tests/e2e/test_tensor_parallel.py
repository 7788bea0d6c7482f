"""The demo's server with its target split over two processes, which talk by gloo."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import FIXED_TREES, PROMPTS, README_FLAGS, Served, demo_engine, serving

FLAGS = (*README_FLAGS, *FIXED_TREES, "--dtype", "float32")
SETTINGS: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 0.8, "seed": 3})
LONG = {"prompt": "def fibonacci(n):\n", "max_tokens": 900, "ignore_eos": True, "stream": True}
PATIENCE = 60


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("ranks") / "log", *FLAGS, "--tp-size", "2") as up:
        yield up


def texts(up: Served) -> list[str]:
    bodies = [{"prompt": prompt, "max_tokens": 32, **setting} for prompt in PROMPTS[:2] for setting in SETTINGS]
    answers = [httpx.post(f"{up.url}/v1/completions", json=body, timeout=PATIENCE).json() for body in bodies]
    return [answer["choices"][0]["text"] for answer in answers]


def rank_pids(up: Served) -> list[int]:
    children = Path(f"/proc/{up.process.pid}/task/{up.process.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def engine(up: Served) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{up.url}/v1/server_info", timeout=PATIENCE).json()["engine"]
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The texts of one process."""
    with serving(tmp_path_factory.mktemp("one") / "log", *FLAGS) as one:
        return texts(one)


def test_two_processes_give_the_texts_of_one(two_ranks: Served, expected: list[str]) -> None:
    assert texts(two_ranks) == expected
    assert len(rank_pids(two_ranks)) == 2


def test_a_client_that_goes_away_frees_its_kv(two_ranks: Served, expected: list[str]) -> None:
    with httpx.stream("POST", f"{two_ranks.url}/v1/completions", json=LONG, timeout=PATIENCE) as response:
        assert response.status_code == 200
        next(response.iter_lines())
    deadline = time.monotonic() + PATIENCE
    while engine(two_ranks)["running"]:
        assert time.monotonic() < deadline, "the request still runs"
        time.sleep(0.02)
    after = engine(two_ranks)
    assert after["kv_slots_free"] + after["kv_slots_cached"] >= after["kv_slots_total"]
    assert texts(two_ranks) == expected


@pytest.mark.parametrize("number", [1, pytest.param(0, marks=pytest.mark.deep)])
def test_a_killed_rank_is_one_clear_error_and_a_restart(two_ranks: Served, expected: list[str], number: int) -> None:
    before = rank_pids(two_ranks)
    with httpx.stream("POST", f"{two_ranks.url}/v1/completions", json=LONG, timeout=PATIENCE) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(before[number], signal.SIGKILL)
        assert any('"error"' in line and "the engine died" in line for line in lines)
    deadline = time.monotonic() + PATIENCE
    while httpx.get(f"{two_ranks.url}/health", timeout=PATIENCE).status_code != 200:
        assert time.monotonic() < deadline, "the engine did not come back"
        time.sleep(0.1)
    assert not set(rank_pids(two_ranks)) & set(before)
    assert texts(two_ranks) == expected
    log = two_ranks.log.read_text()
    reason = "rank 1: exit status -9" if number else "exit status -9"
    assert f"the engine died: {reason}; starting it again" in log
    assert "Traceback" not in log


def test_an_engine_in_this_process_has_one_rank() -> None:
    with pytest.raises(ValueError, match="--tp-size 2: only the server starts the processes that this needs"):
        demo_engine("--tp-size", "2")
