"""Large bodies: they are refused or served, and never stop the event loop for long."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import Response

from eagle_server.api.endpoints import completions, tokens
from eagle_server.api.guard import body as body_module
from eagle_server.api.guard.admission import Admission
from eagle_server.api.guard.body import LARGE_BODY, MAX_BODY_BYTES, MEDIUM_BODY, SHORT_BODY, process_text
from eagle_server.api.schemas import base
from eagle_server.api.schemas.base import JsonSize, TooManyValues, parse
from eagle_server.api.schemas.completion import CompletionRequest
from eagle_server.api.schemas.tokens import TokenizeRequest
from eagle_server.api.service import Service
from tests.api.conftest import PATIENCE
from tests.api.fake_engine import FakeEngine

CHAT = '{"messages": [{"role": "user", "content": "a"}], '
STALL = 0.5  # seconds. On an idle machine the longest is 0.05, and was 1 to 6 without the limits
TRIES = 3  # a stall of the server's is there every time, one that other processes made is not


def repeated(unit: str, head: str = '{"prompt": [', tail: str = "]}", separator: str = ",") -> str:
    """A body of nearly the largest size."""
    count = (MAX_BODY_BYTES - len(head) - len(tail)) // len((unit + separator).encode())
    return head + separator.join([unit] * count) + tail


def members(head: str, key: str = "k{}", count: int = 1_000_000) -> str:
    return head + ",".join(f'"{key.format(number)}":1' for number in range(count)) + "}}"


# path, body, the parameter that the error names
BODIES: dict[str, tuple[str, Callable[[], str], str | None]] = {
    "token ids": ("/v1/completions", lambda: repeated("1"), None),
    "as many token ids as are parsed": ("/v1/completions", lambda: json.dumps({"prompt": [1] * 520_000}), "prompt"),
    "prompts of token ids": ("/v1/completions", lambda: repeated("[1]"), None),
    "texts": ("/v1/completions", lambda: repeated('"a"'), None),
    "as many texts as are parsed": ("/v1/completions", lambda: json.dumps({"prompt": ["a"] * 520_000}), "prompt"),
    "a long text": ("/v1/completions", lambda: repeated("\\u4e2d", '{"prompt": "', '"}', ""), "prompt"),
    "a text of brackets": ("/v1/completions", lambda: repeated("[{:,", '{"prompt": "', '"}', ""), "prompt"),
    "deep lists": ("/v1/completions", lambda: repeated("[" * 150 + "]" * 150), None),
    "biases": ("/v1/completions", lambda: members('{"prompt": "a", "logit_bias": {', "{}"), None),
    "many biases": ("/v1/completions", lambda: members('{"prompt": "a", "logit_bias": {', "{}", 60_000), "logit_bias"),
    "unknown parameters": (
        "/v1/completions",
        lambda: members('{"prompt": "a", "stream": true, "stream_options": {', count=60_000),
        "stream_options.k0",
    ),
    "messages": ("/v1/chat/completions", lambda: repeated('{"role":"user","content":"a"}', '{"messages": ['), None),
    "many messages": (
        "/v1/chat/completions",
        lambda: json.dumps({"messages": [{"role": "user", "content": "a" * 10}] * 20_000}),
        "messages",
    ),
    "bad messages": ("/v1/chat/completions", lambda: '{"messages": [' + "{}," * 60_000 + "{}]}", "messages.0.role"),
    "tools": (
        "/v1/chat/completions",
        lambda: repeated('{"type":"function","function":{"name":"f"}}', CHAT + '"tools": ['),
        None,
    ),
    "a call's arguments": (
        "/v1/chat/completions",
        lambda: json.dumps(
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {"type": "function", "function": {"name": "f", "arguments": '{"a":[' + "[]," * 5_000_000}}
                        ],
                    }
                ]
            }
        ),
        "messages",
    ),
    "bad words": (
        "/v1/completions",
        lambda: json.dumps({"prompt": "a", "bad_words": ["x" * 15_000] * 1024}),
        "bad_words.0",
    ),
    "many bad words": (
        "/v1/completions",
        lambda: json.dumps({"prompt": "a", "bad_words": [f"{number:x<1024}" for number in range(1024)]}),
        "bad_words",
    ),
    "allowed tokens": (
        "/v1/completions",
        lambda: json.dumps({"prompt": "a", "allowed_token_ids": [*range(100_000, 500_000)][::-1]}),
        "allowed_token_ids",
    ),
    "a text to tokenize": ("/tokenize", lambda: repeated("a", '{"prompt": "', '"}', ""), "prompt"),
    "tokens to detokenize": ("/detokenize", lambda: repeated("1", '{"tokens": ['), None),
}


async def sent(body: str) -> AsyncIterator[bytes]:
    """The body in chunks, as a server receives it."""
    data = body.encode()
    for start in range(0, len(data), 2**16):
        yield data[start : start + 2**16]
        await asyncio.sleep(0)


async def stall_during(call: Any) -> tuple[Any, float]:
    """The call's result, and the most seconds that this process computed while the event loop did not run.

    Time of the processor: that of other processes does not count.
    """
    longest, task = 0.0, asyncio.ensure_future(call)
    last = time.process_time()
    while not task.done():
        await asyncio.sleep(0.001)
        now = time.process_time()
        longest, last = max(longest, now - last), now
    return task.result(), longest


async def least_stall(send: Callable[[], Any]) -> tuple[Any, float]:
    """The result of a call, and the least stall of as many tries as it takes, `TRIES` at most."""
    least = float("inf")
    for _ in range(TRIES):
        result, stall = await stall_during(send())
        least = min(least, stall)
        if least < STALL:
            break
    return result, least


@pytest.mark.slow
@pytest.mark.parametrize("name", BODIES)
async def test_no_body_stops_the_event_loop(http: httpx.AsyncClient, engine: FakeEngine, name: str) -> None:
    path, make, param = BODIES[name]
    body = make()
    assert len(body.encode()) <= MAX_BODY_BYTES
    response, stall = await least_stall(lambda: http.post(path, content=sent(body)))
    assert response.status_code == 400, response.text[:200]
    error = response.json()["error"]
    assert (error["param"], error["code"] == "too_many_values") == (param, param is None)
    assert stall < STALL
    assert not engine.requests


@pytest.mark.slow
async def test_as_many_tokens_as_are_allowed_are_detokenized(http: httpx.AsyncClient) -> None:
    body = json.dumps({"tokens": [97] * 520_000})
    response, stall = await least_stall(lambda: http.post("/detokenize", content=sent(body)))
    assert response.json()["prompt"] == "a" * 520_000
    assert stall < STALL


async def test_a_body_that_is_announced_as_too_large_is_not_read(http: httpx.AsyncClient) -> None:
    async def body() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    headers = {"content-length": str(MAX_BODY_BYTES + 1)}
    response = await http.post("/v1/completions", content=body(), headers=headers)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize(
    ("text", "items", "nested"),
    [
        ("[1, 2, 3]", 2, 1),
        ('{"a": [1, {"b": null}], "c": ""}', 2, 6),
        ('["a,b,[{:", "\\",[", "\\\\", ",\\\\\\","]', 3, 1),
        ('"' + "," * 100, 0, 0),
    ],
)
@pytest.mark.parametrize("width", [1, 2, 3, 1000])
def test_values_are_counted_outside_of_strings_however_chunks_are_cut(
    text: str, items: int, nested: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = JsonSize()
    for start in range(0, len(text), width):
        size.add(text[start : start + width].encode())
    assert (size._items, size._nested) == (items, nested)
    for limit, value in (("MAX_ITEMS", items), ("MAX_NESTED", nested)):
        with monkeypatch.context() as patched:
            patched.setattr(base, limit, value)
            JsonSize().add(text.encode())
            patched.setattr(base, limit, value - 1)
            with pytest.raises(TooManyValues):
                JsonSize().add(text.encode())


LONG_TEXT = "a" * 5000
COUNTS = {"/tokenize": {"prompt": LONG_TEXT}, "/detokenize": {"tokens": [97] * 5000}}


def of_another_client(http: httpx.AsyncClient) -> httpx.AsyncClient:
    """A client of the same server, with another address."""
    app = http._transport.app  # type: ignore[attr-defined]
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, client=("127.0.0.2", 1)), base_url=http.base_url)


@pytest.mark.parametrize("path", COUNTS)
async def test_long_texts_wait_for_each_other_and_nobody_waits_for_them(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    gate, begun = threading.Event(), []
    respond = tokens.json_response

    def held(content: object) -> Response:
        begun.append(content)
        assert gate.wait(60)
        return respond(content)

    monkeypatch.setattr(tokens, "json_response", held)
    flood = [asyncio.create_task(http.post(path, json=COUNTS[path])) for _ in range(72)]
    try:
        while not begun or body_module._held.held_by("127.0.0.1") < 72 * 5000:
            await asyncio.sleep(0.01)
        answer = await http.post("/v1/completions", json={"prompt": "abc", "user": LONG_TEXT, "max_tokens": 3})
        assert answer.json()["choices"][0]["text"] == "abc"
        assert len(begun) == 1  # at a time
    finally:
        gate.set()
    answers = await asyncio.gather(*flood)
    assert {each.status_code for each in answers} == {200}


async def test_the_text_of_a_client_that_left_is_not_tokenized() -> None:
    body = parse(TokenizeRequest, json.dumps({"prompt": "a" * SHORT_BODY}).encode())
    gate, done = threading.Event(), list[str]()
    first = asyncio.create_task(process_text(body, lambda: gate.wait(60)))
    second = asyncio.create_task(process_text(body, lambda: done.append("second")))
    await asyncio.sleep(0.01)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    gate.set()
    assert await first
    await process_text(body, lambda: done.append("third"))
    assert done == ["third"]


async def test_bodies_are_bounded_and_one_client_leaves_room_for_the_next(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_module, "MAX_HELD_BYTES", 100_000)
    gate = asyncio.Event()

    async def halted() -> AsyncIterator[bytes]:
        yield b'{"prompt": "abc", "max_tokens": 3, "user": "' + b"u" * 40_000
        await gate.wait()
        yield b'"}'

    large = {"prompt": "abc", "user": "u" * 20_000}
    first = asyncio.create_task(http.post("/v1/completions", content=halted()))
    while body_module._held.total < 40_000:
        await asyncio.sleep(0.001)
    refused = await http.post("/v1/completions", json=large)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert "large bodies" in refused.json()["error"]["message"]
    assert (await http.post("/v1/completions", json={"prompt": "abc"})).status_code == 200
    async with of_another_client(http) as other:
        assert (await other.post("/v1/completions", json=large)).status_code == 200
    gate.set()
    assert (await first).status_code == 200
    assert (await http.post("/v1/completions", json=large)).status_code == 200
    assert (await http.post("/v1/completions", content=b"[" * 100_000)).status_code == 503
    assert (await http.post("/v1/completions", content=b"[" * 10_000)).status_code == 400
    assert not body_module._held.total and not body_module._held._held


class Clients:
    """Requests with long prompts to a server in this process, whose preparation waits for a gate."""

    def __init__(self, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
        self.http, self.gate, self.begun = http, threading.Event(), list[str]()
        state = http._transport.app.state  # type: ignore[attr-defined]
        self.service: Service = state.service
        self.admission: Admission = state.admission
        original = completions.prepare

        def held(body: CompletionRequest, *given: Any, strict: bool) -> Any:
            self.begun.append(str(body.user)[:10])
            if str(body.user).startswith("held"):
                assert self.gate.wait(60)
            return original(body, *given, strict=strict)

        monkeypatch.setattr(completions, "prepare", held)

    def send(self, user: str, size: int = 2 * SHORT_BODY, **body: Any) -> asyncio.Task[httpx.Response]:
        content = {"prompt": "abc", "user": user + "x" * size, "max_tokens": 3, **body}
        return asyncio.create_task(self.http.post("/v1/completions", json=content))

    async def until_preparing(self, count: int) -> None:
        """Wait until so many requests wait to be prepared, or are."""
        async with asyncio.timeout(60):
            while self.service.client._preparing < count:
                await asyncio.sleep(0.01)

    async def until(self, begun: int) -> None:
        async with asyncio.timeout(60):
            while len(self.begun) < begun:
                await asyncio.sleep(0.01)


@pytest.fixture
def clients(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clients]:
    found = Clients(http, monkeypatch)
    yield found
    found.gate.set()


async def test_the_memory_of_large_requests_is_given_back(clients: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    given_back = threading.Event()
    monkeypatch.setattr(body_module, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(body_module, "_malloc_trim", lambda _: given_back.set())
    assert (await clients.send("large", LARGE_BODY)).status_code == 200
    assert await asyncio.to_thread(given_back.wait, PATIENCE)


async def test_an_ordinary_prompt_does_not_wait_for_large_ones(clients: Clients) -> None:
    large = [clients.send(f"held {number} ", LARGE_BODY) for number in range(16)]
    await clients.until(1)
    assert (await clients.send("ordinary")).json()["choices"][0]["text"] == "abc"
    assert len(clients.begun) == 2
    clients.gate.set()
    assert {answer.status_code for answer in await asyncio.gather(*large)} == {200}


@pytest.mark.parametrize("size", [2 * SHORT_BODY, 2 * MEDIUM_BODY, LARGE_BODY], ids=["short", "medium", "large"])
async def test_a_client_waits_for_no_prompt_of_another_one(
    clients: Clients, http: httpx.AsyncClient, size: int
) -> None:
    flood = [clients.send(f"held {number} ", size) for number in range(24)]
    await clients.until_preparing(24)
    await clients.until(1)
    async with of_another_client(http) as other:
        clients.http = other
        two = await asyncio.gather(*(clients.send(f"other {number} ", size) for number in range(2)))
    assert len(clients.begun) == 3, "one of the flood's still runs"
    clients.gate.set()
    assert {answer.status_code for answer in (*two, *await asyncio.gather(*flood))} == {200}
    order = [user.partition(" x")[0] for user in clients.begun]
    assert order == ["held 0", "other 0", "other 1", *(f"held {number}" for number in range(1, 24))]


async def test_a_short_prompt_does_not_wait_for_long_ones(clients: Clients) -> None:
    long = [clients.send(f"held {number} ", LARGE_BODY - 2000) for number in range(60)]
    await clients.until(1)
    assert (await clients.send("short", 6000)).json()["choices"][0]["text"] == "abc"
    assert [user.partition("x")[0] for user in clients.begun] == ["held 0 ", "short"]
    clients.gate.set()
    assert {answer.status_code for answer in await asyncio.gather(*long)} == {200}


async def test_waiting_to_be_prepared_is_bounded_by_the_queues_size(clients: Clients) -> None:
    client = clients.service.client
    client.max_waiting = 4
    flood = [clients.send("held") for _ in range(4)]
    await clients.until(1)
    refused = await clients.send("one more")
    short = await clients.send("short", 1)
    assert [each.json()["error"]["code"] for each in (refused, short)] == ["queue_full"] * 2
    clients.gate.set()
    assert {answer.status_code for answer in await asyncio.gather(*flood)} == {200}
    client.check_room("", 4)


async def test_what_its_client_has_left_is_not_prepared(clients: Clients) -> None:
    first = clients.send("held")
    await clients.until(1)
    left = [clients.send("left") for _ in range(20)]
    await clients.until_preparing(21)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    clients.gate.set()
    assert (await first).status_code == 200
    assert (await clients.send("next")).status_code == 200
    assert clients.begun == ["heldxxxxxx", "nextxxxxxx"]


async def test_waiting_to_be_prepared_counts_as_time(clients: Clients) -> None:
    first = clients.send("held")
    await clients.until(1)
    late = await clients.send("late", timeout=0.05)
    assert (late.status_code, late.json()["error"]["code"]) == (408, "timeout")
    assert "its timeout of 0.05 seconds" in late.json()["error"]["message"]
    clients.gate.set()
    assert (await first).status_code == 200
    assert len(clients.begun) == 1


async def test_a_server_that_stops_prepares_nothing_more(clients: Clients) -> None:
    first = clients.send("held")
    await clients.until(1)
    waiting = [clients.send("waits") for _ in range(5)]
    await clients.until_preparing(6)
    drained = asyncio.create_task(clients.admission.drain())
    await asyncio.sleep(0)
    clients.gate.set()
    assert [(await each).status_code for each in waiting] == [503] * 5
    assert (await first).status_code == 200
    await drained
    assert len(clients.begun) == 1


async def test_a_body_counts_with_the_memory_of_its_texts(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text with one emoji takes four bytes for every character. "Try again" is no answer to one that never fits."""
    monkeypatch.setattr(body_module, "MAX_HELD_BYTES", 100_000)
    body = {"prompt": "abc", "max_tokens": 3}
    assert (await http.post("/v1/completions", json={**body, "user": "u" * 20_000})).status_code == 200
    for text in ("u" * 20_000 + "😀", "u" * 20_000 + "é"):
        for content in (json.dumps({**body, "user": text}), json.dumps({**body, "user": text}, ensure_ascii=False)):
            refused = await http.post("/v1/completions", content=content.encode())
            assert (refused.status_code, "this server holds 50000" in refused.json()["error"]["message"]) == (413, True)
    assert not body_module._held.total


@pytest.mark.parametrize(("memory", "held"), [(1000 * 2**20, 125 * 2**20), (2000 * 2**20, 250 * 2**20)])
def test_bounds_follow_the_memory_of_the_container(memory: int, held: int) -> None:
    """All that is held, and two texts that are tokenized at once at 160 bytes a byte, take a quarter."""
    command = (
        "import json, eagle_server.machine as machine; machine.usable_memory = lambda: {}\n"
        "from eagle_server.api.guard import body; from eagle_server.text import tokenizer\n"
        "print(json.dumps([body.MAX_HELD_BYTES, tokenizer.MAX_PIECE_BYTES]))"
    )
    found = subprocess.run([sys.executable, "-c", command.format(memory)], check=True, capture_output=True).stdout
    bodies, piece = json.loads(found)
    assert bodies == held
    assert bodies + 2 * 160 * piece <= memory // 4
