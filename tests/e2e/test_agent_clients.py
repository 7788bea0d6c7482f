"""The demo behind /v1/responses and /v1/messages, called by the openai and anthropic packages."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.e2e.conftest import FIXED_TREES, PROMPTS, README_FLAGS, Served, serving
from tests.e2e.test_tool_calls import COLOUR, TEMPLATE

pytestmark = pytest.mark.slow  # a server of its own; tests/api has both APIs over the fake engine
RESPONSE_TOOL: Any = {"type": "function", "name": "paint", "parameters": COLOUR, "strict": True}
MESSAGE_TOOL: Any = {"name": "paint", "input_schema": COLOUR}
ASKED = "def paint(name, rgb, comment):"
MESSAGES: Any = [{"role": "user", "content": ASKED}]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("agents")
    (directory / "template.jinja").write_text(TEMPLATE)
    flags = ("--chat-template", str(directory / "template.jinja"), "--cpu-threads", "1", *README_FLAGS, *FIXED_TREES)
    with serving(directory / "log", *flags) as up:
        yield up


@pytest.fixture(scope="module")
def client(running: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def claude(running: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0) as made:
        yield made


def drafted(answer: Any) -> Any:
    return answer.model_extra["metrics"]["speculative_decoding"]


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_equal_seeds_give_the_chats_text(
    client: openai.OpenAI, claude: anthropic.Anthropic, temperature: float
) -> None:
    messages: Any = [{"role": "system", "content": "# code"}, {"role": "user", "content": PROMPTS[0]}]
    extra = {"seed": 7, "temperature": temperature}
    chat = client.chat.completions.create(model="demo", messages=messages, max_tokens=40, extra_body=extra)
    response = client.responses.create(
        model="demo", instructions="# code", input=PROMPTS[0], max_output_tokens=40, extra_body=extra
    )
    message = claude.messages.create(
        model="demo", system="# code", messages=[messages[1]], max_tokens=40, extra_body=extra
    )
    plain = client.responses.create(
        model="demo", input=messages, max_output_tokens=40, extra_body={**extra, "speculative": False}
    )
    text = chat.choices[0].message.content
    assert text
    assert text == response.output_text == plain.output_text == "".join(block.text for block in message.content)
    assert drafted(response)["num_accepted_draft_tokens"] > 0
    assert drafted(message)["num_accepted_draft_tokens"] > 0
    assert drafted(plain) is None
    assert response.usage is not None and chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == chat.usage.prompt_tokens
    with claude.messages.stream(
        model="demo", system="# code", messages=[messages[1]], max_tokens=40, extra_body=extra
    ) as events:
        assert events.get_final_text() == text


def test_a_tools_round_trip_by_responses(client: openai.OpenAI) -> None:
    body: Any = {"model": "demo", "tools": [RESPONSE_TOOL], "max_output_tokens": 400, "temperature": 0}
    called = client.responses.create(**body, input=ASKED, tool_choice="required", parallel_tool_calls=False)
    [call] = called.output
    assert call.type == "function_call"
    assert set(json.loads(call.arguments)) == set(COLOUR["properties"])
    with client.responses.stream(**body, input=ASKED, tool_choice={"type": "function", "name": "paint"}) as events:
        [again] = events.get_final_response().output
    assert again.type == "function_call"
    assert again.arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "painted"}
    body |= {"max_output_tokens": 10, "tool_choice": "none"}
    answer = client.responses.create(**body, input=[{"role": "user", "content": ASKED}, *called.output, result])
    assert answer.output_text


def test_a_tools_round_trip_by_messages(claude: anthropic.Anthropic) -> None:
    body: Any = {"model": "demo", "tools": [MESSAGE_TOOL], "max_tokens": 400, "extra_body": {"temperature": 0}}
    called = claude.messages.create(**body, messages=MESSAGES, tool_choice={"type": "tool", "name": "paint"})
    [call] = called.content
    assert call.type == "tool_use" and called.stop_reason == "tool_use"
    assert set(call.input) == set(COLOUR["properties"])
    choice = {"type": "any", "disable_parallel_tool_use": True}
    with claude.messages.stream(**body, messages=MESSAGES, tool_choice=choice) as events:
        [again] = events.get_final_message().content
    assert again.type == "tool_use"
    assert again.input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "painted"}
    conversation = [*MESSAGES, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    counted = claude.messages.count_tokens(model="demo", messages=conversation, tools=[MESSAGE_TOOL])
    answer = claude.messages.create(**{**body, "max_tokens": 10}, messages=conversation)
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == counted.input_tokens
    assert answer.content


def test_a_schema_is_followed(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    format: Any = {"type": "json_schema", "name": "colour", "schema": COLOUR, "strict": True}
    response = client.responses.create(
        model="demo", input=ASKED, max_output_tokens=400, temperature=0, text={"format": format}
    )
    message = claude.messages.create(
        model="demo",
        messages=MESSAGES,
        max_tokens=400,
        output_config={"format": {"type": "json_schema", "schema": COLOUR}},
        extra_body={"temperature": 0},
    )
    [block] = message.content
    assert block.type == "text"
    assert json.loads(response.output_text) == json.loads(block.text)
    assert set(json.loads(block.text)) == set(COLOUR["properties"])


def test_a_stop_sequence_ends_the_answer(claude: anthropic.Anthropic) -> None:
    body: Any = {"model": "demo", "messages": MESSAGES, "max_tokens": 40, "extra_body": {"temperature": 0}}
    [whole] = claude.messages.create(**body).content
    assert whole.type == "text"
    stop = whole.text[6:9]
    message = claude.messages.create(**body, stop_sequences=["no such text", stop])
    assert "".join(block.text for block in message.content if block.type == "text") == whole.text.partition(stop)[0]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_a_stream_that_is_left_ends_its_request(
    running: Served, client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    def engine() -> dict[str, Any]:
        state: dict[str, Any] = httpx.get(f"{running.url}/v1/server_info").json()["engine"]
        return state

    before, whole = engine()["generated_tokens"], {"ignore_eos": True, "min_tokens": 900}
    with client.responses.stream(model="demo", input=ASKED, max_output_tokens=900, extra_body=whole) as events:
        assert next(iter(events)).type == "response.created"
    with claude.messages.stream(model="demo", messages=MESSAGES, max_tokens=900, extra_body=whole) as blocks:
        assert next(iter(blocks)).type == "message_start"
    while engine()["running"]:
        time.sleep(0.05)
    assert engine()["generated_tokens"] - before < 900
