"""Tool calls, as the openai package shows them. The fake engine repeats the user's text."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.api.conftest import Templated
from tests.api.fake_engine import EOS, MARKER, FakeEngine

# The comment in the template shows the format, for --tool-call-parser auto.
TEMPLATE = "{# %s #}{%% if tools %%}{%% endif %%}{{ messages[-1].content }}"
HINTS = {
    "hermes": '<tool_call>{"name"',
    "llama3_json": "<|python_tag|>",
    "mistral": "[TOOL_CALLS] [",
    "qwen3_coder": "<tool_call>\n<function=",
    "pythonic": "[func_name1(params_name1=params_value1",
    "deepseek_v31": "<｜tool▁sep｜>",
}
BARE = ("llama3_json", "pythonic")  # a call is the whole answer
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "now", "parameters": CITY}},
    {"type": "function", "function": {"name": "stop"}},
]
SAY = {
    "hermes": 'Sure.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Malmö 😀"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "Malmö 😀"}}; {"name": "stop", "parameters": {}}',
    "mistral": f'Sure.{MARKER} [{{"name": "get_weather", "arguments": {{"city": "Malmö 😀"}}}}, '
    '{"name": "stop", "arguments": {}}]',
    "qwen3_coder": "Sure.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nMalmö 😀\n</parameter>\n</function>\n"
    "</tool_call>\n<tool_call>\n<function=stop>\n</function>\n</tool_call>",
    "pythonic": "[get_weather(city='Malmö 😀'), stop()]",
    "deepseek_v31": "Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "Malmö 😀"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
}
END = {"qwen3_coder": "</function>", "pythonic": ")", "deepseek_v31": "}"}  # of a call
CALLS = [("get_weather", '{"city": "Malmö 😀"}'), ("stop", "{}")]
each_format = pytest.mark.parametrize("format", HINTS)


@pytest.fixture
def format() -> str:
    return "hermes"


@pytest.fixture
async def http(format: str, templated: Templated) -> AsyncIterator[httpx.AsyncClient]:
    async with templated(TEMPLATE % HINTS.get(format, "")) as client:
        yield client


@pytest.fixture
def client(http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=http)


def asking(say: str, **body: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": say + EOS}], "tools": TOOLS, **body}


async def complete(client: openai.AsyncOpenAI, say: str, **body: Any) -> Any:
    return (await client.chat.completions.create(**asking(say, **body))).choices[0]


async def stream(client: openai.AsyncOpenAI, say: str, **body: Any) -> list[Any]:
    return [chunk async for chunk in await client.chat.completions.create(**asking(say, stream=True, **body))]


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


@each_format
async def test_calls_are_parts_of_the_message(client: openai.AsyncOpenAI, format: str) -> None:
    choice = await complete(client, SAY[format], logprobs=True)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == (None if format in BARE else "Sure.")
    assert calls_of(choice.message) == CALLS
    ids = [call.id for call in choice.message.tool_calls]
    assert len({*ids}) == 2
    assert all(len(each) == 9 if format == "mistral" else each.startswith("call_") for each in ids)
    spelled = "".join(entry.token for entry in choice.logprobs.content)
    assert spelled.startswith(("Sure", '{"name"', "[get_weather")), "log-probabilities are of all that was generated"
    assert len(choice.logprobs.content) == len(SAY[format].replace(MARKER, "m").encode()) + 1
    back = [choice.message.model_dump(), {"role": "tool", "tool_call_id": ids[0], "content": "9 degrees"}]
    again = await client.chat.completions.create(model="fake", messages=back, tools=TOOLS, max_tokens=3)
    assert again.choices[0].message.content == "9 d"


@each_format
@pytest.mark.parametrize("seed", range(4))  # each seed gives other numbers of tokens per event
async def test_calls_in_streams(client: openai.AsyncOpenAI, format: str, seed: int) -> None:
    chunks = await stream(client, SAY[format], seed=seed, logprobs=True)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    gained = [call for delta in deltas for call in delta.tool_calls or []]
    assert "".join(delta.content or "" for delta in deltas) == ("" if format in BARE else "Sure.")
    assert [(call.index, call.type, call.function.name) for call in gained if call.id] == [
        (0, "function", "get_weather"),
        (1, "function", "stop"),
    ]
    assert all(call.function.name is None and call.type is None for call in gained if not call.id)
    for index, (_, arguments) in enumerate(CALLS):
        pieces = [call.function.arguments for call in gained if call.index == index]
        assert "".join(pieces) == arguments
        assert len(pieces) > (2 if index == 0 else 0) - (format == "pythonic"), "arguments come as they are written"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    scored = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert len(scored) == len(SAY[format].replace(MARKER, "m").encode()) + 1


@each_format
async def test_the_package_puts_streams_together(client: openai.AsyncOpenAI, format: str) -> None:
    async with client.chat.completions.stream(**asking(SAY[format])) as events:
        final = (await events.get_final_completion()).choices[0]
    assert calls_of(final.message) == CALLS
    assert final.finish_reason == "tool_calls"


async def test_what_is_held_back_makes_no_event(client: openai.AsyncOpenAI) -> None:
    chunks = await stream(client, "a <tool> b <tool_call>{}")
    texts = [chunk.choices[0].delta.content for chunk in chunks[1:-1]]
    assert all(texts)
    assert "".join(texts) == "a <tool> b <tool_call>{}"
    assert not any("<" in text and not text.rstrip().endswith(("l", ">", "b", "{}")) for text in texts)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("change", "reason"),
    [({"max_tokens": len(SAY["hermes"].partition("ö")[0])}, "length"), ({"stop": "ö 😀"}, "stop")],
    ids=["cap", "stop"],
)
async def test_a_call_that_breaks_off_is_a_call_and_no_content(
    client: openai.AsyncOpenAI, change: dict[str, Any], reason: str, *, streamed: bool
) -> None:
    if streamed:
        chunks = await stream(client, SAY["hermes"], **change)
        deltas = [chunk.choices[0].delta for chunk in chunks]
        content = "".join(delta.content or "" for delta in deltas)
        gained = [call.function for delta in deltas for call in delta.tool_calls or []]
        calls = [("".join(call.name or "" for call in gained), "".join(call.arguments or "" for call in gained))]
        finish_reason = chunks[-1].choices[0].finish_reason
    else:
        choice = await complete(client, SAY["hermes"], **change)
        content, calls, finish_reason = choice.message.content, calls_of(choice.message), choice.finish_reason
    assert (content, calls) == ("Sure.", [("get_weather", '{"city": "Malm')])
    assert finish_reason == reason


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_call_that_breaks_off_before_its_arguments_is_content(
    client: openai.AsyncOpenAI, *, streamed: bool
) -> None:
    text = SAY["hermes"].partition('"Malm')[0].rstrip()
    if streamed:
        chunks = await stream(client, SAY["hermes"], max_tokens=len(text))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        assert not any(chunk.choices[0].delta.tool_calls for chunk in chunks)
    else:
        choice = await complete(client, SAY["hermes"], max_tokens=len(text))
        assert (choice.message.content, choice.message.tool_calls) == (text, None)


@pytest.mark.parametrize("change", [{"tool_choice": "none"}, {"tools": openai.omit}])
async def test_without_tools_calls_are_content(client: openai.AsyncOpenAI, change: dict[str, Any]) -> None:
    choice = await complete(client, SAY["hermes"], **change)
    assert (choice.message.content, choice.message.tool_calls) == (SAY["hermes"], None)
    assert choice.finish_reason == "stop"


@each_format
@pytest.mark.parametrize("streamed", [False, True])
async def test_of_parallel_calls_the_first_may_be_all_that_is_wanted(
    client: openai.AsyncOpenAI, engine: FakeEngine, format: str, *, streamed: bool
) -> None:
    body: dict[str, Any] = {"parallel_tool_calls": False, "max_tokens": 1000}
    if streamed:
        async with client.chat.completions.stream(**asking(SAY[format], **body)) as events:
            answer = await events.get_final_completion()
    else:
        answer = await client.chat.completions.create(**asking(SAY[format], **body))
        written, _, _ = SAY[format].replace(MARKER, "m").partition(end := END.get(format, "}}"))
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len((written + end).encode())
    assert calls_of(answer.choices[0].message) == CALLS[:1]
    assert answer.choices[0].finish_reason == "tool_calls"
    assert engine.requests[-1].sampling.grammar is None


@each_format
async def test_a_call_may_be_required(client: openai.AsyncOpenAI, engine: FakeEngine, format: str) -> None:
    await complete(client, "a", tool_choice="required")
    several = engine.requests[-1].sampling.grammar
    assert several is not None
    assert several.kind == "calls"
    assert "get_weather" in several.source
    assert "stop" in several.source
    await complete(client, "a", tool_choice="required", parallel_tool_calls=False)
    one = engine.requests[-1].sampling.grammar
    assert one is not None
    starts = [grammar.source.splitlines()[0] for grammar in (several, one)]
    assert [")*" in start for start in starts] == [format != "llama3_json", False]
    named = {"type": "function", "function": {"name": "get_weather"}}
    choice = await complete(client, SAY[format], tool_choice=named)
    assert calls_of(choice.message) == CALLS[:1]
    grammar = engine.requests[-1].sampling.grammar
    assert grammar is not None
    assert "stop" not in grammar.source
    assert ("start: <[" in grammar.source) == (format == "mistral"), "a special token is asked for by id"


NAMED = {"type": "function", "function": {"name": "get_weather"}}
TEXT_SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}
MANY = {f"p{n}": {} for n in range(8000)}  # all optional
LARGE_SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": MANY}}}
OPEN_SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"patternProperties": {"^a": {}}}}}


@pytest.mark.parametrize(
    ("format", "change", "param", "words"),
    [
        ("none", {"tool_choice": "required"}, "tool_choice", "--tool-call-parser"),
        ("none", {"tool_choice": NAMED}, "tool_choice", "--tool-call-parser"),
        ("none", {"parallel_tool_calls": False}, "parallel_tool_calls", "--tool-call-parser"),
        ("hermes", {"tool_choice": {**NAMED, "function": {"name": "g"}}}, "tool_choice", "none of the tools"),
        ("hermes", {"tool_choice": {"type": "function"}}, "tool_choice", "none, auto, required or"),
        (
            "hermes",
            {"tool_choice": NAMED, "extra_body": {"structured_outputs": {"regex": "a"}}},
            "structured_outputs",
            "exclude each other",
        ),
        ("hermes", {"tool_choice": "required", "tools": [TEXT_SCHEMA]}, "tools.0.function.parameters", "object"),
        (
            "pythonic",
            {"tool_choice": "required", "tools": [LARGE_SCHEMA]},
            "tools.0.function.parameters",
            "more than 262,144 characters",
        ),
        (
            "qwen3_coder",
            {"tool_choice": "required", "tools": [*TOOLS, LARGE_SCHEMA]},
            "tools.2.function.parameters",
            "more than 262,144 characters",
        ),
        (
            "qwen3_coder",
            {"tool_choice": "required", "tools": [*TOOLS, OPEN_SCHEMA]},
            "tools.2.function.parameters",
            "has patternProperties, which cannot be enforced",
        ),
        ("hermes", {"tool_choice": "required", "tools": [LARGE_SCHEMA] * 3}, "tools", "more than 262,144 characters"),
    ],
)
async def test_what_cannot_be_enforced_is_refused(
    client: openai.AsyncOpenAI, engine: FakeEngine, change: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        await complete(client, "a", **change)
    assert wrong.value.param == param
    assert words in wrong.value.message
    assert not engine.requests


@pytest.mark.parametrize("format", [*HINTS, "none"])
async def test_the_server_says_what_it_recognizes(http: httpx.AsyncClient, format: str) -> None:
    resolved = (await http.get("/v1/server_info")).json()["resolved"]["model"]
    assert resolved["tool_call_parser"] == format
    assert resolved["chat_template"].endswith(".jinja")


async def test_choices_of_one_stream_do_not_mix(client: openai.AsyncOpenAI) -> None:
    chunks = await stream(client, SAY["hermes"], n=2)
    for index in (0, 1):
        deltas = [c.delta for chunk in chunks for c in chunk.choices if c.index == index]
        gained = [call for delta in deltas for call in delta.tool_calls or [] if call.index == 0]
        assert json.loads("".join(call.function.arguments for call in gained)) == {"city": "Malmö 😀"}
