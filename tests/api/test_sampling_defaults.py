"""generation_config.json counts where a request is silent."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from eagle_server.client.client import EngineClient
from eagle_server.config import parse_args
from tests.api.conftest import http_client
from tests.api.fake_engine import FakeEngine

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "transformers_version": "4.51.0"}
SILENT = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
USER = [{"role": "user", "content": "a"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/messages": {"messages": USER, "max_tokens": 2},
}
Serving = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def serving(tokenizer_dir: Path, tmp_path: Path, engine_client: EngineClient, running: None) -> Serving:
    """A server of a model with this generation_config.json."""

    @asynccontextmanager
    async def serve(values: dict[str, Any] | None, *flags: str) -> AsyncIterator[httpx.AsyncClient]:
        model = tmp_path / "model"
        model.mkdir()
        (model / "tokenizer.json").write_bytes((tokenizer_dir / "tokenizer.json").read_bytes())
        if values is not None:
            (model / "generation_config.json").write_text(json.dumps(values))
        config = parse_args(["--model-path", str(model), "--served-model-name", "fake", *flags], environ={})
        async with http_client(config, engine_client, model) as client:
            yield client

    return serve


def sampled(engine: FakeEngine) -> dict[str, float]:
    params = engine.requests[-1].sampling
    return {name: getattr(params, name) for name in SILENT}


@pytest.mark.parametrize("path", BODIES)
async def test_a_silent_request_is_sampled_as_the_models_makers_want(
    serving: Serving, engine: FakeEngine, path: str
) -> None:
    body = {"model": "fake", **BODIES[path]}
    async with serving(QWEN3) as http:
        assert (await http.post(path, json=body)).status_code == 200
        assert sampled(engine) == SILENT | {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
        given = {"temperature": 1.0, "top_p": 0.5}
        assert (await http.post(path, json=body | given)).status_code == 200
        assert sampled(engine) == SILENT | given | {"top_k": 20}, "what is given wins, also if it is the usual value"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (None, {}),
        ({}, {}),
        ({"temperature": None, "eos_token_id": 0}, {}),
        ({"repetition_penalty": 1.05, "min_p": 0.1}, {"repetition_penalty": 1.05, "min_p": 0.1}),
        ({"temperature": 0.0}, {"temperature": 0.0}),
        ({"top_k": 1}, {"top_k": 1}),
        ({"do_sample": False, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ],
    ids=str,
)
async def test_only_what_the_file_says_changes(
    serving: Serving, engine: FakeEngine, values: dict[str, Any] | None, expected: dict[str, float]
) -> None:
    async with serving(values) as http:
        assert (await http.post("/v1/completions", json=BODIES["/v1/completions"])).status_code == 200
        assert sampled(engine) == SILENT | expected
        info = (await http.get("/v1/server_info")).json()
        assert info["resolved"]["model"]["sampling_defaults"] == expected


async def test_an_option_ignores_the_file_or_names_another(
    serving: Serving, engine: FakeEngine, tmp_path: Path
) -> None:
    async with serving(QWEN3, "--generation-config", "none") as http:
        await http.post("/v1/completions", json=BODIES["/v1/completions"])
    assert sampled(engine) == SILENT


async def test_a_directory_of_the_users(serving: Serving, engine: FakeEngine, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"temperature": 0.25}')
    async with serving(QWEN3, "--generation-config", str(other)) as http:
        await http.post("/v1/completions", json=BODIES["/v1/completions"])
    assert sampled(engine) == SILENT | {"temperature": 0.25}


@pytest.mark.parametrize(
    ("values", "flags", "words"),
    [
        ({"temperature": "hot"}, (), "temperature should be a number, not 'hot'"),
        ({"top_p": 1.5}, (), "top_p 1.5: Input should be less than or equal to 1"),
        ({"top_k": 0.5}, (), "top_k 0.5"),
        ({}, ("--generation-config", "/nowhere"), "--generation-config /nowhere: there is no generation_config.json"),
    ],
    ids=str,
)
async def test_a_file_that_no_request_could_follow_is_named_at_the_start(
    serving: Serving, values: dict[str, Any], flags: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ValueError, match="generation_config.json") as error:
        async with serving(values, *flags):
            pass
    assert words in str(error.value)
    assert "none" in str(error.value), "the message says how to go on"
