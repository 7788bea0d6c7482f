"""Conversations of ten turns with tools: whatever a turn was, the client sends it back, and the next one comes.

The model follows a script with the mistakes that models make: arguments that are no JSON, a function that nobody
offered, a call cut by the cap, a turn of nothing but thinking.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.api.conftest import Server
from tests.e2e.test_clients import result_of
from tests.support.conversation import CAP, DONE, KEYS, SCRIPT
from tests.support.scripted import serving

each_way = pytest.mark.parametrize("streamed", [False, True])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("scripted"), SCRIPT) as up:
        yield up


def value_of(name: str, arguments: Any) -> str:
    """What the tool answers. Clients give arguments that are no JSON as text."""
    return (
        f"{arguments['key']}!" if name == "lookup" and isinstance(arguments, dict) and "key" in arguments else "wrong"
    )


def parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def check(calls: list[tuple[str, Any]], ends: list[str], last: str) -> None:
    """The calls and the end of each turn, over all turns."""
    assert json.loads(last) == {"answer": "done"}
    assert len(ends) == len(SCRIPT)
    whole = [arguments for name, arguments in calls if name == "lookup" and isinstance(arguments, dict)]
    # LangChain completes the call that was cut in a stream.
    given = [each["key"] for each in whole if each and not each["key"].startswith("xx")]
    assert given == ["a", "b", "c", "\u2028\u0085\x85", "f"]
    assert ("look_up", {}) in calls and ("lookup", {}) in calls


@each_way
def test_chats(server: Server, *, streamed: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": f"Look up. {streamed}"}]
    function = {"name": "lookup", "parameters": KEYS, "strict": not streamed}  # the package parses calls of strict ones
    tools: Any = [{"type": "function", "function": function}]
    form: Any = {"type": "json_schema", "json_schema": {"name": "done", "schema": DONE}}
    calls, ends, last = list[tuple[str, Any]](), list[str](), ""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        while len(ends) < len(SCRIPT):
            asked: Any = {"model": "m", "messages": messages, "tools": tools, "max_tokens": CAP}
            if len(ends) == len(SCRIPT) - 1:
                asked["response_format"] = form
            if streamed:
                with client.chat.completions.stream(**asked) as events:
                    *_, answer = (event.snapshot for event in events if event.type == "chunk")
            else:
                answer = client.chat.completions.create(**asked)
            choice = answer.choices[0]
            ends.append(choice.finish_reason)
            last = choice.message.content or ""
            messages.append(choice.message.model_dump())
            found = choice.message.tool_calls or []
            for each in found:
                calls.append((each.function.name, parsed(each.function.arguments)))
                messages.append({"role": "tool", "tool_call_id": each.id, "content": value_of(*calls[-1])})
            if not found:
                messages.append({"role": "user", "content": "Go on."})
    check(calls, ends, last)
    assert ends.count("length") == 1 and ends[-1] == "stop"
    assert any(name == "lookup" and isinstance(arguments, str) for name, arguments in calls)


@each_way
def test_responses(server: Server, *, streamed: bool) -> None:
    items: list[Any] = [{"role": "user", "content": f"Look up, please. {streamed}"}]
    tools: Any = [{"type": "function", "name": "lookup", "parameters": KEYS, "strict": not streamed}]
    form: Any = {"format": {"type": "json_schema", "name": "done", "schema": DONE}}
    calls, ends, last = list[tuple[str, Any]](), list[str](), ""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        while len(ends) < len(SCRIPT):
            asked: Any = {"model": "m", "input": items, "tools": tools, "max_output_tokens": CAP}
            if len(ends) == len(SCRIPT) - 1:
                asked["text"] = form
            if streamed:
                with client.responses.stream(**asked) as events:
                    done = [
                        event.response
                        for event in events
                        if event.type in ("response.completed", "response.incomplete")
                    ]
                [answer] = done
            else:
                answer = client.responses.create(**asked)
            ends.append(answer.status or "")
            last = answer.output_text
            items += [item.model_dump() for item in answer.output]
            found = [item for item in answer.output if item.type == "function_call"]
            for each in found:
                calls.append((each.name, parsed(each.arguments)))
                items.append({"type": "function_call_output", "call_id": each.call_id, "output": value_of(*calls[-1])})
            if not found:
                items.append({"role": "user", "content": "Go on."})
    check(calls, ends, last)
    assert ends.count("incomplete") == 1 and ends[-1] == "completed"


@each_way
def test_messages(server: Server, *, streamed: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": f"Do look up. {streamed}"}]
    tools: Any = [{"name": "lookup", "input_schema": KEYS}]
    form: Any = {"format": {"type": "json_schema", "schema": DONE}}
    calls, ends, last = list[tuple[str, Any]](), list[str](), ""
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        while len(ends) < len(SCRIPT):
            asked: Any = {"model": "m", "messages": messages, "tools": tools, "max_tokens": CAP}
            if len(ends) == len(SCRIPT) - 1:
                asked["output_config"] = form
            if streamed:
                with client.messages.stream(**asked) as events:
                    answer = events.get_final_message()
            else:
                answer = client.messages.create(**asked)
            ends.append(answer.stop_reason or "")
            last = "".join(block.text for block in answer.content if block.type == "text")
            messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
            found = [block for block in answer.content if block.type == "tool_use"]
            calls += [(each.name, each.input) for each in found]
            results = [
                {"type": "tool_result", "tool_use_id": each.id, "content": value_of(each.name, each.input)}
                for each in found
            ]
            messages.append({"role": "user", "content": results or "Go on."})
    check(calls, ends, last)
    assert ends.count("max_tokens") == 1 and ends[-1] == "end_turn"


@pytest.mark.slow
@pytest.mark.third_party
@pytest.mark.parametrize("client", ["langchain_openai", "litellm"])
def test_clients_of_chats(server: Server, client: str) -> None:
    result = result_of(f"{client}_client", server.url, f"{client}_conversation", len(SCRIPT), CAP)
    for way in ("whole", "streamed"):
        calls, ends, last = result[way]
        check([(name, parsed(given) if isinstance(given, str) else given) for name, given in calls], ends, last)
        assert ends.count("length") == 1


@pytest.mark.slow
@pytest.mark.third_party
def test_agents_of_pydantic_ai(server: Server) -> None:
    """With a type of the output a grammar of both holds: what is no call of an offered function is not written."""
    result = result_of("pydantic_ai_client", server.url, "pydantic_ai_conversation", len(SCRIPT), CAP)
    for api in ("chats", "responses"):
        assert result[f"{api} text"]["keys"] == ["a", "b", "c", "\u2028\u0085\x85", "f"]
        assert result[f"{api} form"]["keys"] == ["a", "b", "c", "\u2028\u0085\x85"]
        assert all(json.loads(result[f"{api} {output}"]["last"]) == {"answer": "done"} for output in ("text", "form"))
