"""lm-eval's OpenAI API models, on small tasks: the scores are the same with and without speculation."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import FIXED_TREES, README_FLAGS, REPOSITORY, Served, serving

ONE_THREAD = ("--cpu-threads", "1")  # two servers and lm-eval share the machine with other tests
RUNS = REPOSITORY / "tests" / "support" / "lm_eval_runs.py"

pytestmark = [
    pytest.mark.third_party,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None, reason="needs lm-eval: pip install -e '.[lm-eval]'"
    ),
]


@pytest.fixture
def drafting(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "drafting.log", *ONE_THREAD, *README_FLAGS, *FIXED_TREES) as up:
        yield up


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "plain.log", *ONE_THREAD, "--speculative-algorithm", "NONE") as up:
        yield up


def completions(server: Served) -> dict[str, Any]:
    """Arguments of a run. lm-eval finds the server's tokenizer by itself."""
    return {
        "model": "local-completions",
        "model_args": f"model=demo,base_url={server.url}/v1/completions,max_length=1024",
        "tasks": ["lines", "lines_sampled", "choices", "text"],
    }


def chats(server: Served, **more: Any) -> dict[str, Any]:
    return {
        "model": "local-chat-completions",
        "model_args": f"model=demo,base_url={server.url}/v1/chat/completions",
        "tasks": ["lines_sampled"],
        "apply_chat_template": True,
        "limit": 3,
        **more,
    }


def evaluate(directory: Path, *runs: dict[str, Any]) -> list[dict[str, Any]]:
    offline = {"HF_HOME": str(directory), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(RUNS), str(directory / "outcome.json")],
        input=json.dumps(runs),
        cwd=REPOSITORY,
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "API request failed" not in done.stderr, done.stderr  # lm-eval tries again after an error
    outcome: list[dict[str, Any]] = json.loads((directory / "outcome.json").read_text())
    return outcome


def accepted_drafts(server: Served) -> float:
    found = re.search(
        r"^vllm:spec_decode_num_accepted_tokens_total\{.*\} (.*)$",
        httpx.get(f"{server.url}/metrics").text,
        re.MULTILINE,
    )
    return float(found[1]) if found else 0.0


def test_scores_and_answers_are_those_of_plain_decoding(drafting: Served, plain: Served, tmp_path: Path) -> None:
    before = accepted_drafts(drafting)
    fast, slow, chatted, speculation_disabled = evaluate(
        tmp_path,
        completions(drafting),
        completions(plain),
        chats(drafting),
        chats(drafting, gen_kwargs={"speculative": False}),
    )
    assert accepted_drafts(drafting) > before
    assert accepted_drafts(plain) == 0
    assert fast == slow
    assert chatted == speculation_disabled

    # The answers above are not trivially equal: some are wrong, and sampled answers differ from greedy ones.
    assert fast["samples"]["lines"] != fast["samples"]["lines_sampled"]
    assert chatted["samples"]["lines_sampled"] != fast["samples"]["lines_sampled"][:3]
    scores = fast["results"]
    assert 0 < scores["lines"]["exact_match,first-line"] < 1
    assert 0 < scores["choices"]["acc,none"] < 1
    assert 1 < scores["text"]["byte_perplexity,none"] < 8
