"""What /v1/responses and /v1/messages share with other endpoints: leaving clients, timeouts, the queue, comments."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from eagle_server.api.connection import COMMENT
from tests.api.conftest import PATIENCE, Server, start_server
from tests.api.fake_engine import SLOW, STALL
from tests.api.servers import wait_for_running, wait_until_idle

pytestmark = pytest.mark.slow

ASKED: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "SAY", "max_output_tokens": 400},
    "/v1/messages": {"messages": [{"role": "user", "content": "SAY"}], "max_tokens": 400},
}
each_api = pytest.mark.parametrize("path", ASKED)


def asking(path: str, say: str, **more: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(ASKED[path]).replace("SAY", say)), "stream": True, **more}


@pytest.fixture(scope="module")
def impatient(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose streams send a comment after 20 ms, and where one request may wait."""
    flags = ["--model-path", str(tokenizer_dir), "--served-model-name", "fake", "--sse-keep-alive", "0.02"]
    server = start_server(tmp_path_factory.mktemp("impatient") / "log", *flags, "--max-queue-size", "1")
    try:
        server.wait_ready()
        yield server
    finally:
        server.process.kill()
        server.process.wait(timeout=PATIENCE)


def events_of(text: str) -> list[dict[str, Any]]:
    parts = [part for part in text.split("\n\n") if part.startswith("event: ")]
    return [json.loads(part.partition("data: ")[2]) for part in parts]


@each_api
def test_a_client_that_leaves_frees_its_request(impatient: Server, path: str) -> None:
    with httpx.stream("POST", f"{impatient.url}{path}", json=asking(path, f"ab{SLOW}"), timeout=PATIENCE) as response:
        for line in response.iter_lines():
            if "delta" in line:
                wait_for_running(impatient, 1)
                break
    wait_until_idle(impatient)


def test_the_packages_leave_their_streams(impatient: Server) -> None:
    messages: Any = ASKED["/v1/messages"]["messages"]
    with (
        openai.OpenAI(base_url=f"{impatient.url}/v1", api_key="none", max_retries=0) as client,
        client.responses.stream(model="fake", input=f"ab{SLOW}") as events,
    ):
        assert next(iter(events)).type == "response.created"
        wait_for_running(impatient, 1)
    wait_until_idle(impatient)
    messages = [{"role": "user", "content": f"ab{SLOW}"}]
    with (
        anthropic.Anthropic(base_url=impatient.url, api_key="none", max_retries=0) as other,
        other.messages.stream(model="fake", messages=messages, max_tokens=400) as blocks,
    ):
        assert next(iter(blocks)).type == "message_start"
        wait_for_running(impatient, 1)
    wait_until_idle(impatient)


@each_api
def test_a_quiet_stream_has_comments(impatient: Server, path: str) -> None:
    body = asking(path, f"ab{SLOW}", **{name: 6 for name in ASKED[path] if name.startswith("max")})
    text = httpx.post(f"{impatient.url}{path}", json=body, timeout=PATIENCE).text
    assert text.count(COMMENT.decode()) >= 3
    deltas = [each for each in events_of(text) if each["type"].endswith("delta")]
    assert len(deltas) >= 6


@each_api
@pytest.mark.parametrize("say", [STALL, f"ab{SLOW}"], ids=["before the first token", "after it"])
def test_a_late_error_is_an_event(impatient: Server, path: str, say: str) -> None:
    text = httpx.post(f"{impatient.url}{path}", json=asking(path, say, timeout=0.3), timeout=PATIENCE).text
    events = events_of(text)
    if path == "/v1/responses":
        assert [each["type"] for each in events[:2]] == ["response.created", "response.in_progress"]
        assert (events[-1]["type"], events[-1]["response"]["error"]["code"]) == ("response.failed", "timeout")
    else:
        assert (events[-1]["type"], events[-1]["error"]["type"]) == ("error", "timeout_error")
    wait_until_idle(impatient)


@each_api
def test_a_full_queue_turns_requests_away(impatient: Server, path: str) -> None:
    with httpx.stream("POST", f"{impatient.url}{path}", json=asking(path, STALL), timeout=PATIENCE) as waiting:
        assert waiting.status_code == 200
        wait_for_running(impatient, 1)
        refused = httpx.post(f"{impatient.url}{path}", json=asking(path, "a"), timeout=PATIENCE)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["type"] == "rate_limit_error"
    wait_until_idle(impatient)
