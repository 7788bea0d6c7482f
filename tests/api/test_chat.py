"""Responses of /v1/chat/completions, over a fake engine that repeats the prompt."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from eagle_server.api.schemas.chat import Message
from eagle_server.text.chat_template import ChatTemplate, Conversation
from tests.api.conftest import Templated
from tests.api.fake_engine import BREAK, EOS, REFUSE, FakeEngine

PATH = "/v1/chat/completions"
TEMPLATE = """\
{% if tools %}{{ tools | tojson }};{% endif %}
{% for m in messages %}{{ m.role }}={{ m.content }}
{%- for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments.x }}){% endfor %};{% endfor %}
{% if shout %}!{% endif %}
{% if add_generation_prompt %}assistant={% endif %}"""
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "b": 1, "a": "é<"}}}


@pytest.fixture
async def chat(templated: Templated) -> AsyncIterator[httpx.AsyncClient]:
    async with templated(TEMPLATE) as client:
        yield client


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


async def answer(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await http.post(PATH, json={"messages": user("hé😀"), **body})
    assert response.status_code == 200, response.text
    parsed: dict[str, Any] = response.json()
    return parsed


async def chunks(http: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    response = await http.post(PATH, json={"messages": user("hé😀"), "stream": True, **body})
    assert response.status_code == 200, response.text
    frames = response.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def said(events: list[dict[str, Any]], index: int = 0) -> str:
    deltas = (choice for event in events for choice in event["choices"] if choice["index"] == index)
    return "".join(choice["delta"].get("content", "") for choice in deltas)


def prompt_of(engine: FakeEngine) -> str:
    return bytes(token for token in engine.requests[-1].prompt_token_ids if token < 256).decode()


async def test_an_answer_has_openais_shape(chat: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = await answer(chat, max_completion_tokens=9, seed=0)
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    spec = body.pop("metrics")["speculative_decoding"]
    assert spec["num_spec_tokens"] == 3
    assert prompt_of(engine) == "user=hé😀;assistant="
    assert body == {
        "object": "chat.completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "user=hé\ufffd", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": 23,
            "completion_tokens": 9,
            "total_tokens": 32,
            "prompt_tokens_details": {"cached_tokens": 11},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": spec["num_accepted_draft_tokens"],
                "rejected_prediction_tokens": spec["num_draft_tokens"] - spec["num_accepted_draft_tokens"],
            },
        },
    }


@pytest.mark.parametrize("seed", range(4))
async def test_a_stream_is_role_then_content_then_reason(chat: httpx.AsyncClient, seed: int) -> None:
    options = {"include_usage": True}
    events = await chunks(chat, max_tokens=44, seed=seed, stream_options=options)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    *content, last = [event["choices"][0] for event in events[:-1]]
    assert content[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(choice["delta"]) == {"content"} and choice["finish_reason"] is None for choice in content[1:])
    assert (last["delta"], last["finish_reason"]) == ({}, "length")
    assert "\ufffd" not in said(events[:-2])
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    whole = await answer(chat, max_tokens=44, seed=seed)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole["usage"]
    assert said(events) == whole["choices"][0]["message"]["content"]


@pytest.mark.parametrize("seed", range(4))
async def test_no_part_of_a_stop_string_is_ever_streamed(chat: httpx.AsyncClient, seed: int) -> None:
    events = await chunks(chat, messages=user("one STOPPED two STOP three"), stop="STOP ", max_tokens=100, seed=seed)
    assert said(events) == "user=one STOPPED two "
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    [ended] = [choice["finish_reason"] for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert ended == "stop"


async def test_choices_each_begin_with_their_role(chat: httpx.AsyncClient, engine: FakeEngine) -> None:
    events = await chunks(chat, n=3, max_tokens=8)
    roles = [c["index"] for e in events for c in e["choices"] if c["delta"].get("role")]
    assert sorted(roles) == [0, 1, 2]
    assert [said(events, index) for index in range(3)] == ["user=hé"] * 3
    assert (await answer(chat, n=3, max_tokens=8))["usage"]["prompt_tokens"] == 23


async def test_logprobs_have_bytes(chat: httpx.AsyncClient) -> None:
    asked = {"messages": user(f"😀{EOS}"), "logprobs": True, "top_logprobs": 2, "max_tokens": 9}
    entries = (await answer(chat, **asked))["choices"][0]["logprobs"]["content"]
    assert entries[0] == {
        "token": "u",
        "logprob": -0.25,
        "bytes": [117],
        "top_logprobs": [
            {"token": "u", "logprob": -0.25, "bytes": [117]},
            {"token": "v", "logprob": -1.25, "bytes": [118]},
        ],
    }
    assert (entries[5]["token"], entries[5]["bytes"]) == ("bytes:\\xf0", [0xF0])
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == "user=😀".encode()
    streamed = [c["logprobs"]["content"] for e in await chunks(chat, **asked) for c in e["choices"] if c["logprobs"]]
    assert [entry for part in streamed for entry in part] == entries
    plain = (await answer(chat, logprobs=True, max_tokens=1))["choices"][0]["logprobs"]
    assert plain == {"content": [{**entries[0], "top_logprobs": []}], "refusal": None}


async def test_without_a_limit_a_chat_may_fill_the_context(chat: httpx.AsyncClient, engine: FakeEngine) -> None:
    await answer(chat, messages=user(f"a{EOS}"))
    assert engine.requests[-1].sampling.max_tokens == 2000 - len(engine.requests[-1].prompt_token_ids)


async def test_content_may_be_text_parts(chat: httpx.AsyncClient, engine: FakeEngine) -> None:
    await answer(chat, messages=user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), max_tokens=1)
    assert prompt_of(engine) == "user=a\nb;assistant="


async def test_tools_go_through_the_template(chat: httpx.AsyncClient, engine: FakeEngine) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 7}'}}
    messages = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "1", "content": "8"},
    ]
    await answer(chat, messages=messages, tools=[TOOL], tool_choice="auto", max_tokens=1)
    text = json.dumps([TOOL], ensure_ascii=False)
    assert prompt_of(engine) == f"{text};system=s;user=u;assistant=f(7);tool=8;assistant="
    await answer(chat, messages=messages, tools=[TOOL], tool_choice="none", max_tokens=1)
    assert prompt_of(engine).startswith("system=s;")


WRITTEN = ["{,", "77", '{"x": "\\ud800"}', "[1]", "null", '"x"', '{"a": ', "[" * 100_000]


@pytest.mark.parametrize("arguments", WRITTEN, ids=range(len(WRITTEN)))
async def test_arguments_that_are_no_object_stay_in_the_prompt_as_they_were_written(
    chat: httpx.AsyncClient, engine: FakeEngine, tmp_path: Path, arguments: str
) -> None:
    call = {"id": "1", "type": "function", "index": 0, "function": {"name": "f", "arguments": arguments}}
    messages = [*user("a"), {"role": "assistant", "content": None, "tool_calls": [call]}, *user("b")]
    conversation = Conversation([Message.model_validate(message).values for message in messages])
    for source, expected in {
        "{{ given | tojson }}": arguments,
        "{{ given if given is string else given | tojson }}": arguments,
        "{% for k, v in given | items %}{{ k }}={{ v }}{% endfor %}": f"arguments={arguments}",
        "{% for k in given %}{{ k }}={{ given[k] }}{% endfor %}": f"arguments={arguments}",
    }.items():
        calls = "{% for c in m.tool_calls or [] %}{% set given = c.function.arguments %}" + source + "{% endfor %}"
        template = ChatTemplate("{% for m in messages %}{{ m.content }}" + calls + ";{% endfor %}")
        assert template.render(conversation) == f"a;{expected};b;"
    response = await chat.post(PATH, json={"messages": messages, "max_tokens": 1, "truncate_prompt_tokens": 100})
    assert response.status_code == 200, response.text


async def test_the_templates_parameters(chat: httpx.AsyncClient, engine: FakeEngine) -> None:
    await answer(chat, messages=user("a"), chat_template_kwargs={"shout": True}, max_tokens=1)
    assert prompt_of(engine) == "user=a;!assistant="
    await answer(chat, messages=user("a"), add_generation_prompt=False, max_tokens=1)
    assert prompt_of(engine) == "user=a;"
    begun = [*user("a"), {"role": "assistant", "content": "Once upon "}]
    await answer(chat, messages=begun, continue_final_message=True, max_tokens=1)
    assert prompt_of(engine) == "user=a;assistant=Once upon "


async def test_without_a_template_chats_are_dialogues(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = await answer(http, messages=user("a"), max_tokens=100)
    assert prompt_of(engine) == "User: a\nAssistant:"
    assert body["choices"][0]["message"]["content"] == "User: a\nAssistant:" * 5 + "User: a\nAs"
    # The user's next message would begin on a new line. There the reply ends.
    body = await answer(http, messages=user("a\nUser: b"), max_tokens=100)
    assert body["choices"][0]["message"]["content"] == "User: a"
    assert body["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"messages": None}, "messages", "required"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "list"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "content: is required"),
        ({"messages": [{"content": "a"}]}, "messages.0.role", "required"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages.0.role", "'user'"),
        ({"messages": user(3)}, "messages.0.content", "string or a list"),
        (
            {"messages": user([{"type": "image_url", "image_url": {"url": "http://x"}}])},
            "messages.0.content",
            "of type 'image_url'; this server reads text only",
        ),
        ({"messages": user([{"type": "text"}])}, "messages.0.content.0.text", "is required"),
        ({"messages": user([{"type": "text", "text": 3}])}, "messages.0.content.0.text", "string"),
        ({"messages": user(["a"])}, "messages.0.content", "entry 0 should be an object"),
        ({"messages": [{"role": "user", "content": "a", "audio": {"id": "x"}}]}, "messages.0.audio", "text only"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [TOOL]}]}, None, ""),
        ({"messages": user("a" * 2001)}, "messages", "maximum context length"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differs"),
        ({"max_completion_tokens": 3, "min_tokens": 4}, "min_tokens", "exceeds"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs: true"),
        ({"logprobs": 2}, "logprobs", "boolean"),
        ({"tools": [TOOL, {"type": "function"}]}, "tools.1.function", "required"),
        ({"tools": [TOOL], "tool_choice": "must"}, "tool_choice", "none, auto, required or"),
        ({"tool_choice": "auto"}, "tool_choice", "needs tools"),
        ({"chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs", "no variable thinking"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "may not replace messages"),
        ({"chat_template": "x"}, "chat_template", "unknown parameter"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "exclude"),
        ({"prompt": "a"}, "prompt", "unknown parameter"),
        ({"functions": [{}]}, "functions", "not supported"),
        ({"modalities": ["audio"]}, "modalities", "not supported"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "needs tools"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
async def test_a_wrong_parameter_is_named(
    chat: httpx.AsyncClient, engine: FakeEngine, change: dict[str, Any], param: str | None, words: str
) -> None:
    response = await chat.post(PATH, json={"messages": user("a"), **change})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param
    assert words in error["message"]
    assert not engine.requests


async def test_tools_need_a_template_that_has_a_place_for_them(http: httpx.AsyncClient) -> None:
    response = await http.post(PATH, json={"messages": user("a"), "tools": [TOOL]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"


async def test_errors_of_the_engine_look_as_they_do_elsewhere(chat: httpx.AsyncClient) -> None:
    refused = await chat.post(PATH, json={"messages": user(REFUSE), "max_tokens": 4})
    assert (refused.status_code, "it does not fit" in refused.text) == (400, True)
    events = await chunks(chat, messages=user(f"{BREAK}abc"), max_tokens=40)
    assert "not finite" in events[-1]["error"]["message"]
