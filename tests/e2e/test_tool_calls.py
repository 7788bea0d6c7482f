"""A grammar makes the demo call a tool. Calls are valid, and the same with and without speculation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.conftest import FIXED_TREES, README_FLAGS, serving

pytestmark = pytest.mark.slow  # a server of its own; tests/api has tools, and tests/lossless has grammars
TEMPLATE = """\
{% for tool in tools or [] %}{{ '<tool_call>\n{"name": "' + tool.function.name + '"}\n' }}{% endfor %}
{% for message in messages %}{{ message.content + '\n' }}{% endfor %}"""
COLOUR = {
    "type": "object",
    "properties": {
        "name": {"enum": ["red", "green", "dark blue"]},
        "rgb": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}, "maxItems": 3},
        "comment": {"type": "string", "maxLength": 20},
    },
    "required": ["name", "rgb", "comment"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "paint", "parameters": COLOUR}},
    {"type": "function", "function": {"name": "stop"}},
]
MESSAGES: list[Any] = [{"role": "user", "content": "def paint(name, rgb, comment):"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    directory = tmp_path_factory.mktemp("tools")
    (directory / "template.jinja").write_text(TEMPLATE)
    flags = ("--chat-template", str(directory / "template.jinja"), "--cpu-threads", "1", *README_FLAGS, *FIXED_TREES)
    with (
        serving(directory / "log", *flags) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def asking(**body: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 400, **body}


def calls_of(answer: Any) -> list[tuple[str, str]]:
    [choice] = answer.choices
    assert not choice.message.content
    assert choice.finish_reason == "tool_calls"
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]


PAINT = {"type": "function", "function": {"name": "paint"}}


@pytest.mark.parametrize(("choice", "temperature"), [("required", 1.0), (PAINT, 0.0)], ids=["required", "named"])
def test_calls_are_valid_and_the_same_without_speculation(
    client: openai.OpenAI, choice: Any, temperature: float
) -> None:
    body = asking(tool_choice=choice, parallel_tool_calls=False, temperature=temperature, seed=5)
    answer = client.chat.completions.create(**body)
    [(name, arguments)] = calls_of(answer)
    value = json.loads(arguments)
    assert name in {"paint", "stop"} if choice == "required" else name == "paint"
    assert set(value) == (set(COLOUR["properties"]) if name == "paint" else set())
    plain = client.chat.completions.create(**body, extra_body={"speculative": False})
    assert calls_of(plain) == [(name, arguments)]
    with client.chat.completions.stream(**body) as events:
        assert calls_of(events.get_final_completion()) == [(name, arguments)]
    drafted = [each.model_extra["metrics"]["speculative_decoding"] for each in (answer, plain)]
    assert drafted[0]["num_accepted_draft_tokens"] > 0
    assert drafted[1] is None


def test_an_answer_without_a_call_is_content(client: openai.OpenAI) -> None:
    [choice] = client.chat.completions.create(**asking(max_tokens=12, temperature=0)).choices
    assert choice.message.content
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "length")
