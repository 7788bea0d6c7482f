"""A server process and its clients: the openai client, disconnects, load, /health."""

from __future__ import annotations

import asyncio
import http.client
import random
import socket
import threading
import time

import httpx
import openai
import pytest

from tests.api.conftest import PATIENCE, Server
from tests.api.fake_engine import BURN, SLOW, STALL
from tests.api.servers import stats, wait_for_running, wait_until_idle

# --- Clients ---


def test_the_openai_client_completes_and_streams(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["fake"]
        answer = client.completions.create(model="fake", prompt="hé😀", max_tokens=14, logprobs=1, seed=1)
        assert answer.choices[0].text == "hé😀hé😀"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 14
        assert answer.model_extra is not None
        assert answer.model_extra["metrics"]["speculative_decoding"]["num_spec_tokens"] == 3
        events = list(
            client.completions.create(
                model="fake", prompt="hé😀", max_tokens=14, seed=1, stream=True, stream_options={"include_usage": True}
            )
        )
        assert "".join(event.choices[0].text for event in events[:-1]) == "hé😀hé😀"
        assert events[-1].usage == answer.usage


def test_the_openai_client_sees_typed_errors(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError) as not_found:
            client.completions.create(model="other", prompt="a")
        assert not_found.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            client.completions.create(model="fake", prompt="a", frequency_penalty=3)
        assert bad.value.param == "frequency_penalty"


async def test_the_async_openai_client_streams(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

        async def text(prompt: str) -> str:
            stream = await client.completions.create(model="fake", prompt=prompt, max_tokens=40, stream=True)
            return "".join([event.choices[0].text async for event in stream])

        prompts = [f"prompt {i:02d} " for i in range(16)]
        for prompt, answer in zip(prompts, await asyncio.gather(*map(text, prompts)), strict=True):
            assert answer == (prompt * 10)[:40]


def test_events_come_one_by_one(server: Server) -> None:
    body = {"prompt": f"{SLOW}abc", "max_tokens": 8, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        times = [time.monotonic() for line in response.iter_lines() if line.startswith("data")]
    assert times[-1] - times[0] > 0.25


# --- Clients that disconnect ---


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_aborts_its_request(server: Server, stream: bool) -> None:
    body = {"prompt": [f"{STALL}a", f"{STALL}b"], "n": 2, "stream": stream}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.3)
    wait_until_idle(server)


def test_a_client_that_stops_reading_aborts_its_request(server: Server) -> None:
    body = {"prompt": f"{SLOW}abc", "max_tokens": 1000, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert stats(server)["running"] == 1
    wait_until_idle(server)


@pytest.mark.slow
async def test_load_with_random_disconnects_leaves_no_trace(server: Server) -> None:
    rng = random.Random(7)
    slots = asyncio.Semaphore(32)
    done = {"complete": 0, "left": 0}

    async def call(client: httpx.AsyncClient, number: int) -> None:
        prompt = f"request {number} "
        tokens = rng.randrange(1, 120)
        leaves_after = rng.choice([None, None, 0, 1, 5])
        body = {"prompt": prompt, "max_tokens": tokens, "stream": True, "seed": number}
        text = ""
        async with slots, client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            events = 0
            async for line in response.aiter_lines():
                if events == leaves_after:
                    done["left"] += 1
                    return
                if line.startswith("data: {"):
                    text += httpx.Response(200, text=line[6:]).json()["choices"][0]["text"]
                    events += 1
            assert line == "" or text
        assert text == (prompt * 20)[:tokens]
        done["complete"] += 1

    limits = httpx.Limits(max_connections=40)
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, limits=limits) as client:
        await asyncio.gather(*(call(client, number) for number in range(400)))
    assert done["complete"] + done["left"] == 400
    assert done["left"] > 100
    wait_until_idle(server)
    assert "Traceback" not in server.log.read_text()
    assert "ERROR" not in server.log.read_text()


@pytest.mark.slow
def test_health_answers_while_the_engine_computes(server: Server) -> None:
    """Were it to wait for the engine, each answer would take at least a cycle."""
    url = f"{server.url}/v1/completions"
    body = {"prompt": f"{BURN}abc", "max_tokens": 200, "stream": True}
    # A long prompt is tokenized at the same time.
    long = {"prompt": "x" * 1900, "max_tokens": 1, "n": 20}
    cycles: list[str] = []
    stop = threading.Event()

    def read() -> None:
        with httpx.stream("POST", url, json=body, timeout=PATIENCE) as response:
            for line in response.iter_lines():
                if line.startswith("data"):
                    cycles.append(line)
                if stop.is_set():
                    return

    calls = [
        threading.Thread(target=read),
        threading.Thread(target=httpx.post, args=(url,), kwargs={"json": long, "timeout": PATIENCE}),
    ]
    try:
        for call in calls:
            call.start()
        wait_for_running(server, 1)
        with httpx.Client(base_url=server.url) as client:
            before = len(cycles)
            for _ in range(30):
                assert client.get("/health").status_code == 200
            assert len(cycles) - before < 30
    finally:
        stop.set()
        for call in calls:
            call.join()


# --- HTTP ---


def connect(server: Server) -> socket.socket:
    url = httpx.URL(server.url)
    return socket.create_connection((url.host, url.port or 80), timeout=PATIENCE)


@pytest.mark.parametrize("head", [b"GET /", b"GET / HTTP/1.1\r\nx: ", b"GET / HTTP/1.1\r\n"])
def test_headers_without_an_end_are_cut_off(server: Server, head: bytes) -> None:
    piece = b"a" * 1000 if head != b"GET / HTTP/1.1\r\n" else b"a: " + b"b" * 1000 + b"\r\n"
    with connect(server) as connection:
        connection.sendall(head)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            for _ in range(20_000):
                connection.sendall(piece)


def test_a_body_is_read_beside_the_offer_of_an_upgrade(server: Server) -> None:
    """Java's client offers HTTP/2 in the first request of a connection."""
    body = b'{"prompt": "abc", "max_tokens": 3}'
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n%b\r\n" % (len(body), offer)
    with connect(server) as connection:
        for _ in range(2):
            connection.sendall(head + body)
            with http.client.HTTPResponse(connection) as answer:
                answer.begin()
                assert answer.status == 200
                assert b'"text":"abc"' in answer.read()
