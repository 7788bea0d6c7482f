"""Clients that people use, unmodified, against the demo. docs/clients.md says which versions."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.install import SCRIPTS, dependencies
from tests.e2e.conftest import README_FLAGS, REPOSITORY, Served, serving
from tests.e2e.test_tool_calls import TEMPLATE

CLIENTS = os.environ.get("TEST_CLIENTS")  # the folder that tests/clients/install.py was given
PAGE = (REPOSITORY / "docs" / "clients.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.third_party


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("clients")
    (directory / "template.jinja").write_text(TEMPLATE)
    flags = ("--chat-template", str(directory / "template.jinja"), *README_FLAGS)
    with serving(directory / "log", *flags) as up:
        yield up


def result_of(client: str, url: str, script: str = "", *arguments: object) -> dict[str, Any]:
    """What a script of tests/clients prints, run in its client's environment. Skips the test if that is not there."""
    if CLIENTS is None or not Path(CLIENTS, client).is_dir():
        pytest.skip("needs its client: tests/clients/install.py FOLDER, then TEST_CLIENTS=FOLDER")
    file = REPOSITORY / "tests" / "clients" / f"{script or client}.py"
    command = [f"{CLIENTS}/{client}/bin/python", str(file), url, *map(str, arguments)]
    ours = {"PYTHONPATH", "HF_HUB_OFFLINE"}  # AIPerf reads no local tokenizer when it is offline
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert f"=={result['version']}" in dependencies(REPOSITORY / "tests" / "clients" / f"{client}.py")[0]
    return result


def plain_completion(server: Served) -> str:
    body = {"prompt": "def fibonacci(n):\n", "max_tokens": 24, "temperature": 0}
    return str(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"])


def plain_chat(server: Served) -> str:
    body = {"messages": [{"role": "user", "content": "Write a function"}], "max_tokens": 24, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    return str(answer["choices"][0]["message"]["content"])


def is_entry(value: dict[str, Any]) -> bool:
    return set(value) == {"name", "size"} and len(value["name"]) <= 12 and 0 <= value["size"] <= 999


@pytest.mark.slow
def test_langchain_openai(server: Served) -> None:
    result = result_of("langchain_openai_client", server.url)
    assert result["completion"] == "".join(result["completion_stream"]) == plain_completion(server)
    assert result["chat"] == "".join(result["chat_stream"]) == plain_chat(server)
    assert len([piece for piece in result["chat_stream"] if piece]) > 1
    [[name, arguments]] = result["tool_calls"]
    assert name == "add" and set(arguments) == {"a", "b"}
    assert is_entry(result["entry"])
    assert is_entry(result["entry_by_schema"])


@pytest.mark.slow
def test_litellm(server: Served) -> None:
    result = result_of("litellm_client", server.url)
    assert result["completion"] == "".join(result["completion_stream"]) == plain_completion(server)
    assert result["chat"] == "".join(result["chat_stream"]) == result["chat_by_vllm_provider"] == plain_chat(server)
    assert len([piece for piece in result["chat_stream"] if piece]) > 1
    [[name, arguments]] = result["tool_calls"]
    assert name == "add" and set(arguments) == {"a", "b"}


@pytest.mark.slow
def test_pydantic_ai(server: Served) -> None:
    result = result_of("pydantic_ai_client", server.url)
    assert result["chat"] == "".join(result["chat_stream"]) == plain_chat(server)
    assert len(result["chat_stream"]) > 1
    assert is_entry(result["entry"])
    assert is_entry(result["entry_by_schema"])


@pytest.mark.slow
@pytest.mark.long
def test_aiperf(server: Served) -> None:
    result = result_of("aiperf_client", server.url)
    for endpoint in ("chat", "completions"):
        measured = result[endpoint]
        assert measured["request_count"] == 12
        assert measured["error_request_count"] == 0
        assert measured["output_sequence_length"] == pytest.approx(24, abs=0.5)  # it tokenizes the text again
        assert measured["time_to_first_token"] > 0


def test_the_page_has_the_versions_that_are_tested() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text()
    pinned = [dependencies(script)[0] for script in SCRIPTS] + re.findall(r'"(lm-eval\[api\]==[^"]+)"', project)
    assert len(pinned) == 5
    for requirement in pinned:
        name, _, version = re.sub(r"\[.*\]", "", requirement).partition("==")
        assert re.search(rf"^\| {name} \| {re.escape(version)} \|", PAGE, re.MULTILINE), requirement
