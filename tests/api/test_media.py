"""Images, video and audio are refused with the reason, as parts of a request and as special tokens of its prompt."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest
from tokenizers import AddedToken

from eagle_server.client.client import EngineClient
from eagle_server.text.tokenizer import FastTokenizer, media_tokens
from tests.api.fake_engine import byte_tokenizer

IMAGE = ord("~")  # stands for an image, by config.json
REASON = "stands for an image, video or audio; this server reads text only: leave it out"


@pytest.fixture
async def seeing(http: httpx.AsyncClient, engine_client: EngineClient) -> httpx.AsyncClient:
    """A server of a model that could read images."""
    assert engine_client.ready is not None
    engine_client.ready = msgspec.structs.replace(engine_client.ready, media_token_ids=(IMAGE,))
    return http


PROMPTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "text": ("/v1/completions", {"prompt": "a~b"}, "prompt"),
    "ids": ("/v1/completions", {"prompt": [97, IMAGE]}, "prompt"),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a~"}]}, "messages"),
    "stream": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "~"}], "stream": True}, "messages"),
    "response": ("/v1/responses", {"input": "a~"}, "input"),
    "message": ("/v1/messages", {"messages": [{"role": "user", "content": "~"}], "max_tokens": 4}, "invalid_request"),
}


@pytest.mark.parametrize("name", PROMPTS)
async def test_special_tokens_of_images_in_a_prompt_are_refused(seeing: httpx.AsyncClient, name: str) -> None:
    path, body, param = PROMPTS[name]
    answer = await seeing.post(path, json={"model": "fake", **body})
    assert answer.status_code == 400
    assert REASON in answer.text and f"(token {IMAGE})" in answer.text and param in answer.text


async def test_other_prompts_and_other_models_are_not_affected(
    seeing: httpx.AsyncClient, engine_client: EngineClient
) -> None:
    assert (await seeing.post("/v1/completions", json={"model": "fake", "prompt": "ab"})).status_code == 200
    assert engine_client.ready is not None
    engine_client.ready = msgspec.structs.replace(engine_client.ready, media_token_ids=None)
    assert (await seeing.post("/v1/completions", json={"model": "fake", "prompt": "a~"})).status_code == 200


PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    "audio": ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}),
    "response": ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
    "file": ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}),
    "message": ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 4}),
}


@pytest.mark.parametrize("name", PARTS)
async def test_parts_that_are_no_text_are_refused_in_the_same_words(http: httpx.AsyncClient, name: str) -> None:
    path, body = PARTS[name]
    answer = await http.post(path, json={"model": "fake", **body})
    assert answer.status_code == 400
    assert "this server reads text only" in answer.text


def test_the_tokenizer_names_special_tokens_that_config_json_does_not() -> None:
    tokenizer = byte_tokenizer()
    before = FastTokenizer(tokenizer)
    assert not media_tokens(before)
    named = ["<|vision_pad|>", "[IMG_BREAK]", "<start_of_image>", "<|AUDIO|>"]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in [*named, "<|im_end|>"]])
    tokenizer.add_tokens(["plain image"])
    assert media_tokens(FastTokenizer(tokenizer)) == {tokenizer.token_to_id(text) for text in named}
