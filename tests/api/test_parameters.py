"""Which parameters reach the engine, and which scores come back."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from eagle_server.api.generation.prepare import CONVERTED, COPIED
from eagle_server.api.schemas.generation import SamplingBody
from eagle_server.request import Grammar, SamplingParams
from tests.api.calls import complete
from tests.api.fake_engine import FakeEngine

MESSAGES = [{"role": "user", "content": "hi"}]


# The shortest body of each endpoint.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 4},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/responses": {"input": "abc", "max_output_tokens": 4},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
}


@pytest.fixture(params=BODIES)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def sampling(http: httpx.AsyncClient, engine: FakeEngine, path: str, **body: Any) -> SamplingParams:
    response = await http.post(path, json={**BODIES[path], **body})
    assert response.status_code == 200, response.text
    return engine.requests[-1].sampling


async def test_every_parameter_of_drawing_reaches_the_engine(
    http: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    params = await sampling(
        http,
        engine,
        path,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.05,
        presence_penalty=-1,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        logit_bias={"98": 5, "97": -100},
        allowed_token_ids=[99, 97, 98, 97],
        min_tokens=2,
        stop_token_ids=[1],
        ignore_eos=True,
        seed=42,
    )
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.05)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (-1, 0.5, 1.1)
    assert params.logit_bias == ((97, -100.0), (98, 5.0))
    assert params.allowed_token_ids == (97, 98, 99)
    assert (params.min_tokens, params.stop_token_ids, params.ignore_eos, params.seed) == (2, (1,), True, 42)


def test_every_sampling_field_is_converted_or_copied_by_name() -> None:
    """So a new parameter needs a field in the schema and in SamplingParams, and no other edit in the API."""
    assert set(SamplingParams.__struct_fields__) == CONVERTED | set(COPIED)
    assert set(COPIED) <= SamplingBody.model_fields.keys()


async def test_defaults_ask_for_nothing(http: httpx.AsyncClient, engine: FakeEngine, path: str) -> None:
    params = await sampling(http, engine, path, seed=1)
    assert params == SamplingParams(max_tokens=4, seed=1)
    assert engine.requests[-1].speculative


async def test_a_request_may_go_without_speculation(http: httpx.AsyncClient, engine: FakeEngine, path: str) -> None:
    await sampling(http, engine, path, speculative=False)
    assert not engine.requests[-1].speculative


async def test_a_cache_salt_reaches_every_choice(http: httpx.AsyncClient, engine: FakeEngine, path: str) -> None:
    await sampling(http, engine, path)
    assert engine.requests[-1].cache_salt is None
    choices = {"n": 2} if path.endswith("completions") else {}
    await sampling(http, engine, path, cache_salt="tenant é", **choices)
    assert [each.cache_salt for each in engine.requests[1:]] == ["tenant é"] * choices.get("n", 1)
    for wrong in ("", "x" * 1025, 7):
        answer = await http.post(path, json={**BODIES[path], "cache_salt": wrong})
        assert (answer.status_code, "cache_salt" in answer.json()["error"]["message"]) == (400, True)
    answer = await http.post(path, content=json.dumps({**BODIES[path], "cache_salt": "\ud800"}))  # no character
    assert (answer.status_code, "JSON" in answer.json()["error"]["message"]) == (400, True)


async def test_bad_words_are_tokenized_with_and_without_a_space(
    http: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    # With one token per byte a space is a separate token, so only the plain spelling counts.
    params = await sampling(http, engine, path, bad_words=["no", " no", "é"])
    assert params.bad_words == (tuple(b"no"), tuple("é".encode()))
    words = [f"{number:x<16}" for number in range(512)] + ["0" + "x" * 15] * 512
    assert len((await sampling(http, engine, path, bad_words=words)).bad_words) == 512


SCHEMA = {"type": "object", "properties": {"b": {"type": ["null", "string"], "default": None}}}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar(kind="json_object")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            Grammar(kind="json_schema", source=json.dumps(SCHEMA)),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar(kind="json_schema", source=json.dumps(SCHEMA))),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Grammar(kind="json_schema", source=json.dumps(SCHEMA))),
        ({"structured_outputs": {"json_object": True}}, Grammar(kind="json_object")),
        ({"structured_outputs": {"regex": "[0-9]+"}}, Grammar(kind="regex", source="[0-9]+")),
        ({"structured_outputs": {"choice": ["ja", "né"]}}, Grammar(kind="choice", source='["ja", "né"]')),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Grammar(kind="ebnf", source='root ::= "a"')),
    ],
)
async def test_formats_become_grammars(
    http: httpx.AsyncClient, engine: FakeEngine, path: str, given: dict[str, Any], grammar: Grammar | None
) -> None:
    found = (await sampling(http, engine, path, **given)).grammar
    assert (found and replace(found, param="grammar")) == grammar


async def test_prompt_logprobs_come_with_each_choice(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await complete(http, prompt="abc", max_tokens=1, prompt_logprobs=1, n=2)
    scores = answer["choices"][1]["prompt_logprobs"]
    assert scores == [
        None,
        {"98": {"logprob": -0.25, "rank": 1, "decoded_token": "b"}},
        {"99": {"logprob": -0.25, "rank": 1, "decoded_token": "c"}},
    ]
    assert answer["choices"][0]["logprobs"] is None
    assert engine.requests[-1].prompt_logprobs
    answer = await complete(http, prompt="abc", max_tokens=0, prompt_logprobs=0)
    assert answer["choices"][0]["prompt_logprobs"][1] == {"98": {"logprob": -0.25, "rank": None, "decoded_token": "b"}}


async def test_logprobs_and_prompt_logprobs_have_their_own_numbers(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await complete(http, prompt="ab", max_tokens=1, prompt_logprobs=3, logprobs=1)
    choice = answer["choices"][0]
    assert engine.requests[-1].sampling.logprobs == 3
    assert choice["logprobs"]["top_logprobs"] == [{"a": -0.25}]
    assert [len(scores) for scores in choice["prompt_logprobs"][1:]] == [3]
    answer = await complete(http, prompt="ab", max_tokens=1, prompt_logprobs=1, logprobs=3)
    assert len(answer["choices"][0]["logprobs"]["top_logprobs"][0]) == 3
    assert [len(scores) for scores in answer["choices"][0]["prompt_logprobs"][1:]] == [1]


async def test_a_chats_prompt_logprobs_stand_beside_its_choices(http: httpx.AsyncClient) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1, "prompt_logprobs": 0, "n": 2}
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][0] is None
    assert answer["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1])
async def test_every_64_bit_seed_reaches_the_engine(
    http: httpx.AsyncClient, engine: FakeEngine, path: str, seed: int
) -> None:
    params = await sampling(http, engine, path, seed=seed)
    assert params.seed == seed
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params  # as to the engine
