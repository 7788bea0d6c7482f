"""The scripts in examples/ run as their docstrings say: against the README's server, one with tools, or none."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.conftest import REPOSITORY, Served, serving

pytestmark = pytest.mark.slow  # a server, and processes that import the OpenAI client

EXAMPLES = sorted((REPOSITORY / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    template = REPOSITORY / "examples" / "demo_chat_template.jinja"
    with serving(tmp_path_factory.mktemp("tools") / "log", "--chat-template", str(template)) as up:
        yield up


def output(name: str, *arguments: str) -> str:
    """The output of an example."""
    command = [sys.executable, str(REPOSITORY / "examples" / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_openai_client(served: Served) -> None:
    shown = output("openai_client.py", "--url", f"{served.url}/v1")
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
    shown = output("stream_with_trees.py", "--url", f"{served.url}/v1", "--max-tokens", "16")
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
    shown = output("structured_output.py", "--url", f"{served.url}/v1")
    entry, rest = shown.split("\nfinish reason: ")
    found = json.loads(entry)
    assert found.keys() == {"name", "size", "kind"}
    assert len(found["name"]) <= 12
    assert found["size"] in range(1000)
    assert found["kind"] in ("file", "directory")
    assert re.fullmatch(r"stop\nspeculation: \d\.\d\d tokens per forward pass of the target\n", rest)


def test_tool_calls(with_tools: Served) -> None:
    shown = output("tool_calls.py", "--url", f"{with_tools.url}/v1")
    calls, answer = shown.split("answer: ")
    pattern = r"(?:length\(text=(?P<text>.+)\)|multiply\(a=(?P<a>\d\d?), b=(?P<b>\d\d?)\)) = (?P<result>\d+)"
    found = [re.fullmatch(pattern, line) for line in calls.splitlines()]
    assert found
    for call in found:
        assert call is not None, shown
        result = int(call["a"]) * int(call["b"]) if call["text"] is None else len(ast.literal_eval(call["text"]))
        assert int(call["result"]) == result
    assert re.fullmatch(r".*\n", answer)


def test_responses(served: Served) -> None:
    shown = output("responses.py", "--url", f"{served.url}/v1")
    first, second, tokens = re.split(r"\n\nsecond answer, incomplete:\n|\n\n(?=tokens: )", shown)
    chat = {"messages": [{"role": "system", "content": "# Functions of numbers"}], "max_tokens": 32, "temperature": 0}
    for question, answer in {"def square(x):": first.removeprefix("first answer:\n"), "def cube(x):": second}.items():
        chat["messages"].append({"role": "user", "content": question})
        reply = httpx.post(f"{served.url}/v1/chat/completions", json=chat, timeout=60).json()["choices"][0]
        assert reply["message"]["content"] == answer
        chat["messages"].append(reply["message"])
    counts = re.fullmatch(r"tokens: (\d+) in the prompt, (\d+) of them from the cache\n", tokens)
    assert counts is not None
    assert 0 < int(counts[2]) < int(counts[1])


def test_messages(served: Served) -> None:
    shown = output("messages.py", "--url", served.url)
    counted, streamed, continued = re.split(r"\nstreamed:\n|\nstop reason: max_tokens\ncontinued:\n", shown)
    chat = {
        "messages": [
            {"role": "system", "content": "# Functions of numbers"},
            {"role": "user", "content": "def square(x):"},
        ],
        **{"max_tokens": 32, "temperature": 0},
    }
    reply = httpx.post(f"{served.url}/v1/chat/completions", json=chat, timeout=60).json()
    assert counted == f"tokens of the prompt: {reply['usage']['prompt_tokens']}"
    assert streamed == reply["choices"][0]["message"]["content"]
    assert continued.startswith("    return x")
    assert len(continued) > len("    return x\n")


def test_python_api() -> None:
    shown = output("python_api.py")
    blocks = re.findall(
        r"^(def fib|import os|class Stack)(?:.*\n)+?---\n(\d\.\d\d) tokens per forward", shown, re.MULTILINE
    )
    assert [prompt for prompt, _ in blocks] == ["def fib", "import os", "class Stack"]
    assert all(float(length) > 1 for _, length in blocks)
    assert re.search(r"^without speculation, same texts: True\nchat: (one|two|three)\n\Z", shown, re.MULTILINE)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_says_how_to_run_it(path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) < 60
    assert f"python examples/{path.name}\n" in source.split('"""')[1]
    assert f"def test_{path.stem}(" in (REPOSITORY / "tests" / "e2e" / "test_examples.py").read_text()
