"""/v1/messages, as the anthropic package and as bytes show it. The fake engine repeats the last message's text."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import httpx2
import pytest

from eagle_server.api.schemas.base import parse
from eagle_server.api.schemas.messages import MessagesRequest
from eagle_server.request import Grammar
from tests.api.conftest import Templated
from tests.api.fake_engine import BREAK, EOS, REFUSE, FakeEngine
from tests.api.test_output_items import INVALID
from tests.api.test_tools import CALLS, CITY, HINTS, SAY, TEMPLATE

PATH = "/v1/messages"
TOOLS: list[Any] = [
    {"name": "get_weather", "description": "now", "input_schema": CITY},
    {"name": "stop", "input_schema": {"type": "object"}},
]
BLOCK = ["content_block_start", "content_block_stop"]
END = ["message_delta", "message_stop"]


@pytest.fixture
async def http(templated: Templated) -> AsyncIterator[httpx.AsyncClient]:
    async with templated(TEMPLATE % HINTS["hermes"]) as client:
        yield client


@pytest.fixture
async def client(http: httpx.AsyncClient) -> AsyncIterator[anthropic.AsyncAnthropic]:
    app: Any = http._transport
    transport = httpx2.ASGITransport(app=app.app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport) as made:
        yield anthropic.AsyncAnthropic(base_url="http://localhost", api_key="none", max_retries=0, http_client=made)


def asking(say: str, **body: Any) -> dict[str, Any]:
    return {"model": "fake", "max_tokens": 500, "messages": [{"role": "user", "content": say + EOS}], **body}


async def stream(client: anthropic.AsyncAnthropic, say: str, **body: Any) -> list[Any]:
    return [each async for each in await client.messages.create(**asking(say, stream=True, **body))]


async def accumulated(client: anthropic.AsyncAnthropic, say: str, **body: Any) -> Any:
    async with client.messages.stream(**asking(say, **body)) as manager:
        return await manager.get_final_message()


def comparable(message: Any) -> dict[str, Any]:
    """Without ids and metrics. The package adds parsed_output to what it streams."""
    values: dict[str, Any] = message.model_dump(exclude={"id", "metrics"})
    for block in values["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    return values


def without_deltas(events: list[Any]) -> list[str]:
    return [each.type for each in events if each.type != "content_block_delta"]


async def test_a_text(client: anthropic.AsyncAnthropic) -> None:
    message = await client.messages.create(**asking("hé😀", system="Be brief."), extra_headers={"x-request-id": "mine"})
    assert message._request_id == "mine"
    # The template prints the user's message alone, so it says the system's text, too.
    assert [(block.type, block.text) for block in message.content] == [("text", "Be brief.\n\nhé😀")]
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "end_turn", None)
    usage = message.usage
    assert (usage.input_tokens + (usage.cache_read_input_tokens or 0), usage.output_tokens) == (19, 19)
    assert message.model_extra is not None
    assert message.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


@pytest.mark.parametrize("seed", range(4))  # each seed gives other numbers of tokens per event
async def test_the_events_of_a_text(client: anthropic.AsyncAnthropic, seed: int) -> None:
    body = {"extra_body": {"seed": seed}}
    whole = await client.messages.create(**asking("hé😀", **body))
    events = await stream(client, "hé😀", **body)
    assert without_deltas(events) == ["message_start", *BLOCK, *END]
    deltas = events[2:-3]
    assert len(deltas) > 1
    assert "".join(each.delta.text for each in deltas) == "hé😀"
    started, ended = events[0].message, events[-2]
    assert (started.content, started.stop_reason) == ([], None)
    assert (ended.delta.stop_reason, ended.usage.output_tokens) == ("end_turn", whole.usage.output_tokens)
    assert ended.model_extra["metrics"] == whole.model_extra["metrics"]
    assert comparable(await accumulated(client, "hé😀", **body)) == comparable(whole)


@pytest.mark.parametrize("seed", range(4))
async def test_calls(client: anthropic.AsyncAnthropic, seed: int) -> None:
    body = {"tools": TOOLS, "extra_body": {"seed": seed}}
    whole = await client.messages.create(**asking(SAY["hermes"], **body))
    assert [block.type for block in whole.content] == ["text", "tool_use", "tool_use"]
    assert [(b.name, b.input) for b in whole.content[1:]] == [(name, json.loads(given)) for name, given in CALLS]
    assert whole.stop_reason == "tool_use"
    events = await stream(client, SAY["hermes"], **body)
    assert without_deltas(events) == ["message_start", *BLOCK, *BLOCK, *BLOCK, *END]
    starts = [each.content_block for each in events if each.type == "content_block_start"]
    assert [(b.name, b.input) for b in starts[1:]] == [(name, {}) for name, _ in CALLS]
    for index, (_, arguments) in enumerate(CALLS, start=1):
        deltas = [each.delta for each in events if each.type == "content_block_delta" and each.index == index]
        assert "".join(delta.partial_json for delta in deltas) == arguments
        assert {delta.type for delta in deltas} == {"input_json_delta"}
    assert comparable(await accumulated(client, SAY["hermes"], **body)) == comparable(whole)


@pytest.mark.parametrize("given", INVALID)
@pytest.mark.parametrize("seed", range(2))
async def test_no_invalid_call_begins(client: anthropic.AsyncAnthropic, seed: int, given: str) -> None:
    call = '<tool_call>{"name": "get_weather", "arguments": %s}</tool_call>'
    invalid, body = call % given, {"tools": TOOLS, "extra_body": {"seed": seed}}
    for say, kinds in ((invalid, ["text"]), (f"a {call % '{}'} {invalid} b", ["text", "tool_use", "text"])):
        whole = await client.messages.create(**asking(say, **body))
        assert [block.type for block in whole.content] == kinds
        assert invalid in whole.content[-1].text
        assert comparable(await accumulated(client, say, **body)) == comparable(whole)
        starts = [each.content_block for each in await stream(client, say, **body) if hasattr(each, "content_block")]
        assert [block.type for block in starts] == kinds


async def test_a_call_that_breaks_off_is_text(client: anthropic.AsyncAnthropic) -> None:
    body = {"tools": TOOLS, "max_tokens": 71}
    whole = await client.messages.create(**{**asking(SAY["hermes"]), **body})
    assert ([block.type for block in whole.content], whole.stop_reason) == (["text"], "max_tokens")
    async with client.messages.stream(**{**asking(SAY["hermes"]), **body}) as manager:
        assert comparable(await manager.get_final_message()) == comparable(whole)


async def test_calls_and_what_they_returned_are_sent_back(client: anthropic.AsyncAnthropic) -> None:
    first = await client.messages.create(**asking(SAY["hermes"], tools=TOOLS))
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "9 degrees", "is_error": False}
        for block in first.content[1:]
    ]
    conversation = [{"role": "user", "content": "x"}, {"role": "assistant", "content": first.content}]
    again = await client.messages.create(
        model="fake", messages=[*conversation, {"role": "user", "content": results}], tools=TOOLS, max_tokens=3
    )
    assert (again.content[0].text, again.stop_reason) == ("9 d", "max_tokens")


async def test_a_stop_sequence_is_named(client: anthropic.AsyncAnthropic) -> None:
    message = await client.messages.create(**asking("abcdefgh", stop_sequences=["xyz", "ef"]))
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == ("abcd", "stop_sequence", "ef")
    assert comparable(await accumulated(client, "abcdefgh", stop_sequences=["xyz", "ef"])) == comparable(message)


async def test_formats_and_choices_are_grammars(client: anthropic.AsyncAnthropic, engine: FakeEngine) -> None:
    schema = {"type": "object", "properties": {}}
    format: Any = {"type": "json_schema", "schema": schema}
    await client.messages.create(**asking("a", output_config={"format": format}))
    assert engine.requests[-1].sampling.grammar == Grammar(
        kind="json_schema", source=json.dumps(schema), param="output_config.format.schema"
    )
    for choice, has_stop in (({"type": "any"}, True), ({"type": "tool", "name": "get_weather"}, False)):
        await client.messages.create(**asking("a", tools=TOOLS, tool_choice=choice))
        grammar = engine.requests[-1].sampling.grammar
        assert grammar is not None and '\\"get_weather\\"' in grammar.source
        assert ('\\"stop\\"' in grammar.source) == has_stop
    alone = await client.messages.create(
        **asking(SAY["hermes"], tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    )
    assert [block.type for block in alone.content] == ["text", "tool_use"]
    unheard = await client.messages.create(**asking(SAY["hermes"], tools=TOOLS, tool_choice={"type": "none"}))
    assert [block.type for block in unheard.content] == ["text"]


async def test_choices_without_tools_are_without_effect(http: httpx.AsyncClient) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    answer = await http.post("/v1/messages", json=asking("hi", tool_choice=choice))
    assert answer.status_code == 200, answer.text
    answer = await http.post("/v1/messages", json=asking("hi", tool_choice={"type": "any"}))
    assert answer.status_code == 400


async def test_tokens_are_counted_with_the_templates_parameters(http: httpx.AsyncClient) -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {}}
    assert (await http.post("/v1/messages/count_tokens", json=body)).status_code == 200


async def test_an_assistant_message_at_the_end_is_continued(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    conversation = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The answer is ("}]
    response = await http.post(PATH, json={"messages": conversation, "max_tokens": 3})
    assert response.json()["content"] == [{"type": "text", "text": "The"}], "the fake engine repeats the prompt"
    assert bytes(engine.requests[-1].prompt_token_ids) == b"The answer is ("


@pytest.mark.parametrize("body", [{}, {"tools": TOOLS, "system": "Be brief."}])
async def test_tokens_are_counted(client: anthropic.AsyncAnthropic, engine: FakeEngine, body: dict[str, Any]) -> None:
    asked = asking("hé😀", **body)
    await client.messages.create(**asked)
    del asked["max_tokens"]
    counted = await client.messages.count_tokens(**asked)
    assert counted.input_tokens == len(engine.requests[-1].prompt_token_ids)
    assert len(engine.requests) == 1


def chat_of(**body: Any) -> Any:
    return parse(MessagesRequest, json.dumps({"max_tokens": 9, **body}).encode()).chat


def test_blocks_become_messages() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    conversation = [
        {"role": "system", "content": "no files"},
        {"role": "user", "content": [{"type": "text", "text": "a", **cached}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "d"},
                {"type": "text", "text": "Sure."},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": "é"}},
                {"type": "tool_use", "id": "2", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "and?"},
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "r"}]},
                {"type": "tool_result", "tool_use_id": "2", "is_error": True},
            ],
        },
    ]
    chat = chat_of(messages=conversation, system=[{"type": "text", "text": "Be brief.", **cached}])
    assert [message.values for message in chat.messages] == [
        {"role": "system", "content": "Be brief.\n\nno files"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "Sure.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"a": "é"}}},
                {"type": "function", "id": "2", "function": {"name": "f", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "r", "tool_call_id": "1"},
        {"role": "tool", "content": "", "tool_call_id": "2"},
        {"role": "user", "content": "and?"},
    ]


@pytest.mark.parametrize("calls", [False, True])
def test_an_answer_is_continued_unless_it_ends_with_calls(calls: bool) -> None:
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "a"}, *([call] if calls else [])]}
    assert chat_of(messages=[*USER, answer]).continue_final_message is not calls


def test_what_claude_code_adds_is_accepted() -> None:
    cleared = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    body = {"context_management": cleared, "metadata": {"user_id": "u"}, "thinking": {"type": "adaptive"}}
    assert chat_of(messages=USER, **body).tools == []


@pytest.mark.parametrize(
    ("body", "effort"),
    [
        ({}, None),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "medium"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, "high"),
        ({"output_config": {"effort": "max"}}, "xhigh"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "max"}}, "xhigh"),
    ],
)
def test_thinking_is_a_hint(body: dict[str, Any], effort: str | None) -> None:
    assert chat_of(messages=[{"role": "user", "content": "x"}], **body).reasoning_effort == effort


USER = [{"role": "user", "content": "abc"}]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": None}, "max_tokens is required"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "system", "content": ""}]}, "messages has nothing to answer"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "'image'; this server reads text only",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
            "tool_use belongs to messages of the assistant",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "entry 0 is of type 'bash_20250124'"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema is required"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "name belongs to type tool"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "none of the tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        (
            {"tools": [{**TOOLS[0], "input_schema": {"type": "string"}}], "tool_choice": {"type": "any"}},
            "tools.0.input_schema",
        ),
        ({"messages": [{"role": "user", "content": "a" * 2000}]}, "maximum context length"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
        ({"stop": ["x"]}, "unknown parameter stop"),
    ],
)
async def test_errors_have_anthropics_shape(
    http: httpx.AsyncClient, engine: FakeEngine, change: dict[str, Any], words: str
) -> None:
    response = await http.post(PATH, json={"messages": USER, "max_tokens": 5, **change})
    assert response.status_code == 400, response.text
    answer = response.json()
    assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
    assert words in answer["error"]["message"]
    assert not engine.requests


async def test_errors_have_the_packages_types(client: anthropic.AsyncAnthropic, http: httpx.AsyncClient) -> None:
    with pytest.raises(anthropic.NotFoundError, match="there is no|does not exist"):
        await client.messages.create(**{**asking("a"), "model": "other"})
    with pytest.raises(anthropic.BadRequestError):
        await client.messages.create(**asking(REFUSE))
    with pytest.raises(anthropic.APIStatusError) as late:
        await stream(client, f"abcdefgh{BREAK}")
    assert late.value.body == {
        "type": "error",
        "error": {"type": "api_error", "message": late.value.body["error"]["message"]},
    }
    for path, method, status in ((f"{PATH}/batches", "POST", 404), (PATH, "GET", 405)):
        wrong = await http.request(method, path)
        assert (wrong.status_code, wrong.json()["type"]) == (status, "error")


async def test_the_bytes_of_a_stream(http: httpx.AsyncClient) -> None:
    response = await http.post(PATH, json=asking("ab", stream=True), headers={"x-request-id": "mine"})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *frames, end = response.text.split("\n\n")
    assert end == ""
    for frame in frames:
        name, data = frame.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert json.loads(frames[0].partition("data: ")[2])["message"]["id"] == "msg_mine"
