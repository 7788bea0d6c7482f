"""A max_tokens beyond the context is lowered to what fits, unless the server is strict."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from eagle_server.client.client import EngineClient
from eagle_server.config import Config, parse_args
from tests.api.calls import complete, stream
from tests.api.conftest import http_client
from tests.api.fake_engine import MAX_REQUEST_TOKENS, FakeEngine

CAP = 65_535
QUESTION = [{"role": "user", "content": "a" * 1900}]

# By path: a body that asks for more than fits, and the answer's reason to end.
CAPPED = {
    "/v1/completions": ({"prompt": "a" * 1900, "max_tokens": CAP}, "length"),
    "/v1/chat/completions": ({"messages": QUESTION, "max_completion_tokens": CAP}, "length"),
    "/v1/responses": ({"input": QUESTION, "max_output_tokens": CAP}, "max_output_tokens"),
    "/v1/messages": ({"messages": QUESTION, "max_tokens": CAP}, "max_tokens"),
}
WANTED = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
}


@pytest.fixture
async def strict(tokenizer_dir: Path, engine_client: EngineClient, running: None) -> AsyncIterator[httpx.AsyncClient]:
    flags = ["--model-path", str(tokenizer_dir), "--strict-max-tokens"]
    async with http_client(parse_args(flags, environ={}), engine_client, tokenizer_dir) as client:
        yield client


def reason_of(answer: dict[str, Any]) -> str:
    if "choices" in answer:
        return str(answer["choices"][0]["finish_reason"])
    return str(answer["stop_reason"] if "stop_reason" in answer else answer["incomplete_details"]["reason"])


def output_tokens(answer: dict[str, Any]) -> int:
    usage: dict[str, int] = answer["usage"]
    return usage["completion_tokens"] if "completion_tokens" in usage else usage["output_tokens"]


@pytest.mark.parametrize("path", CAPPED)
async def test_a_cap_beyond_the_context_is_lowered_to_what_fits(
    http: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    body, reason = CAPPED[path]
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    [request] = engine.requests
    room = MAX_REQUEST_TOKENS - len(request.prompt_token_ids)
    assert 0 < room <= 100
    assert request.sampling.max_tokens == room
    assert (reason_of(response.json()), output_tokens(response.json())) == (reason, room)


@pytest.mark.parametrize("path", WANTED)
async def test_a_strict_server_refuses_it(strict: httpx.AsyncClient, engine: FakeEngine, path: str) -> None:
    response = await strict.post(path, json=CAPPED[path][0])
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (WANTED[path], "context_length_exceeded")
    assert f"reduce the prompt or {WANTED[path]}" in error["message"]
    assert not engine.requests


async def test_messages_are_lowered_by_a_strict_server_too(strict: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await strict.post("/v1/messages", json=CAPPED["/v1/messages"][0])
    assert answer.json()["stop_reason"] == "max_tokens"
    assert answer.json()["usage"]["output_tokens"] == engine.requests[0].sampling.max_tokens


async def test_a_strict_server_serves_what_fits_exactly(strict: httpx.AsyncClient) -> None:
    answer = await complete(strict, prompt="a" * 1990, max_tokens=10)
    assert answer["usage"]["completion_tokens"] == 10
    assert (await strict.post("/v1/completions", json={"prompt": "a" * 1990, "max_tokens": 11})).status_code == 400


async def test_each_prompt_has_its_own_room(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await complete(http, prompt=["a" * 1990, "b" * 1500, "c"], n=2, max_tokens=600)
    assert [request.sampling.max_tokens for request in engine.requests] == [10, 10, 500, 500, 600, 600]
    assert [len(choice["text"]) for choice in answer["choices"]] == [10, 10, 500, 500, 600, 600]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}


async def test_a_default_is_lowered_too(http: httpx.AsyncClient) -> None:
    assert (await complete(http, prompt="a" * 1990))["usage"]["completion_tokens"] == 10


async def test_any_number_may_be_asked_for(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    events = await stream(http, prompt="a" * 1995, max_tokens=10**30)
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert engine.requests[0].sampling.max_tokens == 5


@pytest.mark.parametrize("path", CAPPED)
async def test_a_prompt_without_room_stays_an_error(http: httpx.AsyncClient, engine: FakeEngine, path: str) -> None:
    body = json.loads(json.dumps(CAPPED[path][0]).replace("a" * 1900, "a" * 2000))
    response = await http.post(path, json=body)
    assert response.status_code == 400, response.text
    assert "maximum context length" in response.json()["error"]["message"]
    assert "or max" not in response.json()["error"]["message"]
    assert not engine.requests


async def test_min_tokens_above_what_fits_stay_an_error(http: httpx.AsyncClient) -> None:
    for prompt in ("a" * 1900, ["b", "a" * 1900]):
        response = await http.post("/v1/completions", json={"prompt": prompt, "max_tokens": CAP, "min_tokens": 101})
        assert response.status_code == 400
        assert "min_tokens exceeds the 100 tokens that fit" in response.json()["error"]["message"]
    await complete(http, prompt="a" * 1900, max_tokens=CAP, min_tokens=100)


async def test_scoring_needs_no_room(http: httpx.AsyncClient, strict: httpx.AsyncClient) -> None:
    for client in (http, strict):
        answer = await complete(client, prompt="a" * MAX_REQUEST_TOKENS, max_tokens=0, echo=True)
        assert answer["choices"][0]["text"] == "a" * MAX_REQUEST_TOKENS
        body = {"prompt": "a" * (MAX_REQUEST_TOKENS + 1), "max_tokens": 0, "echo": True}
        assert (await client.post("/v1/completions", json=body)).status_code == 400


async def test_scores_are_bounded_by_what_fits(http: httpx.AsyncClient) -> None:
    """Without the lower cap the bound on a response's log-probabilities would refuse it."""
    answer = await complete(http, prompt="a" * 1995, max_tokens=10**9, logprobs=5)
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 5


def test_the_option_is_off_by_default(config: Config) -> None:
    assert not config.server.strict_max_tokens
