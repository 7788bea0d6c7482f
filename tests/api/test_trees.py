"""`return_trees`: the draft trees in responses and streams."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.api.calls import complete, stream
from tests.api.fake_engine import FakeEngine

BODY = {"prompt": "abcdefgh", "max_tokens": 12, "seed": 1, "return_trees": True}
FIELDS = {"tokens", "parents", "scores", "accepted", "bonus", "steps", "seconds"}


def emitted(tree: dict[str, Any]) -> str:
    """The text that the cycle of a tree produced."""
    return "".join(tree["tokens"][node] for node in tree["accepted"]) + (tree["bonus"] or "")


async def test_every_event_has_the_trees_of_its_text(http: httpx.AsyncClient) -> None:
    first, *later = await stream(http, **BODY)
    assert first["choices"][0]["trees"] == []  # the prefill's token is not drafted
    before = first["choices"][0]["text"]
    for event in later:
        (tree,) = event["choices"][0]["trees"]
        assert set(tree) == FIELDS
        assert tree["tokens"][0] == before[-1]
        assert tree["parents"][0] == -1
        assert len(tree["tokens"]) == len(tree["parents"]) == len(tree["scores"])
        assert tree["scores"][0] == 0
        assert emitted(tree) == event["choices"][0]["text"]
        before = event["choices"][0]["text"]


async def test_the_whole_answer_has_all_trees_in_order(http: httpx.AsyncClient) -> None:
    (choice,) = (await complete(http, **BODY))["choices"]
    said = "".join(map(emitted, choice["trees"]))
    assert choice["text"].endswith(said)
    assert len(choice["trees"]) > 2


async def test_nobody_else_gets_any(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {**BODY, "return_trees": False}
    assert all("trees" not in event["choices"][0] for event in await stream(http, **body))
    assert "trees" not in (await complete(http, **body))["choices"][0]
    assert not any(request.trees for request in engine.requests)


async def test_chats_have_them_too(http: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 12, "seed": 1, "return_trees": True}
    (choice,) = (await http.post("/v1/chat/completions", json=body)).json()["choices"]
    assert choice["message"]["content"].endswith("".join(map(emitted, choice["trees"])))
    response = await http.post("/v1/chat/completions", json={**body, "stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n")[:-2]]
    trees = [tree for event in events for tree in event["choices"][0].get("trees", ())]
    assert trees == choice["trees"]
