"""Thinking in /v1/responses and /v1/messages, as their packages show it. The fake engine repeats the user's text."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from eagle_server.api.errors import ApiError
from eagle_server.api.schemas.base import parse
from eagle_server.api.schemas.messages import MessagesRequest
from eagle_server.api.schemas.responses import ResponsesRequest
from tests.api import test_messages, test_responses
from tests.api.conftest import Templated
from tests.api.fake_engine import BREAK
from tests.api.test_messages import BLOCK, END
from tests.api.test_reasoning import CALL, SAY, TEMPLATE
from tests.api.test_responses import BEGIN, CALL_ENDS, TEXT_BEGINS, TEXT_ENDS

THINKING = "Why 😀?"
TOKENS = len(f"<think>\n{THINKING}\n</think>".encode())
THINKING_ENDS = ["response.reasoning_text.done", *TEXT_ENDS[1:]]
seeds = pytest.mark.parametrize("seed", range(4))  # each seed gives other numbers of tokens per event


@pytest.fixture
async def http(templated: Templated) -> AsyncIterator[httpx.AsyncClient]:
    template = TEMPLATE.replace("{{ reasoning_effort }}", "")  # after an empty thinking it would be a text
    async with templated(template) as client:
        yield client


@pytest.fixture
def responses(http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=http)


messages = test_messages.client


@seeds
async def test_a_response_has_its_thinking_first(responses: openai.AsyncOpenAI, seed: int) -> None:
    body = {"extra_body": {"seed": seed}}
    whole = await responses.responses.create(**test_responses.asking(SAY, **body))
    thinking: Any = whole.output[0]
    assert (thinking.type, thinking.summary, thinking.status) == ("reasoning", [], "completed")
    assert [(part.type, part.text) for part in thinking.content] == [("reasoning_text", THINKING)]
    assert (whole.output_text, whole.output[1].type, len(whole.output)) == ("So.", "message", 2)
    assert thinking.id.startswith("rs_") and whole.output[1].id.startswith("msg_")
    assert whole.usage is not None and whole.usage.output_tokens_details.reasoning_tokens == TOKENS
    events = await test_responses.stream(responses, SAY, **body)
    expected = [*BEGIN, *TEXT_BEGINS, *THINKING_ENDS, *TEXT_BEGINS, *TEXT_ENDS, "response.completed"]
    assert test_responses.without_deltas(events) == expected
    assert [each.sequence_number for each in events] == [*range(len(events))]
    own = [each for each in events if getattr(each, "output_index", None) == 0]
    deltas = [each.delta for each in own if each.type == "response.reasoning_text.delta"]
    assert ("".join(deltas), len(deltas) > 2) == (THINKING, True), "thinking comes as the model writes it"
    added, part, *_, done, part_done, ended = own
    assert (added.item.status, added.item.content, part.part.text) == ("in_progress", [], "")
    assert part.part.type == "reasoning_text"
    assert done.text == part_done.part.text == ended.item.content[0].text == THINKING
    assert {each.item_id for each in own[1:-1]} == {added.item.id} == {ended.item.id}
    assert test_responses.comparable(events[-1].response) == test_responses.comparable(whole)
    async with responses.responses.stream(**test_responses.asking(SAY, **body)) as manager:
        final = await manager.get_final_response()
    assert (final.output[0].type, final.output_text) == ("reasoning", "So.")


@seeds
async def test_a_message_has_its_thinking_first(messages: anthropic.AsyncAnthropic, seed: int) -> None:
    body = {"extra_body": {"seed": seed}, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    whole = await messages.messages.create(**test_messages.asking(SAY, **body))
    thinking, text = whole.content
    assert thinking.type == "thinking" and text.type == "text"
    assert (thinking.thinking, thinking.signature, text.text) == (THINKING, "", "So.")
    assert whole.usage.output_tokens_details is not None
    assert whole.usage.output_tokens_details.thinking_tokens == TOKENS
    events = await test_messages.stream(messages, SAY, **body)
    assert test_messages.without_deltas(events) == ["message_start", *BLOCK, *BLOCK, *END]
    deltas = [each.delta for each in events if each.type == "content_block_delta" and each.index == 0]
    assert {delta.type for delta in deltas} == {"thinking_delta"}
    assert ("".join(delta.thinking for delta in deltas), len(deltas) > 2) == (THINKING, True)
    accumulated = await test_messages.accumulated(messages, SAY, **body)
    assert test_messages.comparable(accumulated) == test_messages.comparable(whole)


async def test_a_call_follows_the_thinking(responses: openai.AsyncOpenAI, messages: anthropic.AsyncAnthropic) -> None:
    say = f"<think>{CALL}?</think>{CALL}"
    whole = await responses.responses.create(**test_responses.asking(say, tools=test_responses.TOOLS))
    assert [item.type for item in whole.output] == ["reasoning", "function_call"]
    events = await test_responses.stream(responses, say, tools=test_responses.TOOLS)
    call = ["response.output_item.added", *CALL_ENDS]
    expected = [*BEGIN, *TEXT_BEGINS, *THINKING_ENDS, *call, "response.completed"]
    assert test_responses.without_deltas(events) == expected
    assert test_responses.comparable(events[-1].response) == test_responses.comparable(whole)
    message = await messages.messages.create(**test_messages.asking(say, tools=test_messages.TOOLS))
    assert [block.type for block in message.content] == ["thinking", "tool_use"]
    accumulated = await test_messages.accumulated(messages, say, tools=test_messages.TOOLS)
    assert test_messages.comparable(accumulated) == test_messages.comparable(message)


async def test_thinking_may_be_cut_off_or_fail(
    responses: openai.AsyncOpenAI, messages: anthropic.AsyncAnthropic
) -> None:
    whole = await responses.responses.create(**test_responses.asking(SAY, max_output_tokens=12))
    cut: Any = whole.output[0]
    assert (cut.content[0].text, cut.status, whole.status, len(whole.output)) == ("Why ", "incomplete", "incomplete", 1)
    events = await test_responses.stream(responses, SAY, max_output_tokens=12)
    assert test_responses.comparable(events[-1].response) == test_responses.comparable(whole)
    message = await messages.messages.create(**test_messages.asking(SAY, max_tokens=12))
    assert (message.content[0].type, len(message.content), message.stop_reason) == ("thinking", 1, "max_tokens")
    accumulated = await test_messages.accumulated(messages, SAY, max_tokens=12)
    assert test_messages.comparable(accumulated) == test_messages.comparable(message)
    begun: Any = {"extra_body": {"chat_template_kwargs": {"begin": "<think>"}}}
    failed = (await test_responses.stream(responses, f"abcdefgh{BREAK}", **begun))[-1]
    assert (failed.type, failed.response.output[0].status) == ("response.failed", "incomplete")


async def test_thinking_is_omitted_where_the_request_says_so(messages: anthropic.AsyncAnthropic) -> None:
    body = {"thinking": {"type": "adaptive", "display": "omitted"}}
    whole = await messages.messages.create(**test_messages.asking(SAY, **body))
    assert [(block.type, block.text) for block in whole.content] == [("text", "So.")]
    accumulated = await test_messages.accumulated(messages, SAY, **body)
    assert test_messages.comparable(accumulated) == test_messages.comparable(whole)


async def test_thinking_off_reaches_the_template(
    responses: openai.AsyncOpenAI, messages: anthropic.AsyncAnthropic
) -> None:
    """The template then writes an empty thinking into the prompt. So the engine's text is no thinking."""
    user: Any = {"role": "user", "content": "<think>a"}
    message = await messages.messages.create(model="fake", messages=[user], max_tokens=8, thinking={"type": "disabled"})
    assert [(block.type, block.text) for block in message.content if block.type == "text"] == [("text", "<think>a")]
    response = await responses.responses.create(
        model="fake", input=[user], max_output_tokens=8, reasoning={"effort": "none"}
    )
    assert response.output_text == "<think>a"


async def test_thinking_is_sent_back(responses: openai.AsyncOpenAI, messages: anthropic.AsyncAnthropic) -> None:
    """The template writes the thinking of earlier answers, which the engine repeats."""
    user: Any = {"role": "user", "content": "hi"}
    first = await responses.responses.create(**test_responses.asking(SAY))
    again = await responses.responses.create(
        model="fake",
        input=[user, *[item.model_dump() for item in first.output], user],
        max_output_tokens=3,
    )
    assert again.output_text == "Why"
    message = await messages.messages.create(**test_messages.asking(SAY))
    history: Any = [user, {"role": "assistant", "content": message.content}, user]
    reply = await messages.messages.create(model="fake", messages=history, max_tokens=len("Why"))
    assert [block.text for block in reply.content if block.type == "text"] == ["Why"]


def test_thinking_belongs_to_the_answer_after_it() -> None:
    def thought(text: str) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": text}]
        return {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "content": content}

    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    items = [
        {"role": "user", "content": "x"},
        thought("a"),
        call,
        {**call, "call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": "r"},
        {"type": "function_call_output", "call_id": "2", "output": "r"},
        thought("b"),
        {"role": "assistant", "content": "y"},
        call,
        {"type": "function_call_output", "call_id": "1", "output": "r"},
        thought("c"),
        {"role": "user", "content": "z"},
        {"role": "assistant", "content": "w"},
    ]
    chat = parse(ResponsesRequest, json.dumps({"input": items}).encode()).chat
    assert [(m.role, m.text, m.reasoning_content, len(m.tool_calls)) for m in chat.messages] == [
        ("user", "x", None, 0),
        ("assistant", "", "a", 2),
        ("tool", "r", None, 0),
        ("tool", "r", None, 0),
        ("assistant", "y", "b", 1),
        ("tool", "r", None, 0),
        ("user", "z", None, 0),
        ("assistant", "w", None, 0),
    ]
    with pytest.raises(ApiError, match="of type 'text'; supported: reasoning_text"):
        parse(ResponsesRequest, json.dumps({"input": [{"type": "reasoning", "content": [{"type": "text"}]}]}).encode())


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ({}, [None, None, "c"]),
        ({"keep": {"type": "thinking_turns", "value": 2}}, [None, "b", "c"]),
        ({"keep": {"type": "thinking_turns", "value": 9}}, ["a", "b", "c"]),
        ({"keep": "all"}, ["a", "b", "c"]),
        ({"keep": {"type": "all"}}, ["a", "b", "c"]),
    ],
)
def test_earlier_thinking_may_be_cleared(keep: dict[str, Any], kept: list[str | None]) -> None:
    turns = [
        message
        for text in "abc"
        for message in (
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": text}, {"type": "text", "text": "y"}]},
        )
    ]
    edits = {"edits": [{"type": "clear_thinking_20251015", **keep}]}
    body = {"messages": [*turns, {"role": "user", "content": "z"}], "max_tokens": 9, "context_management": edits}
    chat = parse(MessagesRequest, json.dumps(body).encode()).chat
    assert [message.reasoning_content for message in chat.messages if message.role == "assistant"] == kept
