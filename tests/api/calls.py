"""Requests to /v1/completions that must succeed."""

from __future__ import annotations

import json
from typing import Any

import httpx


async def complete(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def stream(http: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    """The events' data. Checks the framing: each event is `data: ...` and an empty line, and [DONE] is the last one."""
    response = await http.post("/v1/completions", json={"stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    frames = response.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames[:-1])
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(c["text"] for e in events for c in e["choices"] if c["index"] == index)
