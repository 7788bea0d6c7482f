"""Thinking in chats, as the openai package and plain HTTP show it. The fake engine repeats the user's text."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.api.conftest import Templated
from tests.api.fake_engine import EOS, FakeEngine
from tests.api.test_tools import TOOLS

# `begin` is what a real template puts at the end of the prompt. The engine's reply ends before it.
TEMPLATE = """\
{# <think> <tool_call>{"name" #}{% if tools %}{% endif %}
{%- for message in messages[:-1] %}{{ message.reasoning_content or '' }}{% endfor %}{{ messages[-1].content }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- if reasoning_effort %}{{ reasoning_effort }}{% endif %}{{ begin or '' }}"""
SAY = "<think>\nWhy 😀?\n</think>\n\nSo."
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Malmö"}}</tool_call>'
each_way = pytest.mark.parametrize("streamed", [False, True])


@pytest.fixture
def parser() -> str:
    return "auto"


@pytest.fixture
async def http(parser: str, templated: Templated) -> AsyncIterator[httpx.AsyncClient]:
    async with templated(TEMPLATE, "--reasoning-parser", parser) as client:
        yield client


async def chat(http: httpx.AsyncClient, say: str, *, streamed: bool = False, **body: Any) -> dict[str, Any]:
    """The only choice, with the usage. The deltas of a stream are joined; `deltas` has them too."""
    messages = [{"role": "user", "content": say + EOS}]
    body = {
        "messages": messages,
        **({"stream": True, "stream_options": {"include_usage": True}} if streamed else {}),
        **body,
    }
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    if not streamed:
        answer = response.json()
        return {**answer["choices"][0], "usage": answer["usage"]}
    events = [json.loads(line[6:]) for line in response.text.split("\n\n")[:-2]]
    choices = [choice for event in events for choice in event["choices"]]
    deltas = [choice["delta"] for choice in choices]
    message = {key: "".join(d.get(key, "") for d in deltas) for key in ("content", "reasoning_content")}
    scores = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    return {
        "message": message,
        "deltas": deltas,
        "finish_reason": choices[-1]["finish_reason"],
        "usage": events[-1]["usage"],
        "logprobs": {"content": scores},
    }


def parts(choice: dict[str, Any]) -> tuple[str, str | None]:
    return choice["message"].get("reasoning_content", ""), choice["message"]["content"]


@each_way
@pytest.mark.parametrize("seed", range(4))  # each seed gives other numbers of tokens per event
async def test_thinking_is_apart_from_content(http: httpx.AsyncClient, seed: int, *, streamed: bool) -> None:
    choice = await chat(http, SAY, streamed=streamed, seed=seed, logprobs=True)
    assert (parts(choice), choice["finish_reason"]) == (("Why 😀?", "So."), "stop")
    thinking = len(SAY.partition("</think>")[0].encode()) + len("</think>")
    assert choice["usage"]["completion_tokens_details"]["reasoning_tokens"] == thinking
    assert choice["usage"]["completion_tokens"] == len(SAY.encode()) + 1
    assert len(choice["logprobs"]["content"]) == len(SAY.encode()) + 1, "of all that was generated"
    if streamed:
        pieces = [delta["reasoning_content"] for delta in choice["deltas"] if "reasoning_content" in delta]
        assert len(pieces) > 2, "thinking comes as the model writes it"
        assert all(pieces)


@each_way
@pytest.mark.parametrize(
    ("begin", "say", "expected"),
    [
        ("<think>\n", "Why?</think>So.", ("Why?", "So.")),
        ("<think>\n", "Why?", ("Why?", "")),
        ("<think>\n\n</think>\n\n", "So. <think>", ("", "So. <think>")),
        ("", "So.", ("", "So.")),
    ],
)
async def test_the_prompt_may_begin_or_end_the_thinking(
    http: httpx.AsyncClient, begin: str, say: str, expected: tuple[str, str], *, streamed: bool
) -> None:
    choice = await chat(http, say, streamed=streamed, chat_template_kwargs={"begin": begin})
    assert parts(choice) == expected
    assert choice["usage"]["completion_tokens_details"]["reasoning_tokens"] == (
        0 if not expected[0] else len("Why?</think>" if expected[1] else "Why?") + (not expected[1])
    )


@each_way
async def test_thinking_that_never_ends_is_thinking(http: httpx.AsyncClient, *, streamed: bool) -> None:
    choice = await chat(http, SAY, streamed=streamed, max_tokens=12)
    assert (parts(choice), choice["finish_reason"]) == (("Why ", ""), "length")
    assert choice["usage"]["completion_tokens_details"]["reasoning_tokens"] == 12


@each_way
async def test_a_stop_text_counts_in_the_thinking_too(http: httpx.AsyncClient, *, streamed: bool) -> None:
    assert parts(await chat(http, SAY, streamed=streamed, stop="y 😀")) == ("Wh", "")
    assert parts(await chat(http, SAY, streamed=streamed, stop="o.")) == ("Why 😀?", "S")
    assert parts(await chat(http, SAY, streamed=streamed, stop="</think>")) == ("Why 😀?", "")


@each_way
async def test_without_separate_reasoning_thinking_is_content(http: httpx.AsyncClient, *, streamed: bool) -> None:
    choice = await chat(http, SAY + CALL, streamed=streamed, separate_reasoning=False, tools=TOOLS)
    assert parts(choice) == ("", SAY)
    assert choice["finish_reason"] == "tool_calls"


async def test_without_stream_reasoning_thinking_comes_in_one_piece(http: httpx.AsyncClient) -> None:
    choice = await chat(http, SAY, streamed=True, stream_reasoning=False)
    assert [d["reasoning_content"] for d in choice["deltas"] if "reasoning_content" in d] == ["Why 😀?"]
    assert parts(choice) == ("Why 😀?", "So.")


@each_way
async def test_tool_calls_after_thinking(http: httpx.AsyncClient, *, streamed: bool) -> None:
    choice = await chat(http, f"<think>{CALL}?</think>\n\n{CALL}", streamed=streamed, tools=TOOLS)
    assert (choice["message"]["reasoning_content"], choice["finish_reason"]) == (f"{CALL}?", "tool_calls")
    assert not choice["message"]["content"]


async def test_choices_think_apart(http: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": SAY + EOS}], "n": 3, "seed": 1}
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    assert [parts(choice) for choice in answer["choices"]] == [("Why 😀?", "So.")] * 3
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3 * len("<think>\nWhy 1234?\n</think>")


@pytest.mark.parametrize("parser", ["none"])
async def test_a_parser_may_be_turned_off(http: httpx.AsyncClient, engine: FakeEngine, parser: str) -> None:
    assert parts(await chat(http, SAY)) == ("", SAY)
    await chat(http, "a", response_format={"type": "json_object"})
    grammar = engine.requests[-1].sampling.grammar
    assert grammar is not None and grammar.thinking == ""


@pytest.mark.parametrize("parser", ["auto", "none", "granite", "deepseek-r1"])
async def test_the_server_says_which_parser_it_has(http: httpx.AsyncClient, parser: str) -> None:
    resolved = (await http.get("/v1/server_info")).json()["resolved"]["model"]
    assert resolved["reasoning_parser"] == ("qwen3" if parser == "auto" else parser)


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "[0-9]+"}},
        {"guided_choice": ["a", "b"]},
        {"tools": TOOLS, "tool_choice": "required"},
    ],
    ids=str,
)
async def test_grammars_begin_after_the_thinking(
    http: httpx.AsyncClient, engine: FakeEngine, body: dict[str, Any]
) -> None:
    found = {}
    for begin in ("", "<think>", "</think>"):
        await chat(http, "a", chat_template_kwargs={"begin": begin}, **body)
        grammar = engine.requests[-1].sampling.grammar
        assert grammar is not None
        found[begin] = grammar.thinking
    assert 'thinking: ("<think>") reasoned)?' in found[""].replace("((", "(")
    assert 'thinking: ("<think>")? reasoned' in found["<think>"]
    assert found["</think>"] == ""


async def test_effort_and_history_reach_the_template(http: httpx.AsyncClient) -> None:
    async def prompt(**body: Any) -> str:
        return (await http.post("/v1/chat/completions", json={"max_tokens": 200, **body})).json()["choices"][0][
            "message"
        ]

    user = {"role": "user", "content": "hi"}
    for field in ("reasoning_content", "reasoning"):
        past = {"role": "assistant", "content": "b", field: "Because."}
        assert (await prompt(messages=[past, user]))["content"].startswith("Because.hi")
    assert (await prompt(messages=[user], reasoning_effort="high"))["content"].startswith("hihigh")
    assert (await prompt(messages=[user], reasoning_effort="none"))["content"].startswith(
        "hi<think>\n\n</think>\n\nnone"
    )
    off = {"enable_thinking": False}
    assert (await prompt(messages=[user], chat_template_kwargs=off))["content"].startswith("hi<think>\n\n</think>")


async def test_the_openai_package_has_the_thinking(http: httpx.AsyncClient) -> None:
    client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=http)
    body: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": SAY + EOS}]}
    answer = await client.chat.completions.create(**body)
    message: Any = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("Why 😀?", "So.")
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == len("<think>\nWhy 1234?\n</think>")
    async with client.chat.completions.stream(**body) as events:
        final: Any = (await events.get_final_completion()).choices[0].message
    assert final.content == "So."
