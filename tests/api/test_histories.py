"""What clients send back of earlier turns: what is open, and what is closed. docs/api.md has the table."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from eagle_server.api.schemas import base
from tests.api.conftest import Templated
from tests.api.fake_engine import FakeEngine

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
# Qwen3.5's and Gemma's rules at once, and arguments as an object.
TEMPLATE = """\
{% for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}
{%- endif %}
{{- m.role }}={% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %};
{%- endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}assistant={% endif %}"""
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
USER, AGAIN = {"role": "user", "content": "u"}, {"role": "user", "content": "v"}


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}, **more}


def assistant(**fields: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", **fields}, AGAIN]


def item(**fields: Any) -> list[dict[str, Any]]:
    return [USER, fields, AGAIN]


# path, body, the prompt
OPEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "null content": (CHAT, {"messages": assistant(content=None)}, "user=u;assistant=;user=v;"),
    "no content": (CHAT, {"messages": assistant()}, "user=u;assistant=;user=v;"),
    "no calls": (CHAT, {"messages": assistant(content=None, tool_calls=[])}, "user=u;assistant=;user=v;"),
    "thinking alone": (
        CHAT,
        {"messages": assistant(content=None, reasoning_content="hm")},
        "user=u;assistant=(hm);user=v;",
    ),
    "thinking as a part": (
        CHAT,
        {"messages": assistant(content=[{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}])},
        "user=u;assistant=(hm)a;user=v;",
    ),
    "a refusal": (CHAT, {"messages": assistant(content=None, refusal="no")}, "user=u;assistant=no;user=v;"),
    "a cut call": (CHAT, {"messages": assistant(tool_calls=[call('{"a": ')])}, 'user=u;assistant=f({"a": );user=v;'),
    "a list as arguments": (CHAT, {"messages": assistant(tool_calls=[call("[1]")])}, "user=u;assistant=f([1]);user=v;"),
    "an object as arguments": (
        CHAT,
        {"messages": assistant(tool_calls=[call({"a": 1})])},
        'user=u;assistant=f({"a": 1});user=v;',
    ),
    "no arguments": (CHAT, {"messages": assistant(tool_calls=[call(None)])}, "user=u;assistant=f({});user=v;"),
    "what a stream sent": (
        CHAT,
        {"messages": assistant(tool_calls=[call("{}", index=0)])},
        "user=u;assistant=f({});user=v;",
    ),
    "a custom tool's call": (
        CHAT,
        {"messages": assistant(tool_calls=[{"id": "c", "type": "custom", "custom": {"name": "f", "input": "x"}}])},
        'user=u;assistant=f({"input": "x"});user=v;',
    ),
    "an old function call": (
        CHAT,
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
                {"role": "function", "name": "f", "content": "1"},
            ]
        },
        "user=u;assistant=f({});tool=1;",
    ),
    "fields of OpenAI's answers": (
        CHAT,
        {"messages": assistant(content="a", annotations=[], audio=None, refusal=None, function_call=None)},
        "user=u;assistant=a;user=v;",
    ),
    "fields of other servers' answers": (
        CHAT,
        {"messages": assistant(content="a", provider_specific_fields={"x": [1]}, thinking_blocks=[{}], id="m", ts=1.5)},
        "user=u;assistant=a;user=v;",
    ),
    "marks of a cache": (
        CHAT,
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "u", "cache_control": {"type": "ephemeral"}}]}
            ]
        },
        "user=u;",
    ),
    "fields of tools": (
        CHAT,
        {"messages": [USER], "tools": [{**TOOL, "cache_control": {"type": "ephemeral"}}]},
        f"user=u;{json.dumps([TOOL])}",
    ),
    "transformers' tools": (
        CHAT,
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "return": {"type": "integer"}}}]},
        'user=u;[{"type": "function", "function": {"name": "f", "return": {"type": "integer"}}}]',
    ),
    "a system message in any place": (
        CHAT,
        {"messages": [USER, {"role": "system", "content": "s"}, AGAIN]},
        "user=u\n\ns\n\nv;",
    ),
    "two system messages": (
        CHAT,
        {"messages": [{"role": "system", "content": "s"}, {"role": "developer", "content": "t"}, USER]},
        "system=s\n\nt;user=u;",
    ),
    "a system message alone": (CHAT, {"messages": [{"role": "system", "content": "s"}]}, "system=s;"),
    "a response's cut call": (
        RESPONSES,
        {"input": item(type="function_call", call_id="c", name="f", arguments='{"a": ', status="incomplete")},
        'user=u;assistant=f({"a": );user=v;',
    ),
    "a response's fields": (
        RESPONSES,
        {
            "input": item(
                type="message",
                role="assistant",
                id="m",
                status="failed",
                agent={"name": "x"},
                content=[{"type": "output_text", "text": "a", "annotations": [], "logprobs": [], "parsed": {"b": 1}}],
            )
        },
        "user=u;assistant=a;user=v;",
    ),
    "a developer's message between": (
        RESPONSES,
        {"input": item(role="developer", content="d")},
        "user=u\n\nd\n\nv;",
    ),
    "a message's cut call": (
        MESSAGES,
        {"messages": assistant(content=[{"type": "tool_use", "id": "c", "name": "f", "input": '{"a": '}])},
        'user=u;assistant=f({"a": );user=v;',
    ),
    "a message's fields": (
        MESSAGES,
        {
            "messages": assistant(
                content=[{"type": "text", "text": "a", "citations": [], "cache_control": {"type": "other"}, "x": 1}],
                id="m",
            )
        },
        "user=u;assistant=a;user=v;",
    ),
    "a system message between": (
        MESSAGES,
        {"system": "s", "messages": [USER, {"role": "system", "content": "t"}, AGAIN]},
        "system=s;user=u\n\nt\n\nv;",
    ),
}

IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
# path, body, the parameter that the error names
CLOSED: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "an unknown parameter": (CHAT, {"messages": [USER], "annotations": []}, "annotations"),
    "an unknown option": (CHAT, {"messages": [USER], "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    "an unknown format": (CHAT, {"messages": [USER], "response_format": {"type": "text", "x": 1}}, "response_format.x"),
    "an unknown choice": (
        CHAT,
        {"messages": [USER], "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
    ),
    "a user without content": (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    "a tool without content": (CHAT, {"messages": [USER, {"role": "tool", "content": None}]}, "messages.1.content"),
    "a part without text": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text"}]}]},
        "messages.0.content.1.text",
    ),
    "a part's text of another type": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 1, "cache_control": {}}]}]},
        "messages.0.content.0.text",
    ),
    "an image": (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content"),
    "an image in the history": (CHAT, {"messages": assistant(content=[IMAGE])}, "messages.1.content"),
    "images beside the text": (CHAT, {"messages": [{**USER, "images": ["x"]}]}, "messages.0.images"),
    "an answer that was spoken": (CHAT, {"messages": assistant(content=None, audio={"id": "x"})}, "messages.1.audio"),
    "a tool without a function": (
        CHAT,
        {"messages": [USER], "tools": [TOOL, {"type": "function"}]},
        "tools.1.function",
    ),
    "a function without a name": (
        CHAT,
        {"messages": [USER], "tools": [TOOL, {"type": "function", "function": {}}]},
        "tools.1.function.name",
    ),
    "an item that stands for others": (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    "a response's unknown parameter": (RESPONSES, {"input": "u", "annotations": []}, "annotations"),
    "a message's unknown parameter": (MESSAGES, {"messages": [USER], "annotations": []}, None),
}


@pytest.fixture
async def strict(templated: Templated) -> AsyncIterator[httpx.AsyncClient]:
    async with templated(TEMPLATE) as client:
        yield client


def complete(path: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"model": "fake", ("max_output_tokens" if path == RESPONSES else "max_tokens"): 1, **body}


@pytest.mark.parametrize("name", OPEN)
async def test_what_clients_send_back_is_taken(strict: httpx.AsyncClient, engine: FakeEngine, name: str) -> None:
    path, body, prompt = OPEN[name]
    answer = await strict.post(path, json=complete(path, body))
    assert answer.status_code == 200, answer.text
    assert bytes(engine.requests[-1].prompt_token_ids).decode() == f"{prompt}assistant="


@pytest.mark.parametrize("name", CLOSED)
async def test_what_has_a_meaning_is_refused_by_name(strict: httpx.AsyncClient, engine: FakeEngine, name: str) -> None:
    path, body, param = CLOSED[name]
    answer = await strict.post(path, json=complete(path, body))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert param is None or error["param"] == param, error
    assert param is None or param in error["message"]
    assert not engine.requests


async def test_ignored_fields_are_logged_once(
    strict: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "_ignored", set())
    body = {"messages": assistant(content="a", strange=1, **{"two\nlines": 2, "n" * 99: 3})}
    with caplog.at_level(logging.INFO, base.logger.name):
        for _ in range(2):
            assert (await strict.post(CHAT, json=complete(CHAT, body))).status_code == 200
    names = [record.getMessage().rpartition(": ")[2] for record in caplog.records if record.name == base.logger.name]
    assert sorted(names) == sorted(["'strange'", r"'two\nlines'", f"'{'n' * base.LONGEST_NAME}'"])
    many = {f"field{number}": 1 for number in range(200)}
    assert (await strict.post(CHAT, json=complete(CHAT, {"messages": [USER | many]}))).status_code == 200
    assert len(base._ignored) < 100, "a client cannot fill the log"
