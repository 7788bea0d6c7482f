"""gpt-oss's channels in chats: thinking, content and calls, by its tokens. The fake engine repeats the user's text."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from eagle_server.engine.grammars.sources import llguidance_source
from tests.api.conftest import Templated
from tests.api.fake_engine import EOS, ID, FakeEngine, byte_tokenizer
from tests.api.test_reasoning import chat, parts
from tests.api.test_tools import TOOLS

# As gpt-oss's own template: its names for thinking and effort, and the forms of messages.
TEMPLATE = """\
{%- for message in messages[:-1] %}
{%- if message.thinking %}{{ '<|channel|>analysis<|message|>' + message.thinking }}{% endif %}
{%- for call in message.tool_calls or [] %}{{ ' to=functions.' + call.function.name + '<|channel|>commentary' }}
{%- endfor %}{% endfor %}{{ messages[-1].content }}{% if tools %}{% endif %}{{ reasoning_effort or '' }}"""
SAY = "<|channel|>analysis<|message|>Why 😀?<|end|><|start|>assistant<|channel|>final<|message|>So 😀.<|return|>dropped"
CALL = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
    '<|constrain|>json<|message|>{"city": "Malmö"}<|call|>dropped'
)
each_way = pytest.mark.parametrize("streamed", [False, True])


@pytest.fixture
async def http(templated: Templated) -> AsyncIterator[httpx.AsyncClient]:
    async with templated(TEMPLATE) as client:
        yield client


@each_way
@pytest.mark.parametrize("seed", range(4))  # each seed gives other numbers of tokens per event
async def test_channels_are_thinking_and_content_and_the_turn_ends_by_its_token(
    http: httpx.AsyncClient, seed: int, *, streamed: bool
) -> None:
    choice = await chat(http, SAY, streamed=streamed, seed=seed)
    assert (parts(choice), choice["finish_reason"]) == (("Why 😀?", "So 😀."), "stop")
    header, thinking = 3 + len("assistant"), len("analysis") + 2 + len("Why 😀?".encode()) + 1
    assert choice["usage"]["completion_tokens_details"]["reasoning_tokens"] == thinking
    assert choice["usage"]["completion_tokens"] == thinking + header + len("final") + len("So 😀.".encode()) + 1
    if streamed:
        pieces = [delta["reasoning_content"] for delta in choice["deltas"] if "reasoning_content" in delta]
        assert len(pieces) > 1, "thinking comes as the model writes it"


@each_way
@pytest.mark.parametrize("seed", range(4))
async def test_a_message_to_a_function_is_its_call(http: httpx.AsyncClient, seed: int, *, streamed: bool) -> None:
    choice = await chat(http, CALL, streamed=streamed, seed=seed, tools=TOOLS)
    assert (parts(choice)[0], choice["finish_reason"]) == ("Hm.", "tool_calls")
    assert not choice["message"]["content"]
    calls = [call for delta in choice.get("deltas", [choice["message"]]) for call in delta.get("tool_calls", ())]
    assert [call["function"]["name"] for call in calls if "name" in call["function"]] == ["get_weather"]
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"city": "Malmö"}


async def test_earlier_thinking_calls_and_the_effort_reach_the_template(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "content": None, "reasoning_content": "Why?", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "user", "content": "x" + EOS},
    ]
    await chat(http, "", messages=messages, reasoning_effort="high", tools=TOOLS)
    prompt = byte_tokenizer().decode(engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt == f"<|channel|>analysis<|message|>Why? to=functions.get_weather<|channel|>commentaryx{EOS}high"


async def test_grammars_begin_in_the_final_channel_and_enforced_calls_after_the_thinking(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await chat(http, SAY, response_format={"type": "json_object"})
    grammar = engine.requests[-1].sampling.grammar
    channel, message, end = (f"<[{ID[f'<|{each}|>']}]>" for each in ("channel", "message", "end"))
    assert grammar is not None and f'header: {channel} "final" {message}\n' in grammar.thinking
    assert f"{end} <[{ID['<|start|>']}]>" in grammar.thinking
    assert "start: thinking header answer\n" in llguidance_source(grammar)
    await chat(http, CALL, tools=TOOLS, response_format={"type": "json_object"})
    grammar = engine.requests[-1].sampling.grammar
    assert grammar is not None and "start: thinking (header answer | calls)\n" in llguidance_source(grammar)
    choice = await chat(http, CALL, tools=TOOLS, tool_choice="required")
    grammar = engine.requests[-1].sampling.grammar
    assert grammar is not None and grammar.kind == "calls" and "header answer" not in llguidance_source(grammar)
    assert f'start: {channel} "commentary to=functions."' in grammar.source
    assert f'"get_weather " <[{ID["<|constrain|>"]}]> "json" {message}' in grammar.source
    assert choice["finish_reason"] == "tool_calls"


async def test_the_openai_package_reads_the_stream(http: httpx.AsyncClient) -> None:
    client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0)
    stream = await client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": CALL}], tools=TOOLS, stream=True, reasoning_effort="low"
    )
    arguments, thinking, reasons = "", "", set()
    async for chunk in stream:
        [choice] = chunk.choices
        reasons.add(choice.finish_reason)
        thinking += getattr(choice.delta, "reasoning_content", None) or ""
        arguments += "".join(call.function.arguments or "" for call in choice.delta.tool_calls or [] if call.function)
    assert (thinking, json.loads(arguments), reasons) == ("Hm.", {"city": "Malmö"}, {None, "tool_calls"})
