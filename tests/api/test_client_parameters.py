"""Parameters that clients of OpenAI, vLLM and SGLang send: what they do here, and which have no effect."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from eagle_server.request import Grammar
from tests.api.calls import complete, stream, text_of
from tests.api.fake_engine import EOS, ID, MARKER, FakeEngine

MESSAGES = [{"role": "user", "content": "hi"}]
ROUTERS = {"no_stop_trim": False, "return_hidden_states": False, "separate_reasoning": True, "stream_reasoning": True}
BOOKKEEPING = {
    "metadata": {"a": "b"},
    "store": False,
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "service_tier": "auto",
    "verbosity": "medium",
    "user": "me",
}


async def chat(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await http.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 6, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("given", [ROUTERS, BOOKKEEPING], ids=["routers", "bookkeeping"])
async def test_what_routers_and_clients_add_changes_nothing(
    http: httpx.AsyncClient, engine: FakeEngine, given: dict[str, Any]
) -> None:
    plain = await complete(http, prompt="abc", max_tokens=5, seed=1)
    assert (await complete(http, prompt="abc", max_tokens=5, seed=1, **given))["choices"] == plain["choices"]
    assert engine.requests[0].sampling == engine.requests[1].sampling
    await chat(http, reasoning_effort="high", **given)


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        ({"guided_regex": "[0-9]+"}, Grammar(kind="regex", source="[0-9]+")),
        ({"guided_choice": ["a", "b"]}, Grammar(kind="choice", source='["a", "b"]')),
        ({"guided_grammar": 'root ::= "a"'}, Grammar(kind="ebnf", source='root ::= "a"')),
        ({"guided_json": {"type": "null"}}, Grammar(kind="json_schema", source='{"type": "null"}')),
        ({"regex": "[0-9]+"}, Grammar(kind="regex", source="[0-9]+")),
        ({"ebnf": 'root ::= "a"'}, Grammar(kind="ebnf", source='root ::= "a"')),
        ({"json_schema": '{"type": "null"}'}, Grammar(kind="json_schema", source='{"type": "null"}')),
    ],
)
async def test_vllms_older_and_sglangs_names_of_grammars(
    http: httpx.AsyncClient, engine: FakeEngine, given: dict[str, Any], grammar: Grammar
) -> None:
    await complete(http, prompt="abc", **given)
    found = engine.requests[-1].sampling.grammar
    assert found is not None and replace(found, param="grammar") == grammar


@pytest.mark.parametrize("kept", [False, True])
async def test_a_stop_text_is_part_of_the_output_if_asked(http: httpx.AsyncClient, kept: bool) -> None:
    body = {"prompt": "abcdefgh", "max_tokens": 20, "stop": ["def"], "include_stop_str_in_output": kept}
    answer = await complete(http, **body)
    text = "abcdef" if kept else "abc"
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (text, "stop")
    assert answer["usage"]["completion_tokens"] == 6
    assert text_of(await stream(http, **body)) == text


async def test_a_stop_token_has_its_text_if_asked(http: httpx.AsyncClient) -> None:
    body = {"prompt": "abcdefgh", "max_tokens": 20, "stop_token_ids": [ord("d")]}
    assert (await complete(http, **body))["choices"][0]["text"] == "abc"
    assert (await complete(http, **body, include_stop_str_in_output=True))["choices"][0]["text"] == "abcd"


async def test_special_tokens_are_text_if_asked(http: httpx.AsyncClient) -> None:
    body = {"prompt": [97, ID[MARKER], 98], "max_tokens": 3}
    assert (await complete(http, **body))["choices"][0]["text"] == "ab"
    assert (await complete(http, **body, skip_special_tokens=False))["choices"][0]["text"] == f"a{MARKER}b"
    ended = {"prompt": f"ab{EOS}", "max_tokens": 9, "skip_special_tokens": False}
    assert (await complete(http, **ended))["choices"][0]["text"] == "ab"
    assert (await complete(http, **ended, include_stop_str_in_output=True))["choices"][0]["text"] == f"ab{EOS}"


async def test_token_ids_are_returned_if_asked(http: httpx.AsyncClient) -> None:
    answer = await complete(http, prompt="é!", max_tokens=5, return_token_ids=True, n=2)
    for choice in answer["choices"]:
        assert choice["prompt_token_ids"] == [*"é!".encode()]
        assert choice["token_ids"] == [0xC3, 0xA9, 0x21, 0xC3, 0xA9]
    events = await stream(http, prompt="é!", max_tokens=5, return_token_ids=True)
    choices = [choice for event in events for choice in event["choices"]]
    assert sum((choice["token_ids"] for choice in choices), []) == [0xC3, 0xA9, 0x21, 0xC3, 0xA9]
    assert [choice.get("prompt_token_ids") for choice in choices] == [[*"é!".encode()], *[None] * (len(choices) - 1)]
    plain = await complete(http, prompt="é!", max_tokens=5)
    assert not {"token_ids", "prompt_token_ids"} & plain["choices"][0].keys()


async def test_chats_return_token_ids(http: httpx.AsyncClient) -> None:
    answer = await chat(http, return_token_ids=True)
    ids = answer["choices"][0]["token_ids"]
    assert len(ids) == 6 and len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    body = {"messages": MESSAGES, "max_tokens": 6, "stream": True, "return_token_ids": True}
    response = await http.post("/v1/chat/completions", json=body)
    chunks = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    assert sum((choice.get("token_ids", []) for chunk in chunks for choice in chunk["choices"]), []) == ids
    assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])


async def test_tokens_of_logprobs_are_named_by_their_ids_if_asked(http: httpx.AsyncClient) -> None:
    answer = await complete(http, prompt="ab", max_tokens=2, logprobs=1, return_tokens_as_token_ids=True)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:97", "token_id:98"]
    assert list(logprobs["top_logprobs"][0]) == ["token_id:97"]
    content = (await chat(http, logprobs=True, return_tokens_as_token_ids=True))["choices"][0]["logprobs"]["content"]
    assert all(entry["token"].startswith("token_id:") for entry in content)


async def test_a_prompt_is_cut_from_the_left(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await complete(http, prompt="abcdef", max_tokens=3, truncate_prompt_tokens=2)
    assert engine.requests[-1].prompt_token_ids == [*b"ef"]
    assert answer["usage"]["prompt_tokens"] == 2
    await complete(http, prompt="x" * 5000, max_tokens=3, truncate_prompt_tokens=100)
    assert len(engine.requests[-1].prompt_token_ids) == 100
    await chat(http, truncate_prompt_tokens=4)
    assert len(engine.requests[-1].prompt_token_ids) == 4


async def test_routers_find_the_model(http: httpx.AsyncClient) -> None:
    info = (await http.get("/model_info")).json()
    assert info["served_model_name"] == "fake" and info["is_generation"] is True
    assert info["tokenizer_path"] == info["model_path"]
    assert (await http.get("/server_info")).json()["served_model_name"] == "fake"
