"""Log-probabilities and echo, in OpenAI's legacy format."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import httpx
import pytest

from eagle_server.api.generation import response_parts
from eagle_server.request import TokenLogprob
from tests.api import fake_engine
from tests.api.calls import complete, stream, text_of
from tests.api.fake_engine import FakeEngine


async def test_logprobs_have_one_entry_per_token(http: httpx.AsyncClient) -> None:
    answer = await complete(http, prompt="a😀", max_tokens=6, logprobs=1)
    choice = answer["choices"][0]
    assert choice["text"] == "a😀a"
    assert choice["logprobs"] == {
        "tokens": ["a", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80", "a"],
        "token_logprobs": [-0.25] * 6,
        "top_logprobs": [
            {token: -0.25} for token in ["a", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80", "a"]
        ],
        "text_offset": [0, 1, 1, 1, 1, 2],
    }


async def test_logprobs_zero_gives_the_token_itself(http: httpx.AsyncClient) -> None:
    answer = await complete(http, prompt="ab", max_tokens=2, logprobs=0)
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.25}, {"b": -0.25}]
    answer = await complete(http, prompt="ab", max_tokens=2, logprobs=3)
    assert answer["choices"][0]["logprobs"]["top_logprobs"][0] == {"a": -0.25, "b": -1.25, "c": -2.25}


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99]])
async def test_echo_gives_the_prompt_back(http: httpx.AsyncClient, prompt: Any) -> None:
    answer = await complete(http, prompt=prompt, max_tokens=4, echo=True)
    assert answer["choices"][0]["text"] == "abcabca"
    events = await stream(http, prompt=prompt, max_tokens=4, echo=True)
    assert text_of(events) == "abcabca"


async def test_echo_with_logprobs_scores_the_prompt(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await complete(http, prompt="aéc", max_tokens=0, echo=True, logprobs=1)
    choice = answer["choices"][0]
    assert choice["text"] == "aéc"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "c"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.25, -0.25]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2]
    assert answer["usage"]["completion_tokens"] == 0
    assert engine.requests[0].prompt_logprobs
    assert engine.requests[0].sampling.max_tokens == 0
    events = await stream(http, prompt="abc", max_tokens=2, echo=True, logprobs=0)
    assert [x for e in events for c in e["choices"] for x in c["logprobs"]["text_offset"]] == [0, 1, 2, 3, 4]


async def test_infinite_logprobs_are_still_json(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    unlikely = TokenLogprob(97, float("-inf"), [(98, float("-inf"))])
    monkeypatch.setattr(fake_engine, "logprob", lambda token, alternatives: unlikely)
    answer = await complete(http, prompt="a", max_tokens=1, logprobs=1)
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"b": -9999.0, "a": -9999.0}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a", "n": 128, "max_tokens": 1900, "logprobs": 20}, "logprobs"),
        ("/v1/completions", {"prompt": ["a" * 1999] * 100, "max_tokens": 1, "prompt_logprobs": 20}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "a", "n": 128, "max_tokens": 1900, "return_trees": True}, "return_trees"),
        ("/v1/chat/completions", {"n": 128, "max_tokens": 1900, "logprobs": True, "top_logprobs": 20}, "top_logprobs"),
    ],
)
async def test_a_response_has_a_limited_number_of_scores(
    http: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any], param: str
) -> None:
    if path == "/v1/chat/completions":
        body = {"messages": [{"role": "user", "content": "a"}], **body}
    response = await http.post(path, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert "4194304" in error["message"]
    assert "Lower or drop: " in error["message"]
    assert not engine.requests
    body |= {"n": 1, "max_tokens": 1}
    body |= {"prompt": ["a"]} if "prompt" in body else {}
    assert (await http.post(path, json=body)).status_code == 200


@pytest.mark.parametrize(
    ("wanted", "param"),
    [({"logprobs": True}, "logprobs"), ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"), ({"n": 2}, None)],
)
async def test_without_max_tokens_only_the_scores_that_come_are_counted(
    http: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Any], param: str
) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True, "seed": 1, **wanted}
    monkeypatch.setattr(response_parts, "MAX_SCORES", 40)
    response = await http.post("/v1/chat/completions", json=body)
    assert engine.requests
    if param is None:
        assert response.status_code == 200
        return
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert error["message"].endswith(f"Lower or drop: {param}; or stream")  # and nothing that the client did not send
    while engine.sequences:  # what nobody will read is not generated
        await asyncio.sleep(0.001)
    body |= {"stop": "a", "stream": False}
    monkeypatch.setattr(response_parts, "MAX_SCORES", 10_000)
    assert (await http.post("/v1/chat/completions", json=body)).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("chat", [False, pytest.param(True, marks=pytest.mark.deep)])
async def test_scores_are_kept_encoded(http: httpx.AsyncClient, chat: bool) -> None:
    """As objects they take several times the size of the response."""
    wanted: dict[str, Any] = {"prompt": "abc", "logprobs": 20}
    if chat:
        wanted = {"messages": [{"role": "user", "content": "abc"}], "logprobs": True, "top_logprobs": 20}
    body = {"n": 8, "max_tokens": 1900, "seed": 1, **wanted}
    tracemalloc.start()
    try:
        response = await http.post("/v1/chat/completions" if chat else "/v1/completions", json=body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert response.status_code == 200
    assert peak < 4 * len(response.content)
