"""/v1/responses, as the openai package and as bytes show it. The fake engine repeats the user's text."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from eagle_server.api.errors import ApiError
from eagle_server.api.schemas.base import parse
from eagle_server.api.schemas.responses import ResponsesRequest
from eagle_server.request import Grammar
from tests.api.conftest import Templated
from tests.api.fake_engine import BREAK, EOS, REFUSE, FakeEngine
from tests.api.test_output_items import INVALID
from tests.api.test_tools import CALLS, CITY, HINTS, SAY, TEMPLATE

PATH = "/v1/responses"
TOOLS: list[Any] = [
    {"type": "function", "name": "get_weather", "description": "now", "parameters": CITY, "strict": True},
    {"type": "function", "name": "stop", "parameters": {"type": "object"}, "strict": True},
]
BEGIN = ["response.created", "response.in_progress"]
TEXT_BEGINS = ["response.output_item.added", "response.content_part.added"]
TEXT_ENDS = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
CALL_ENDS = ["response.function_call_arguments.done", "response.output_item.done"]


@pytest.fixture
async def http(templated: Templated) -> AsyncIterator[httpx.AsyncClient]:
    async with templated(TEMPLATE % HINTS["hermes"]) as client:
        yield client


@pytest.fixture
def client(http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=http)


def asking(say: str, **body: Any) -> dict[str, Any]:
    return {"model": "fake", "input": say + EOS, **body}


async def stream(client: openai.AsyncOpenAI, say: str, **body: Any) -> list[Any]:
    return [each async for each in await client.responses.create(**asking(say, stream=True, **body))]


def comparable(response: Any) -> dict[str, Any]:
    """Without ids, times and metrics. The package adds parsed and parsed_arguments to what it streams."""
    values: dict[str, Any] = response.model_dump()
    for name in ("id", "created_at", "completed_at", "metrics"):
        values.pop(name)
    for item in values["output"]:
        item.pop("id")
        for part in (item, *item.get("content", [])):
            for name in ("call_id", "parsed", "parsed_arguments"):
                part.pop(name, None)
    return values


def without_deltas(events: list[Any]) -> list[str]:
    return [each.type for each in events if not each.type.endswith(".delta")]


async def test_what_codex_sends_without_tools_is_without_effect(http: httpx.AsyncClient) -> None:
    body = {"model": "fake", "input": "hi", "tool_choice": "auto", "parallel_tool_calls": False}
    search = {"type": "web_search", "external_web_access": True, "filters": {"allowed_domains": ["a.b"]}}
    for tools in ([], [{"type": "web_search", "external_web_access": False}], [search]):
        answer = await http.post(PATH, json={**body, "tools": tools})
        assert answer.status_code == 200, answer.text
    assert (await http.post(PATH, json={**body, "tool_choice": "required"})).status_code == 400


async def test_a_text(client: openai.AsyncOpenAI) -> None:
    response = await client.responses.create(**asking("hé😀", metadata={"a": "b"}, instructions="Be brief."))
    # The template prints the user's message alone, so it says the instructions, too.
    told = "Be brief.\n\nhé😀"
    assert (response.output_text, response.status, response.incomplete_details) == (told, "completed", None)
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (19, 19, 38)
    assert (response.metadata, response.instructions, response.store) == ({"a": "b"}, "Be brief.", False)
    assert response.model_extra is not None
    assert response.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


@pytest.mark.parametrize("seed", range(4))  # each seed gives other numbers of tokens per event
async def test_the_events_of_a_text(client: openai.AsyncOpenAI, seed: int) -> None:
    whole = await client.responses.create(**asking("hé😀", extra_body={"seed": seed}))
    events = await stream(client, "hé😀", extra_body={"seed": seed})
    assert [each.sequence_number for each in events] == [*range(len(events))]
    assert without_deltas(events) == [*BEGIN, *TEXT_BEGINS, *TEXT_ENDS, "response.completed"]
    deltas = events[4:-4]
    assert {each.type for each in deltas} == {"response.output_text.delta"}
    assert "".join(each.delta for each in deltas) == "hé😀"
    assert len(deltas) > 1
    assert {each.item_id for each in events[3:-2]} == {events[2].item.id}
    assert (events[0].response.status, events[0].response.output, events[0].response.usage) == ("in_progress", [], None)
    assert events[-4].text == events[-3].part.text == events[-2].item.content[0].text == "hé😀"
    assert comparable(events[-1].response) == comparable(whole)


@pytest.mark.parametrize("seed", range(4))
async def test_calls(client: openai.AsyncOpenAI, seed: int) -> None:
    body = {"tools": TOOLS, "extra_body": {"seed": seed}}
    whole = await client.responses.create(**asking(SAY["hermes"], **body))
    assert [item.type for item in whole.output] == ["message", "function_call", "function_call"]
    assert whole.output_text == "Sure."
    calls: list[Any] = whole.output[1:]
    assert [(call.name, call.arguments, call.status) for call in calls] == [(*each, "completed") for each in CALLS]
    events = await stream(client, SAY["hermes"], **body)
    call = ["response.output_item.added", *CALL_ENDS]
    assert without_deltas(events) == [*BEGIN, *TEXT_BEGINS, *TEXT_ENDS, *call, *call, "response.completed"]
    assert comparable(events[-1].response) == comparable(whole)
    for index, (_, arguments) in enumerate(CALLS, start=1):
        [done] = [each for each in events if each.type == CALL_ENDS[0] and each.output_index == index]
        deltas = [each.delta for each in events if each.type.endswith("arguments.delta") and each.output_index == index]
        assert "".join(deltas) == done.arguments == arguments
    async with client.responses.stream(**asking(SAY["hermes"], tools=TOOLS)) as manager:
        final = await manager.get_final_response()
    assert [getattr(item, "parsed_arguments", None) for item in final.output[1:]] == [{"city": "Malmö 😀"}, {}]


async def test_calls_and_what_they_returned_are_sent_back(client: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    first = await client.responses.create(**asking(SAY["hermes"], tools=TOOLS))
    call: Any = first.output[1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "9 degrees"}
    again = await client.responses.create(
        model="fake", input=[{"role": "user", "content": "x"}, *first.output, result], tools=TOOLS, max_output_tokens=3
    )
    assert again.output_text == "9 d"
    assert (again.status, again.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_what_is_cut_off_is_incomplete(client: openai.AsyncOpenAI) -> None:
    whole = await client.responses.create(**asking("abcdef", max_output_tokens=4))
    events = await stream(client, "abcdef", max_output_tokens=4)
    assert (whole.output_text, whole.status, whole.output[0].status) == ("abcd", "incomplete", "incomplete")
    assert events[-1].type == "response.incomplete"
    assert comparable(events[-1].response) == comparable(whole)


async def test_a_call_that_breaks_off_is_text(client: openai.AsyncOpenAI) -> None:
    body = {"tools": TOOLS, "max_output_tokens": 71}
    whole = await client.responses.create(**asking(SAY["hermes"], **body))
    assert [(item.type, item.status) for item in whole.output] == [("message", "incomplete")]
    events = await stream(client, SAY["hermes"], **body)
    assert comparable(events[-1].response) == comparable(whole)
    assert not any(each.item.type == "function_call" for each in events if hasattr(each, "item"))


@pytest.mark.parametrize("given", INVALID)
@pytest.mark.parametrize("seed", range(2))
async def test_no_invalid_call_begins(client: openai.AsyncOpenAI, seed: int, given: str) -> None:
    call = '<tool_call>{"name": "get_weather", "arguments": %s}</tool_call>'
    invalid, body = call % given, {"tools": TOOLS, "extra_body": {"seed": seed}}
    for say, kinds in (
        (invalid, ["message"]),
        (f"a {call % '{}'} {invalid} b", ["message", "function_call", "message"]),
    ):
        whole = await client.responses.create(**asking(say, **body))
        assert [item.type for item in whole.output] == kinds
        assert invalid in whole.output[-1].content[0].text
        async with client.responses.stream(**asking(say, **body)) as manager:
            assert comparable(await manager.get_final_response()) == comparable(whole)
        events = await stream(client, say, **body)
        ended = [each.item for each in events if each.type == "response.output_item.done"]
        assert ended == events[-1].response.output
        again = {
            "model": "fake",
            "input": [*(item.model_dump(exclude_none=True) for item in ended), *asking_back(ended)],
        }
        await client.responses.create(**again)


def asking_back(items: list[Any]) -> list[Any]:
    """What an agent sends after its calls."""
    calls = [item for item in items if item.type == "function_call"]
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "r"} for call in calls]
    return [*outputs, {"role": "user", "content": "go on" + EOS}]


async def test_formats_and_choices_are_grammars(client: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    schema = {"type": "object", "properties": {}}
    format: Any = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    response = await client.responses.create(**asking("a", text={"format": format}))
    assert engine.requests[-1].sampling.grammar == Grammar(
        kind="json_schema", source=json.dumps(schema), param="text.format.schema"
    )
    assert response.model_dump(exclude_none=True)["text"]["format"]["name"] == "n"
    await client.responses.create(**asking("a", text={"format": {"type": "json_object"}}))
    assert engine.requests[-1].sampling.grammar == Grammar(kind="json_object", param="text.format")
    choice: Any = {"type": "function", "name": "get_weather"}
    named = await client.responses.create(**asking("a", tools=TOOLS, tool_choice=choice))
    grammar = engine.requests[-1].sampling.grammar
    assert grammar is not None and '\\"get_weather\\"' in grammar.source and '\\"stop\\"' not in grammar.source
    assert named.model_dump(exclude_none=True)["tool_choice"] == choice


def messages(**body: Any) -> list[dict[str, Any]]:
    return [message.values for message in parse(ResponsesRequest, json.dumps(body).encode()).chat.messages]


def test_items_become_messages() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}', "status": "completed"}
    items = [
        {"role": "developer", "content": "no files"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Sure.", "annotations": []}],
        },
        call,
        {**call, "call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": "r"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "s"}]},
    ]
    called = {"name": "f", "arguments": {"a": 1}}
    assert messages(input=items, instructions="Be brief.") == [
        {"role": "system", "content": "Be brief.\n\nno files"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "Sure.",
            "tool_calls": [
                {"type": "function", "id": "1", "function": called},
                {"type": "function", "id": "2", "function": called},
            ],
        },
        {"role": "tool", "content": "r", "tool_call_id": "1"},
        {"role": "tool", "content": "s", "tool_call_id": "2"},
    ]
    assert messages(input="hi") == [{"role": "user", "content": "hi"}]
    [_, calling] = messages(input=[{"role": "user", "content": "x"}, call])
    assert (calling["content"], len(calling["tool_calls"])) == ("", 1)


async def test_a_function_keeps_its_namespace(client: openai.AsyncOpenAI) -> None:
    tools: Any = [{"type": "namespace", "name": "weather", "description": "of cities", "tools": [TOOLS[0]]}]
    said = SAY["hermes"].replace("get_weather", "weather.get_weather")
    whole = await client.responses.create(**asking(said, tools=tools))
    calls: list[Any] = whole.output[1:]
    assert [(call.namespace, call.name) for call in calls] == [("weather", "get_weather"), (None, "stop")]
    items = [{"role": "user", "content": "x"}, *[item.model_dump(exclude_none=True) for item in whole.output]]
    chat = parse(ResponsesRequest, json.dumps({"input": items, "tools": tools}).encode()).chat
    assert [tool["function"]["name"] for tool in chat.tools] == ["weather.get_weather"]
    assert [call.function.name for call in chat.messages[-1].tool_calls] == ["weather.get_weather", "stop"]


def test_what_codex_and_other_agents_add_is_accepted() -> None:
    body = {
        "input": "x",
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"},
        "prompt_cache_key": "k",
        "text": {"verbosity": "medium"},
        "truncation": "disabled",
        "service_tier": "auto",
        "stream": True,
        "stream_options": {"include_obfuscation": False},
        "safety_identifier": "s",
        "user": "me",
        "background": False,
        "client_metadata": {"session_id": "s"},
        "tools": [{"type": "web_search", "external_web_access": False}],
    }
    chat = parse(ResponsesRequest, json.dumps(body).encode()).chat
    assert (chat.reasoning_effort, chat.stream, chat.tools) == ("low", True, [])


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"input": None}, "input", "required"),
        ({"input": 7}, "input", "should be a string or a list"),
        ({"input": []}, "input", "has nothing to answer"),
        ({"input": [{"type": "reasoning"}]}, "input", "has nothing to answer"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "entry 0 is of type 'item_reference'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.message.content", "text only"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.message.role", "system"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation as input"),
        ({"store": True}, "store", "set it to false"),
        ({"truncation": "auto"}, "truncation", "not supported"),
        ({"include": ["message.output_text.logprobs"]}, "include", "not supported"),
        ({"tools": [{"type": "mcp"}]}, "tools", "entry 0 is of type 'mcp'; supported: function, namespace, web_search"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.external_web_access", "required"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, "tools.0.tools", "'custom'"),
        ({"tools": [{"type": "function"}]}, "tools.0.name", "required"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "none, auto, required"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "none of the tools"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {"tools": [{**TOOLS[0], "parameters": {"type": "string"}}], "tool_choice": "required"},
            "tools.0.parameters",
            "tools.0.parameters",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater"),
        ({"max_output_tokens": 5, "min_tokens": 6}, "min_tokens", "exceeds max_output_tokens, 5"),
        ({"input": "x" * 3000}, "input", "maximum context length"),
        ({"messages": []}, "messages", "unknown parameter messages"),
        ({"n": 2}, "n", "unknown parameter n"),
        ({"model": "other"}, "model", "does not exist"),
    ],
)
async def test_errors_name_this_api_s_parameters(
    http: httpx.AsyncClient, engine: FakeEngine, change: dict[str, Any], param: str, words: str
) -> None:
    response = await http.post(PATH, json={"input": "abc", **change})
    assert response.status_code in (400, 404), response.text
    error = response.json()["error"]
    assert (error["param"], words in error["message"]) == (param, True), error
    assert not engine.requests


async def test_a_failure_ends_the_stream(http: httpx.AsyncClient, client: openai.AsyncOpenAI) -> None:
    events = await stream(client, f"abcdefgh{BREAK}")
    assert without_deltas(events)[-1] == "response.failed"
    assert [each.sequence_number for each in events] == [*range(len(events))]
    assert (events[-1].response.status, events[-1].response.error.code) == ("failed", "server_error")
    with pytest.raises(openai.BadRequestError):
        await stream(client, REFUSE)


async def test_the_bytes_of_a_stream(http: httpx.AsyncClient) -> None:
    response = await http.post(PATH, json=asking("ab", stream=True), headers={"x-request-id": "mine"})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *frames, end = response.text.split("\n\n")
    assert end == "", "OpenAI's stream has no [DONE]"
    for frame in frames:
        name, data = frame.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert json.loads(frames[0].partition("data: ")[2])["response"]["id"] == "resp_mine"


def test_a_body_of_a_chat_is_refused() -> None:
    with pytest.raises(ApiError, match="input is required"):
        parse(ResponsesRequest, b'{"model": "fake"}')
