"""Every error is OpenAI's error object, and the server keeps running."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from eagle_server.client.client import EngineClient
from eagle_server.config import parse_args
from tests.api.conftest import PATIENCE, http_client
from tests.api.fake_engine import BREAK, DEAD_END, ID, REFUSE, STALL, FakeEngine


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"prompt": None}, "prompt", "required"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "sequences"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": ["a", ""]}, "prompt", "empty"),
        ({"prompt": 7}, "prompt", "should be a string"),
        ({"prompt": {"a": 1}}, "prompt", "should be a string"),
        ({"prompt": [1, "a"]}, "prompt", "should be a string"),
        ({"prompt": [True]}, "prompt", "should be a string"),
        ({"prompt": [1.5]}, "prompt", "should be a string"),
        ({"prompt": [99999]}, "prompt", "token id 99999 is outside the vocabulary"),
        ({"prompt": [[1], [-1]]}, "prompt", "token id -1 is outside the vocabulary"),
        ({"prompt": [10**30]}, "prompt", "outside the vocabulary"),
        ({"prompt": "a" * 2000}, "prompt", "2000 tokens, however you requested 2016 tokens (2000 in your prompt; 16"),
        ({"prompt": "a" * 200_000}, "prompt", "200000 characters"),
        ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        ({"max_tokens": 0}, "max_tokens", "at least 1 without echo"),
        ({"max_tokens": "16"}, "max_tokens", "integer"),
        ({"max_tokens": 1.5}, "max_tokens", "integer"),
        ({"max_tokens": True}, "max_tokens", "integer"),
        ({"min_tokens": 17}, "min_tokens", "exceeds max_tokens"),
        ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_p": 1.01}, "top_p", "less than or equal to 1"),
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"top_k": 10**12}, "top_k", "less than"),
        ({"seed": "x"}, "seed", "integer"),
        ({"seed": 2**64}, "seed", "less than"),
        ({"seed": 2**63}, "seed", "less than or equal to 9223372036854775807"),
        ({"seed": -(2**63) - 1}, "seed", "greater than or equal to -9223372036854775808"),
        ({"temperature": 100.1}, "temperature", "less than or equal to 100"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"n": 128, "prompt": ["a"] * 9}, "prompt", "1024"),
        ({"n": 2, "best_of": 1}, "best_of", "at least n, 2"),
        ({"n": 2, "best_of": 3, "stream": True}, "best_of", "stream: false"),
        ({"best_of": 129}, "best_of", "less than or equal to 128"),
        ({"stop": ""}, "stop", "1 to 1024 characters"),
        ({"stop": ["a", ""]}, "stop", "1 to 1024 characters"),
        ({"stop": ["a", "b" * 1025]}, "stop", "1 to 1024 characters"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": 3}, "stop", "should be a string"),
        ({"stop_token_ids": [1, 99999]}, "stop_token_ids", "99999"),
        ({"stop_token_ids": 1}, "stop_token_ids", "list"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"logprobs": True}, "logprobs", "integer"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "unknown parameter"),
        ({"stream": True, "stream_options": 1}, "stream_options", "stream_options"),
        ({"suffix": "end"}, "suffix", "not supported"),
        ({"logit_bias": {"50256": -100}}, "logit_bias", "token id 50256 is outside the vocabulary"),
        ({"logit_bias": {"7": -101}}, "logit_bias", "from -100 to 100"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids, as strings"),
        ({"logit_bias": [7]}, "logit_bias", "should map"),
        ({"presence_penalty": 2.1}, "presence_penalty", "less than or equal to 2"),
        ({"frequency_penalty": -2.1}, "frequency_penalty", "greater than or equal to -2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.01"),
        ({"repetition_penalty": 1e-38}, "repetition_penalty", "greater than or equal to 0.01"),
        ({"min_p": 1.1}, "min_p", "less than or equal to 1"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least 1"),
        ({"allowed_token_ids": [99999]}, "allowed_token_ids", "99999"),
        ({"bad_words": [""]}, "bad_words.0", "at least 1 character"),
        ({"bad_words": ["  "]}, "bad_words", "has no tokens"),
        ({"bad_words": "a"}, "bad_words", "list"),
        ({"bad_words": ["a"] * 1025}, "bad_words", "1024"),
        ({"bad_words": ["a", "b" * 1025]}, "bad_words.1", "1024 characters"),
        ({"bad_words": ["a", "b" * 129]}, "bad_words", "128 tokens of a word"),
        ({"bad_words": [f"{number:x<16}" for number in range(513)]}, "bad_words", "8192 of all words"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids", "1024"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "less than or equal to 20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
        ({"speculative": 1}, "speculative", "boolean"),
        ({"timeout": 0}, "timeout", "greater than 0"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema belongs to"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format", "belongs to"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "required",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "a JSON schema"),
        ({"structured_outputs": {"json": '{"const": "\\ud800"}'}}, "structured_outputs.json", "a JSON schema"),
        ({"structured_outputs": {"json": '{"const": NaN}'}}, "structured_outputs.json", "a JSON schema"),
        ({"structured_outputs": {"json": "[" * 100_000}}, "structured_outputs.json", "a JSON schema"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "unknown"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "two things",
        ),
        ({"use_beam_search": True}, "use_beam_search", "not supported"),
        ({"add_special_tokens": False}, "add_special_tokens", "not supported"),
        ({"max_token": 3}, "max_token", "unknown parameter"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "guided_regex", "two things"),
        ({"echo": True, "truncate_prompt_tokens": 1}, "truncate_prompt_tokens", "exclude each other"),
        ({"no_stop_trim": True}, "no_stop_trim", "not supported"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
async def test_a_wrong_parameter_is_named(
    http: httpx.AsyncClient, engine: FakeEngine, change: dict[str, Any], param: str, words: str
) -> None:
    for streamed in ({}, {"stream": True}) if "stream" not in change and "stream_options" not in change else ({},):
        response = await http.post("/v1/completions", json={"prompt": "abc", **streamed, **change})
        error = error_of(response, 400)
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param
        assert words in error["message"]
    assert not engine.requests
    assert (await http.post("/v1/completions", json={"prompt": "abc"})).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": "a"',
        b'{"prompt": "a",}',
        b"prompt=a",
        b"[1]",
        b'"a"',
        b"null",
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "top_p": -Infinity}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 100_000,
    ],
    ids=lambda body: repr(body[:30]),
)
async def test_malformed_json_is_refused(http: httpx.AsyncClient, body: bytes) -> None:
    response = await http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert error_of(response, 400)["type"] == "invalid_request_error"
    assert (await http.post("/v1/completions", json={"prompt": "abc"})).status_code == 200


async def test_a_giant_body_is_refused(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", content=b"[" + b"1," * 9_000_000)
    assert error_of(response, 413)["code"] == "body_too_large"


async def test_the_content_type_does_not_matter(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", content=b'{"prompt": "abc"}')
    assert response.status_code == 200


async def test_an_unknown_model_is_not_found(http: httpx.AsyncClient) -> None:
    error = error_of(await http.post("/v1/completions", json={"model": "gpt-9", "prompt": "a"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'fake'" in error["message"]
    error_of(await http.get("/v1/models/gpt-9"), 404)


@pytest.mark.parametrize(
    "body",
    [
        {"model": "x" * 10**6, "prompt": "a"},
        {"x" * 10**6: 1, "prompt": "a"},
        {"prompt": "a", "structured_outputs": {"x" * 10**6: 1}},
    ],
    ids=["model", "parameter", "inner parameter"],
)
async def test_errors_repeat_only_the_ends_of_long_names(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    response = await http.post("/v1/completions", json=body)
    error = error_of(response, 404 if "model" in body else 400)
    assert len(error["message"]) <= 2000
    assert len(error["param"]) <= 200


async def test_a_shortened_error_still_says_what_is_wrong(http: httpx.AsyncClient) -> None:
    error = error_of(await http.post("/v1/completions", json={"model": "x" * 10**6, "prompt": "a"}), 404)
    assert error["message"].startswith("the model 'xxx")
    assert error["message"].endswith("xxx' does not exist; this server has 'fake'")
    for method in ("GET", "DELETE"):  # 404 and 405
        response = await http.request(method, f"/v1/models/{'x' * 10**4}")
        assert error_of(response, 404 if method == "GET" else 405)
        assert len(response.content) < 3000


async def test_unknown_paths_and_methods(http: httpx.AsyncClient) -> None:
    assert "/v1/nothing" in error_of(await http.get("/v1/nothing"), 404)["message"]
    response = await http.get("/v1/completions")
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
    error_of(await http.post("/health"), 405)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_engines_refusal_is_a_400(http: httpx.AsyncClient, stream: bool) -> None:
    response = await http.post("/v1/completions", json={"prompt": f"{REFUSE}abc", "stream": stream})
    assert "it does not fit" in error_of(response, 400)["message"]


@pytest.mark.parametrize(
    ("control", "status", "kind", "words"),
    [(BREAK, 500, "server_error", "not finite"), (DEAD_END, 400, "invalid_request_error", "no token may follow")],
)
async def test_a_generation_that_ends_early_is_an_error_or_an_error_event(
    http: httpx.AsyncClient, control: str, status: int, kind: str, words: str
) -> None:
    """500 if the server failed, 400 if the request's parameters allow no further token. A stream has the text before.

    The fake engine gives two tokens, and three together with the error.
    """
    body = {"prompt": f"{control}abc", "max_tokens": 50, "seed": 1}
    error = error_of(await http.post("/v1/completions", json=body), status)
    assert error["type"] == kind
    assert words in error["message"]
    response = await http.post("/v1/completions", json={**body, "stream": True})
    assert response.status_code == 200
    frames = response.text.strip().split("\n\n")
    assert frames[-1] == "data: [DONE]"
    *chunks, event = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]
    assert (event["error"]["type"], words in event["error"]["message"]) == (kind, True)
    assert len("".join(chunk["choices"][0]["text"] for chunk in chunks)) == 5


async def test_an_unexpected_exception_tells_nothing(
    http: httpx.AsyncClient, engine_client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(requests: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(engine_client, "submit", broken)
    for stream in (False, True):
        response = await http.post("/v1/completions", json={"prompt": "abc", "stream": stream})
        error = error_of(response, 500)
        assert error["type"] == "server_error"
        assert "secret" not in response.text


async def test_without_an_engine_everything_but_health_and_completions_answers(
    config: Any, tokenizer_dir: Path
) -> None:
    async with http_client(config, EngineClient(), tokenizer_dir) as http:
        for response in (await http.get("/health"), await http.post("/v1/completions", json={"prompt": "abc"})):
            assert error_of(response, 503)["type"] == "server_error"
            assert response.headers["retry-after"] == "1"
        assert (await http.get("/v1/models")).json()["data"][0]["max_model_len"] is None
        assert (await http.get("/v1/server_info")).json()["engine"]["available"] is False


async def test_when_the_engine_dies_everybody_gets_an_error_at_once(
    http: httpx.AsyncClient, engine: FakeEngine, engine_client: EngineClient
) -> None:
    bodies = [{"prompt": f"{STALL}abc"}, {"prompt": [f"{STALL}abc", "x"]}, {"prompt": f"{STALL}abc", "stream": True}]
    calls = [asyncio.create_task(http.post("/v1/completions", json=body)) for body in bodies]
    started = asyncio.create_task(
        http.post("/v1/completions", json={"prompt": [f"{STALL}abc", "x"], "stream": True, "max_tokens": 4})
    )
    async with asyncio.timeout(PATIENCE):
        while len(engine.requests) < 6 or len(engine.sequences) > 4:  # until only the stalled requests are left
            await asyncio.sleep(0.01)
    engine_client.detach("the engine died")
    for call in calls:
        assert "the engine died" in error_of(await call, 503)["message"]
    frames = (await started).text.strip().split("\n\n")
    assert frames[-1] == "data: [DONE]"
    assert "the engine died" in json.loads(frames[-2].removeprefix("data: "))["error"]["message"]


@pytest.fixture
async def locked(tokenizer_dir: Path, engine_client: EngineClient, running: None) -> AsyncIterator[httpx.AsyncClient]:
    flags = ["--model-path", str(tokenizer_dir), "--served-model-name", "fake", "--api-key", "sésame"]
    async with http_client(parse_args(flags, environ={}), engine_client, tokenizer_dir) as client:
        yield client


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer nope", "sésame", "Bearer sésam", "bearersésame"])
async def test_without_the_key_all_but_health_is_closed(locked: httpx.AsyncClient, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header.encode()}
    closed = [
        ("GET", "/v1/models"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/server_info"),
        ("POST", "/tokenize"),
        ("POST", "/flush_cache"),
    ]
    for method, path in closed:
        response = await locked.request(method, path, headers=headers, json={"prompt": "abc"})
        assert error_of(response, 401)["code"] == "invalid_api_key"
    for path in ("/health", "/health_generate", "/metrics", "/version", "/openapi.json", "/"):
        assert (await locked.get(path)).status_code == 200


@pytest.mark.parametrize("header", ["Bearer sésame", "bearer sésame", "BEARER  sésame "])
async def test_with_the_key_v1_is_open_and_never_shows_it(locked: httpx.AsyncClient, header: str) -> None:
    locked.headers = httpx.Headers({"authorization": header.encode()})
    assert (await locked.post("/v1/completions", json={"prompt": "abc"})).status_code == 200
    info = await locked.get("/v1/server_info")
    assert info.status_code == 200
    assert "same" not in info.text.replace("sampl", "")


async def test_token_ids_of_special_tokens_are_allowed(http: httpx.AsyncClient) -> None:
    assert (await http.post("/v1/completions", json={"prompt": [97, max(ID.values())]})).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            "/v1/completions",
            '{"prompt": "a", "structured_outputs": {"json": {"items": [{"minimum": 1e999}]}}}',
            "structured_outputs.json: a number in the schema is too large",
        ),
        (
            "/v1/completions",
            '{"prompt": "a", "structured_outputs": {"json": "{\\"minimum\\": -1e999}"}}',
            "structured_outputs.json: a number in the schema is too large",
        ),
        (
            "/v1/completions",
            json.dumps({"prompt": "a", "structured_outputs": {"json": json.dumps({"enum": ["a" * 262_144]})}}),
            "structured_outputs.json: should have from 1 to 262144 characters where it is text",
        ),
        (
            "/v1/completions",
            '{"prompt": "a", "structured_outputs": {"json": 3}}',
            "structured_outputs.json: should be a JSON schema, as an object or as its text",
        ),
        (
            "/v1/chat/completions",
            '{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_schema", '
            '"json_schema": {"schema": {"minimum": 1e999}}}}',
            "response_format.json_schema.schema: a number in the schema is too large",
        ),
        (
            "/v1/chat/completions",
            '{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": '
            '{"name": "f", "parameters": {"minimum": 1e999}}}]}',
            "tools.0.function.parameters: a number in the schema is too large",
        ),
        (
            "/tokenize",
            json.dumps({"prompt": "a" * (2**19 + 1)}),
            "the maximum length of a text that is only tokenized is 524288 tokens, "
            "however the text has at least 524289",
        ),
    ],
)
async def test_an_error_says_what_is_wrong(http: httpx.AsyncClient, path: str, body: str, message: str) -> None:
    response = await http.post(path, content=body)
    assert (response.status_code, response.json()["error"]["message"]) == (400, message)
