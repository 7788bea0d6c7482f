"""A form of the answer beside tools: the model may call, or answer in the form. In all three APIs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from eagle_server.engine.grammars.sources import llguidance_source
from eagle_server.request import Grammar
from tests.api.conftest import Templated
from tests.api.fake_engine import EOS, FakeEngine

TEMPLATE = "{% if tools %}{% endif %}{{ messages[-1].content }}"
FORM = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Kiel"}}\n</tool_call>'
ANSWER = f'{{"a": {json.dumps(CALL)}}}'
PATHS = ("chat/completions", "responses", "messages")


@pytest.fixture
def flags() -> list[str]:
    return ["--tool-call-parser", "hermes"]


@pytest.fixture
async def http(templated: Templated, flags: list[str]) -> AsyncIterator[httpx.AsyncClient]:
    async with templated(TEMPLATE, *flags) as client:
        yield client


def asking(path: str, said: str, *, form: Any = FORM, strict: bool = False, **change: Any) -> dict[str, Any]:
    """A body with one function and a form of the answer."""
    if path == "responses":
        tool = {"type": "function", "name": "f", "parameters": CITY, "strict": strict}
        text = {"format": {"type": "json_schema", "name": "n", "schema": form}}
        return {"input": said + EOS, "tools": [tool], "text": text, **change}
    messages = [{"role": "user", "content": said + EOS}]
    if path == "messages":
        output = {"format": {"type": "json_schema", "schema": form}}
        tool = {"name": "f", "input_schema": CITY}
        return {"messages": messages, "max_tokens": 500, "tools": [tool], "output_config": output, **change}
    function = {"name": "f", "parameters": CITY, "strict": strict}
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": form}}
    tools = [{"type": "function", "function": function}]
    return {"messages": messages, "tools": tools, "response_format": schema, **change}


async def ask(http: httpx.AsyncClient, path: str, said: str, **change: Any) -> dict[str, Any]:
    answer = await http.post(f"/v1/{path}", json=asking(path, said, **change))
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def grammar_of(engine: FakeEngine) -> Grammar:
    grammar = engine.requests[-1].sampling.grammar
    assert grammar is not None
    return grammar


def parts(path: str, body: dict[str, Any]) -> tuple[str, list[str], str]:
    """The text, the arguments of the calls, and why the answer ended."""
    if path == "responses":
        texts = [part["text"] for item in body["output"] for part in item.get("content") or []]
        return "".join(texts), [i["arguments"] for i in body["output"] if i["type"] == "function_call"], body["status"]
    if path == "messages":
        texts = [block["text"] for block in body["content"] if block["type"] == "text"]
        calls = [json.dumps(block["input"]) for block in body["content"] if block["type"] == "tool_use"]
        return "".join(texts), calls, body["stop_reason"]
    message = body["choices"][0]["message"]
    calls = [call["function"]["arguments"] for call in message.get("tool_calls") or []]
    return message["content"] or "", calls, body["choices"][0]["finish_reason"]


ENDS = {
    "chat/completions": ("tool_calls", "stop"),
    "responses": ("completed", "completed"),
    "messages": ("tool_use", "end_turn"),
}


@pytest.mark.parametrize("path", PATHS)
async def test_the_answer_is_a_call_or_a_text(http: httpx.AsyncClient, engine: FakeEngine, path: str) -> None:
    called = await ask(http, path, CALL)
    assert parts(path, called) == ("", ['{"city": "Kiel"}'], ENDS[path][0])
    grammar = grammar_of(engine)
    assert grammar.kind == "json_schema" and json.loads(grammar.source) == FORM
    assert "start: (answer | calls)\n" in llguidance_source(grammar)
    answered = await ask(http, path, ANSWER)
    assert parts(path, answered) == (ANSWER, [], ENDS[path][1]), "a call inside its text is text"


async def test_a_stream_says_the_same(http: httpx.AsyncClient) -> None:
    for said in (CALL, ANSWER):
        whole = parts("chat/completions", await ask(http, "chat/completions", said))
        events = (await http.post("/v1/chat/completions", json=asking("chat/completions", said, stream=True))).text
        chunks = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        content = "".join(delta.get("content") or "" for delta in deltas)
        gained = [call for delta in deltas for call in delta.get("tool_calls") or []]
        arguments = "".join(call["function"].get("arguments") or "" for call in gained)
        assert (content, [arguments] if gained else [], chunks[-1]["choices"][0]["finish_reason"]) == whole


async def test_only_strict_functions_have_their_schemas_enforced(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    for path in ("chat/completions", "responses"):
        for strict in (True, False):
            await ask(http, path, CALL, strict=strict)
            assert ("city" in grammar_of(engine).calls) == strict
            assert "f" in grammar_of(engine).calls


@pytest.mark.parametrize("path", PATHS)
async def test_tools_that_may_not_be_called_leave_the_form_alone(
    http: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    none: Any = {"type": "none"} if path == "messages" else "none"
    await ask(http, path, ANSWER, tool_choice=none)
    assert not grammar_of(engine).calls


@pytest.mark.parametrize("path", PATHS)
async def test_a_call_that_is_required_comes_in_any_form(
    http: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    required: Any = {"type": "any"} if path == "messages" else "required"
    called = await ask(http, path, CALL, tool_choice=required)
    assert parts(path, called)[1] == ['{"city": "Kiel"}']
    assert grammar_of(engine).kind == "calls"


async def test_one_call_is_all_if_calls_may_not_be_parallel(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    await ask(http, "chat/completions", CALL)
    several = grammar_of(engine).calls.splitlines()[0]
    await ask(http, "chat/completions", CALL, parallel_tool_calls=False)
    assert (")*" in several, ")*" in grammar_of(engine).calls.splitlines()[0]) == (True, False)


@pytest.mark.parametrize("flags", [["--tool-call-parser", "qwen3_coder"]])
async def test_a_name_that_the_format_cannot_write_is_no_reason_to_refuse(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    for names, calls in ((["a b", "g"], True), (["a b"], False)):
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        await ask(http, "chat/completions", ANSWER, tools=tools)
        assert ("g" in grammar_of(engine).calls) == bool(grammar_of(engine).calls) == calls


@pytest.mark.parametrize("structured", [{"regex": "[a-c]+"}, {"choice": ["a", "b"]}, {"grammar": 'root ::= "a"'}])
async def test_forms_of_vllm_stand_beside_tools_too(
    http: httpx.AsyncClient, engine: FakeEngine, structured: dict[str, Any]
) -> None:
    body = asking("chat/completions", CALL, structured_outputs=structured)
    del body["response_format"]
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    assert parts("chat/completions", answer) == ("", ['{"city": "Kiel"}'], "tool_calls")
    assert grammar_of(engine).calls


@pytest.mark.parametrize("flags", [["--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]])
async def test_the_form_begins_after_the_thinking(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    for said in (CALL, ANSWER):
        body = await ask(http, "chat/completions", f"<think>Hm.</think>\n\n{said}")
        assert body["choices"][0]["message"]["reasoning_content"] == "Hm."
        text, calls, reason = parts("chat/completions", body)
        assert (text, bool(calls), reason) == (("", True, "tool_calls") if said == CALL else (ANSWER, False, "stop"))
        assert "start: thinking (header answer | calls)\n" in llguidance_source(grammar_of(engine))
