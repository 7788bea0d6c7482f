"""The demo with a tokenizer that spells its equals sign `</think>`: it thinks up to its first assignment."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from eagle_server import LLM, SamplingParams
from eagle_server.config import DEMO_TARGET
from tests.e2e.conftest import FIXED_TREES, README_FLAGS, serving

pytestmark = pytest.mark.slow  # a server of its own; tests/api has thinking, and tests/lossless grammars after it
TEMPLATE = """\
{% for tool in tools or [] %}{{ '<tool_call>{"name": "' + tool.function.name + '"}' }}{% endfor %}
{%- for message in messages %}{{ message.content }}{% endfor %}
{{- '<think>' }}{% if enable_thinking is defined and not enable_thinking %}{{ '</think>' }}{% endif %}"""
TOKENIZER = json.loads((DEMO_TARGET / "tokenizer.json").read_text())
END: int = TOKENIZER["model"]["vocab"]["Ġ="]
MESSAGES: list[Any] = [{"role": "user", "content": "def paint(name, rgb, comment):"}]
COLOUR = {
    "type": "object",
    "properties": {"name": {"enum": ["red", "green", "dark blue"]}, "comment": {"type": "string", "maxLength": 20}},
    "required": ["name", "comment"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "paint", "parameters": COLOUR}}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR}}


@pytest.fixture(scope="module", params=[True, False], ids=["special", "text"])
def options(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """`</think>` is a special token, or an ordinary one."""
    directory: Path = tmp_path_factory.mktemp("thinking")
    described = copy.deepcopy(TOKENIZER)
    model = described["model"]
    del model["vocab"]["Ġ="]
    model["vocab"]["</think>"] = END
    model["merges"] = [merge for merge in model["merges"] if "".join(merge) != "Ġ=" and "Ġ=" not in merge]
    marker = {**described["added_tokens"][0], "id": END, "content": "</think>", "special": request.param}
    described["added_tokens"].append(marker)
    (directory / "tokenizer.json").write_text(json.dumps(described))
    (directory / "template.jinja").write_text(TEMPLATE)
    return {"tokenizer_path": str(directory), "chat_template": str(directory / "template.jinja")}


@pytest.fixture(scope="module")
def client(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    with (
        serving(
            tmp_path_factory.mktemp("log") / "log", *flags, "--cpu-threads", "1", *README_FLAGS, *FIXED_TREES
        ) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def asking(**body: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": MESSAGES, "max_tokens": 200, "seed": 3, "logit_bias": {str(END): 6}, **body}


def parts(choice: Any) -> tuple[Any, ...]:
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    return getattr(choice.message, "reasoning_content", None), choice.message.content, calls, choice.finish_reason


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.deep), 1.0])
@pytest.mark.parametrize(
    "wanted", [{"response_format": FORMAT}, {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}]
)
def test_a_grammar_follows_the_thinking_and_the_text_is_the_same_without_speculation(
    client: openai.OpenAI, temperature: float, wanted: Any
) -> None:
    body = asking(temperature=temperature, **wanted)
    answer = client.chat.completions.create(**body)
    thinking, content, calls, _ = parts(answer.choices[0])
    assert thinking
    assert "</think>" not in thinking
    made = content if "response_format" in wanted else calls[0][1]
    assert set(json.loads(made)) == {"name", "comment"}
    plain = client.chat.completions.create(**body, extra_body={"speculative": False})
    assert parts(plain.choices[0]) == parts(answer.choices[0])
    drafted: Any = answer.model_extra
    assert drafted["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert 1 <= (answer.usage.completion_tokens_details.reasoning_tokens or 0) < answer.usage.completion_tokens
    streamed = {"reasoning_content": "", "content": ""}
    for chunk in client.chat.completions.create(**body, stream=True):
        for field in streamed:
            streamed[field] += getattr(chunk.choices[0].delta, field, None) or ""
    assert (streamed["reasoning_content"], streamed["content"] or None) == (thinking, content)


def test_the_agents_apis_show_the_thinking_of_chats_in_one_piece_and_in_streams(client: openai.OpenAI) -> None:
    thinking, content, _, _ = parts(client.chat.completions.create(**asking(response_format=FORMAT)).choices[0])
    shared = {"model": "demo", "extra_body": {"seed": 3, "logit_bias": {str(END): 6}}}
    schema: Any = {"type": "json_schema", "schema": COLOUR}
    body = {**shared, "input": MESSAGES, "max_output_tokens": 200, "text": {"format": {"name": "colour", **schema}}}
    response: Any = client.responses.create(**body)
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert (response.output[0].content[0].text, response.output_text) == (thinking, content)
    assert 1 <= response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    with client.responses.stream(**body) as events:
        final: Any = events.get_final_response()
    assert (final.output[0].content, final.output_text) == (response.output[0].content, content)
    assert final.usage.output_tokens_details == response.usage.output_tokens_details

    url = str(client.base_url).removesuffix("/v1/")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as other:
        enabled: Any = {"type": "enabled", "budget_tokens": 1024}
        more = {"max_tokens": 200, "thinking": enabled, "output_config": {"format": schema}}
        asked: dict[str, Any] = {**shared, "messages": MESSAGES, **more}
        message: Any = other.messages.create(**asked)
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert (message.content[0].thinking, message.content[1].text) == (thinking, content)
        with other.messages.stream(**asked) as blocks:
            last: Any = blocks.get_final_message()
    assert (last.content[0].thinking, last.content[1].text) == (thinking, content)
    assert last.usage.output_tokens_details == message.usage.output_tokens_details


def test_the_template_may_turn_thinking_off(client: openai.OpenAI) -> None:
    for off in ({"reasoning_effort": "none"}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}):
        answer = client.chat.completions.create(**asking(response_format=FORMAT, **off))
        thinking, content, _, _ = parts(answer.choices[0])
        assert thinking is None
        assert set(json.loads(content)) == {"name", "comment"}


def test_thinking_may_be_cut_off(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**asking(response_format=FORMAT, max_tokens=2, temperature=0))
    thinking, content, _, reason = parts(answer.choices[0])
    assert (bool(thinking), content, reason) == (True, "", "length")


@pytest.mark.parametrize("wanted", [{"response_format": FORMAT}, {"tools": TOOLS, "tool_choice": "required"}])
def test_chats_in_python_have_the_servers_parts(
    client: openai.OpenAI, options: dict[str, Any], wanted: dict[str, Any]
) -> None:
    body = asking(temperature=0.7, parallel_tool_calls=False, **wanted) if "tools" in wanted else asking(**wanted)
    expected = parts(client.chat.completions.create(**body).choices[0])
    llm = LLM("demo", speculative_num_steps=3, topk=4, cpu_threads=1, progress=False, **options)
    params = SamplingParams(**{name: value for name, value in body.items() if name not in ("model", "messages")})
    [own] = llm.chat(MESSAGES, params, use_tqdm=False)[0].outputs
    calls = [(call.function.name, call.function.arguments) for call in own.tool_calls]
    assert (own.reasoning or None, own.text or None, calls, own.finish_reason) == expected
    assert bool(calls) == ("tools" in wanted)
