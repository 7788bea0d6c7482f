"""Limits of a request: the queue, timeouts, slow readers, a hanging engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from eagle_server.api.generation import prepare
from eagle_server.client import client
from eagle_server.client.client import EngineClient, EngineUnavailable, GenerationTimeout, SlowReader
from eagle_server.client.supervisor import Backoff, Supervisor
from eagle_server.config import parse_args
from eagle_server.engine.process import EngineFactory
from eagle_server.request import Request, SamplingParams, TokenDelta
from tests.api.conftest import PATIENCE, Server, http_client
from tests.api.fake_engine import HANG, ID, SLOW, STALL, FakeEngine
from tests.api.servers import stats, wait_until_idle


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


# --- The queue ---


@pytest.fixture
def engine_client() -> EngineClient:
    return EngineClient(max_waiting=3)


@contextlib.asynccontextmanager
async def posted(http: httpx.AsyncClient, **body: Any) -> AsyncIterator[asyncio.Task[httpx.Response]]:
    task = asyncio.create_task(http.post("/v1/completions", json=body))
    yield task
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_more_requests_than_may_wait_are_turned_away(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    async with posted(http, prompt=[STALL, STALL]):
        await until(lambda: len(engine.sequences) == 2)
        for streamed in (False, True):  # two more do not fit, one does
            response = await http.post("/v1/completions", json={"prompt": ["a", "b"], "stream": streamed})
            error = error_of(response, 429)
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert "2 sequences wait, this request has 2, at most 3 may wait" in error["message"]
            assert response.headers["retry-after"] == "1"
        assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        async with posted(http, prompt=STALL):
            await until(lambda: len(engine.sequences) == 3)
            # Refused before the body is read.
            error_of(await http.post("/v1/completions", content=b"{"), 429)
            assert (await http.get("/v1/models")).status_code == 200
    await until(lambda: not engine.sequences)
    assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 200


async def test_a_client_that_fills_the_queue_leaves_places_for_the_next(
    http: httpx.AsyncClient, engine: FakeEngine, engine_client: EngineClient
) -> None:
    engine_client.max_waiting = 16
    app = http._transport.app  # type: ignore[attr-defined]
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False, client=("192.0.2.1", 1))
    async with (
        posted(http, prompt=STALL, n=14),
        httpx.AsyncClient(transport=transport, base_url=http.base_url) as other,
    ):
        await until(lambda: len(engine.sequences) == 14)
        for body in ({"prompt": "a"}, {"prompt": "a" * 5000}):
            error = error_of(await http.post("/v1/completions", json=body), 429)
            assert "14 of 14 sequences that wait are this client's" in error["message"]
            assert (await other.post("/v1/completions", json=body)).status_code in (200, 400)
        assert (await other.post("/v1/completions", json={"prompt": ["a", "a"]})).status_code == 200


async def test_what_the_queue_refuses_is_not_prepared(
    http: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with posted(http, prompt=STALL, n=2):
        await until(lambda: len(engine.sequences) == 2)
        monkeypatch.setattr(prepare, "_requests", lambda *arguments: pytest.fail("it was prepared"))
        for size in (1, 5000):
            error_of(await http.post("/v1/completions", json={"prompt": "a" * size, "n": 2}), 429)


async def test_running_requests_do_not_wait(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    async with posted(http, prompt=[f"{SLOW}a"] * 3, max_tokens=1000):
        await until(lambda: len(engine.sequences) == 3 and all(s.emitted for s in engine.sequences.values()))
        assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 200


async def test_a_request_that_never_fits_the_queue_is_wrong(http: httpx.AsyncClient) -> None:
    assert "from 1 to 3" in error_of(await http.post("/v1/completions", json={"prompt": "a", "n": 4}), 400)["message"]


# --- Timeouts ---


@pytest.fixture
async def hasty(tokenizer_dir: Path, engine_client: EngineClient, running: None) -> AsyncIterator[httpx.AsyncClient]:
    flags = ["--model-path", str(tokenizer_dir), "--served-model-name", "fake", "--request-timeout", "0.2"]
    async with http_client(parse_args(flags, environ={}), engine_client, tokenizer_dir) as client:
        yield client


@pytest.mark.parametrize("asked", [{}, {"timeout": 3600}])
async def test_the_servers_timeout_ends_a_request(
    hasty: httpx.AsyncClient, engine: FakeEngine, asked: dict[str, Any]
) -> None:
    error = error_of(await hasty.post("/v1/completions", json={"prompt": STALL, **asked}), 408)
    assert error["code"] == "timeout"
    assert "0.2 seconds" in error["message"]
    await until(lambda: engine.aborted)
    assert not engine.sequences


async def test_a_requests_own_timeout_ends_it(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    error_of(await http.post("/v1/completions", json={"prompt": STALL, "timeout": 0.05, "stream": True}), 408)
    body = {"prompt": f"{SLOW}abc", "timeout": 0.3, "stream": True, "max_tokens": 1000}
    frames = (await http.post("/v1/completions", json=body)).text.strip().split("\n\n")
    assert frames[-1] == "data: [DONE]"
    assert json.loads(frames[-2].removeprefix("data: "))["error"]["code"] == "timeout"
    assert len(frames) > 3
    await until(lambda: len(engine.aborted) == 2)
    assert (await http.post("/v1/completions", json={"prompt": "abc", "timeout": PATIENCE})).status_code == 200


# --- Slow readers ---


def a_request(name: str, prompt: str = "abc") -> Request:
    ids = [ID[prompt]] if prompt in ID else list(prompt.encode())
    return Request(request_id=name, prompt_token_ids=ids, sampling=SamplingParams(max_tokens=10**6, seed=0))


async def test_deltas_that_nobody_reads_are_bounded(
    engine: FakeEngine, engine_client: EngineClient, running: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MAX_UNREAD_DELTAS", 50)
    with engine_client.submit([a_request("a")]) as unread:
        await until(lambda: engine.aborted)
        assert not engine.sequences
        read = 0
        with pytest.raises(SlowReader):
            async for _ in unread:
                read += 1
        assert read == 50


@pytest.mark.slow
def test_a_client_that_does_not_read_stalls_nobody(server: Server) -> None:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        body = json.dumps({"prompt": "abc", "n": 16, "max_tokens": 1900, "stream": True, "logprobs": 20})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall((head + body).encode())
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "abc", "max_tokens": 30}, timeout=PATIENCE)
        assert answer.json()["choices"][0]["text"] == "abc" * 10
        deadline = time.monotonic() + PATIENCE
        while stats(server)["running"]:  # its unread output stays in memory, up to the limit
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert httpx.get(f"{server.url}/v1/server_info").json()["active_requests"] == 1
    wait_until_idle(server)


# --- A hanging engine ---


@pytest.mark.slow
async def test_a_hanging_engine_is_killed_and_started_again() -> None:
    client = EngineClient()
    factory = EngineFactory("tests.api.fake_engine", "build")
    supervisor = Supervisor(factory, client, backoff=Backoff(first=0.05), watchdog=2.0)
    task = asyncio.create_task(supervisor.run())
    try:
        await client.until_available()
        await asyncio.sleep(2.4)  # an engine without work may be silent
        assert client.is_available
        stalled = asyncio.create_task(_all(client, a_request("stalled", STALL)))
        await asyncio.sleep(2.4)  # the engine works, although it makes no progress
        assert client.is_available
        with pytest.raises(EngineUnavailable, match="the engine hung"):
            await _all(client, a_request("hanging", HANG))
        with pytest.raises(EngineUnavailable, match="the engine hung"):
            await stalled
        async with asyncio.timeout(PATIENCE):
            await client.until_available()
        ended = Request(request_id="c", prompt_token_ids=[97], sampling=SamplingParams(max_tokens=2, seed=0))
        assert sum(len(delta.token_ids) for delta in await _all(client, ended)) == 2
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.mark.slow
@pytest.mark.parametrize("clients", [pytest.param(1, marks=pytest.mark.deep), 20])
async def test_a_hanging_engine_is_started_again_after_its_clients_gave_up(clients: int) -> None:
    """Each client waits for less time than the watchdog."""
    client = EngineClient()
    supervisor = Supervisor(EngineFactory("tests.api.fake_engine", "build"), client, watchdog=2.0)
    task = asyncio.create_task(supervisor.run())
    try:
        await client.until_available()
        first = client.ready
        for number in range(clients):
            if client.is_available:
                generation = client.submit([a_request(str(number), HANG)], timeout=0.2)
                with pytest.raises((GenerationTimeout, EngineUnavailable)), generation:
                    await anext(generation)
        await until(lambda: not client.is_available)
        async with asyncio.timeout(PATIENCE):
            await client.until_available()
        assert first is not client.ready
        await asyncio.sleep(2.4)  # the new engine has nothing to answer
        assert client.is_available
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _all(client: EngineClient, request: Request) -> list[TokenDelta]:
    return [delta async for delta in client.generate(request)]
