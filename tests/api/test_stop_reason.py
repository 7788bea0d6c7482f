"""`stop_reason`: which stop of the request ended a text."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.api.calls import complete
from tests.api.fake_engine import EOS, ID

FOUR = ord("4")
# What is asked for, and the stop_reason of the answer; None: it has none.
CASES: list[tuple[dict[str, Any], str | int | None]] = [
    ({"stop": ["zz", "45"]}, "45"),
    ({"stop": "45", "include_stop_str_in_output": True}, "45"),
    ({"stop_token_ids": [1, FOUR]}, FOUR),
    ({"stop_token_ids": [FOUR], "stop": ["3"]}, "3"),  # the first one counts
    ({"stop_token_ids": [FOUR], "stop": ["6"]}, FOUR),
    ({"max_tokens": 2, "stop": ["45"], "stop_token_ids": [FOUR]}, None),
    ({"stop": ["zz"]}, None),
    ({}, None),
    ({"stop_token_ids": [ID[EOS]]}, None),  # as in vLLM: it is the end of the sequence
    ({"stop_token_ids": [ID[EOS]], "ignore_eos": True}, ID[EOS]),
]
NONE = "absent"


def choice_of(path: str, change: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    text = f"01234567{EOS}"
    prompt = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    return path, {"max_tokens": 100, **prompt, **change}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(("change", "reason"), CASES)
async def test_the_stop_that_ended_a_text_is_named(
    http: httpx.AsyncClient, path: str, change: dict[str, Any], reason: str | int | None
) -> None:
    path, body = choice_of(path, change)
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    assert choice.get("stop_reason", NONE) == (NONE if reason is None else reason)
    assert choice["finish_reason"] == ("length" if body["max_tokens"] == 2 else "stop")
    # The same in a stream, in the last chunk of the choice alone.
    streamed = await http.post(path, json={**body, "stream": True})
    frames = streamed.text.split("\n\n")[:-2]
    choices = [part for frame in frames for part in json.loads(frame.removeprefix("data: "))["choices"]]
    assert choices[-1]["finish_reason"] == choice["finish_reason"]
    assert choices[-1].get("stop_reason", NONE) == choice.get("stop_reason", NONE)
    assert all("stop_reason" not in part for part in choices[:-1])


async def test_each_choice_has_its_own(http: httpx.AsyncClient) -> None:
    answer = await complete(http, prompt=["abcx", "abcy", f"abc{EOS}"], stop=["x"], stop_token_ids=[ord("y")])
    assert [choice.get("stop_reason") for choice in answer["choices"]] == ["x", ord("y"), None]


async def test_a_stop_of_the_chat_template_is_not_named(http: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "a\nUser: b"}], "max_tokens": 100}
    [choice] = (await http.post("/v1/chat/completions", json=body)).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert "stop_reason" not in choice
