"""The scripts in examples/ run as their docstrings say, against the README's server."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import httpx
import pytest

from tests.e2e.conftest import REPOSITORY, Served

pytestmark = pytest.mark.slow  # a server, and processes that import the OpenAI client

EXAMPLES = sorted((REPOSITORY / "examples").glob("*.py"))


def output(name: str, url: str, *arguments: str) -> str:
    """The output of an example."""
    command = [sys.executable, str(REPOSITORY / "examples" / name), "--url", f"{url}/v1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_openai_client(served: Served) -> None:
    shown = output("openai_client.py", served.url)
    assert shown.startswith("model: demo\n\nanswer:\ndef fibonacci(n):\n")
    assert "tokens: 10 in the prompt, 48 generated" in shown
    length = re.search(r"speculation: (\d\.\d\d) tokens per forward pass", shown)
    assert length is not None
    assert float(length[1]) > 1
    events = re.search(r"stream: (\d+) events, same text: True", shown)
    assert events is not None
    assert 1 < int(events[1]) < 48  # a cycle that accepts drafts sends several tokens in one event
    assert shown.endswith("without speculation, same text: True\n")


def test_stream_with_trees(served: Served) -> None:
    shown = output("stream_with_trees.py", served.url, "--max-tokens", "16")
    cycles = re.findall(r"^cycle \d+: (\d+) drafted, (\d+) accepted\n((?:  .*\n)+)", shown, re.MULTILINE)
    assert len(cycles) >= 2
    for drafted, accepted, lines in cycles:
        root, *nodes = [line for line in lines.splitlines() if not line.startswith("  + ")]
        assert root.endswith("(the newest token, root of the tree)")
        assert len(nodes) == int(drafted) == 12
        assert sum(node.startswith("  * ") for node in nodes) == int(accepted)
    assert any(int(accepted) for _, accepted, _ in cycles)
    asked = {"prompt": "def fibonacci(n):\n", "max_tokens": 16, "temperature": 0}
    text = httpx.post(f"{served.url}/v1/completions", json=asked, timeout=60).json()["choices"][0]["text"]
    assert shown.endswith(f"\n\ndef fibonacci(n):\n{text}\n")


def test_structured_output(served: Served) -> None:
    shown = output("structured_output.py", served.url)
    entry, rest = shown.split("\nfinish reason: ")
    found = json.loads(entry)
    assert found.keys() == {"name", "size", "kind"}
    assert len(found["name"]) <= 12
    assert found["size"] in range(1000)
    assert found["kind"] in ("file", "directory")
    assert re.fullmatch(r"stop\nspeculation: \d\.\d\d tokens per forward pass of the target\n", rest)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_says_how_to_run_it(path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) < 60
    assert f"python examples/{path.name}\n" in source.split('"""')[1]
    assert f"def test_{path.stem}(" in (REPOSITORY / "tests" / "e2e" / "test_examples.py").read_text()
