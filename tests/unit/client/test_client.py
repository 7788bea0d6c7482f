"""Client, supervisor and engine process with real sockets, without HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack, aclosing, asynccontextmanager
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from eagle_server.client.client import EngineClient, EngineUnavailable, QueueFull
from eagle_server.client.supervisor import Backoff, EngineFailed, Supervisor
from eagle_server.engine.process import EngineFactory
from eagle_server.request import Abort, Deltas, FinishReason, Inbound, Request, SamplingParams, TokenDelta
from tests.api.conftest import PATIENCE, is_alive
from tests.api.fake_engine import ID, MAX_REQUEST_TOKENS, REFUSE, STALL, FakeEngine

FAKE = "tests.api.fake_engine"


def request(name: str, prompt: str = "abc", max_tokens: int = 6) -> Request:
    ids = [ID[prompt]] if prompt in ID else list(prompt.encode())
    return Request(request_id=name, prompt_token_ids=ids, sampling=SamplingParams(max_tokens=max_tokens, seed=0))


async def tokens(client: EngineClient, wanted: Request) -> list[int]:
    return [token async for delta in client.generate(wanted) for token in delta.token_ids]


@asynccontextmanager
async def supervised(function: str = "build", *arguments: object) -> AsyncIterator[tuple[EngineClient, Supervisor]]:
    client = EngineClient()
    backoff = Backoff(first=0.05)
    supervisor = Supervisor(EngineFactory(FAKE, function, arguments), client, backoff=backoff)
    task = asyncio.create_task(supervisor.run())
    try:
        await asyncio.wait({task, asyncio.create_task(client.until_available())}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        yield client, supervisor
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, EngineFailed):
            await task


async def until_running(client: EngineClient, count: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while client.stats is None or client.stats.running != count:
            await asyncio.sleep(0.01)


async def test_a_request_makes_the_round_trip() -> None:
    async with supervised() as (client, _):
        assert client.ready is not None
        assert client.ready.max_request_tokens == MAX_REQUEST_TOKENS
        deltas = [delta async for delta in client.generate(request("a"))]
        assert [token for delta in deltas for token in delta.token_ids] == list(b"abcabc")
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish_reason is FinishReason.LENGTH
        assert deltas[-1].spec is not None
        many = await asyncio.gather(*(tokens(client, request(f"r{i}", f"text {i}", 50)) for i in range(50)))
        assert many == [list((f"text {i}" * 20).encode()[:50]) for i in range(50)]
        await until_running(client, 0)


async def test_a_refusal_ends_the_request() -> None:
    async with supervised() as (client, _):
        [delta] = [delta async for delta in client.generate(request("a", REFUSE))]
        assert (delta.finish_reason, delta.error) == (FinishReason.REFUSED, "it does not fit")


async def test_leaving_early_aborts() -> None:
    async with supervised() as (client, _):
        async with aclosing(client.generate(request("a", max_tokens=10**6))) as deltas:
            async for _delta in deltas:
                break
        await until_running(client, 0)
        stalled = asyncio.create_task(tokens(client, request("b", STALL)))
        await until_running(client, 1)
        stalled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stalled
        await until_running(client, 0)


async def test_an_aborted_request_gets_its_last_delta() -> None:
    async with supervised() as (client, _):
        with client.submit([request("a", STALL), request("b")]) as generation:
            generation.complete("a", 0)
            generation.complete("nobody", 0)
            reasons = {delta.request_id: delta.finish_reason async for delta in generation}
        assert reasons == {"a": FinishReason.ABORT, "b": FinishReason.LENGTH}


def attached(max_waiting: int) -> tuple[EngineClient, list[Inbound]]:
    """A client, and what it sends to an engine that says nothing."""
    client, sent = EngineClient(max_waiting), list[Inbound]()
    client.attach(sent.append, FakeEngine().ready())
    return client, sent


def room(client: EngineClient, name: str = "") -> int:
    """How many sequences of a client may still wait."""
    for count in range(1, 2000):
        try:
            client.check_room(name, count)
        except QueueFull:
            return count - 1
    raise AssertionError("there is room for any number")


def answer(client: EngineClient, *names: str, reason: FinishReason | None = FinishReason.ABORT) -> None:
    deltas = [TokenDelta(request_id=name, token_ids=[], finish_reason=reason) for name in names]
    client.dispatch(Deltas(deltas, FakeEngine().stats()))


async def test_a_request_keeps_its_place_until_the_engine_has_answered_the_abort() -> None:
    client, sent = attached(max_waiting=6)
    for name in "abc":
        with client.submit([request(name), request(f"{name}2")]):
            pass
    assert sent[-2:] == [Abort("c"), Abort("c2")]
    assert room(client) == 0
    answer(client, "a", "a2", reason=None)  # tokens of before the abort
    assert room(client) == 0
    answer(client, "a", "b2")
    assert room(client) == 2
    assert client.is_waiting
    answer(client, "a2", "b", "c", "c2")
    assert room(client) == 6
    assert not client.is_waiting
    with client.submit([request("d")]):
        pass
    client.detach("it died")
    assert room(client) == 6


def load(client: EngineClient) -> tuple[int, int, int]:
    """Sequences and clients that wait, and the longest wait in whole seconds."""
    assert client.stats is not None
    return client.stats.waiting, client.stats.waiting_clients, int(client.stats.longest_wait)


def says(client: EngineClient, running: int, **stats: float) -> None:
    client.dispatch(Deltas([], replace(FakeEngine().stats(), running=running, **stats)))


async def test_what_the_engine_has_not_read_or_answered_and_what_is_being_prepared_waits() -> None:
    client, _ = attached(max_waiting=100)
    assert client.stats is None
    says(client, 0)
    assert load(client) == (0, 0, 0)
    now = time.monotonic()

    def asked(client_name: str, seconds: int, count: int) -> list[Request]:
        names = [f"{client_name}{i}" for i in range(count)]
        return [replace(request(name), client=client_name, began=now - seconds) for name in names]

    with client.submit(asked("a", 500, 3)), client.prepare("b", 2, now - 300):
        assert load(client) == (5, 2, 500), "the engine is silent"
        says(client, 1)
        assert load(client) == (4, 2, 500)
        says(client, 3)
        assert load(client) == (2, 1, 300)
        answer(client, "a0", "a1", "a2", reason=None)
        says(client, 2, waiting=1, waiting_clients=1, longest_wait=2.0)  # the engine has preempted it
        assert load(client) == (3, 1, 300)
        with client.submit(asked("c", 200, 4)):
            assert load(client) == (7, 2, 300)
    says(client, 3)
    assert load(client) == (4, 1, 200), "the aborts are not answered"
    answer(client, *(f"a{i}" for i in range(3)), *(f"c{i}" for i in range(4)))
    assert load(client) == (0, 0, 0)


@pytest.mark.parametrize("most", [1, 3, 6, 7, 8, 15, 100, 1024])
def test_an_empty_queue_has_places_for_the_most_sequences_of_one_request(most: int) -> None:
    client = EngineClient(max_waiting=most)
    assert client.most_at_once == room(client) >= most * 7 // 8


@given(data=st.data())
@settings(max_examples=50)
def test_nobody_takes_more_than_seven_times_the_places_that_are_free_then(data: st.DataObject) -> None:
    client, _ = attached(most := data.draw(st.integers(8, 200)))
    held, sent = Counter[str](), list[tuple[str, str]]()
    with ExitStack() as stack:
        for step in range(40):
            name, count = data.draw(st.sampled_from("ab")), data.draw(st.integers(1, 30))
            try:
                if data.draw(st.booleans()):
                    stack.enter_context(client.prepare(name, count, 0.0))
                else:
                    asked = [replace(request(f"{step}-{i}"), client=name) for i in range(count)]
                    stack.enter_context(client.submit(asked))
                    sent += [(each.request_id, name) for each in asked]
            except QueueFull as full:
                assert "this request has" in str(full)
            else:
                held[name] += min(count, client.most_at_once or 0)
                assert held[name] < 7 * (most - held.total() + 1)
            if sent and data.draw(st.booleans()):
                request_id, owner = sent.pop()
                answer(client, request_id)
                held[owner] -= 1
            free = most - held.total()
            assert free * 7 // 8 <= room(client, "new") <= free
    assert len(client._places) == len(sent)


def test_a_full_client_learns_whose_places_are_taken() -> None:
    client, _ = attached(max_waiting=16)
    with client.prepare("a", 14, 0.0):
        with pytest.raises(
            QueueFull, match="14 of 14 sequences that wait are this client's, this request has 1, at most"
        ):
            client.check_room("a")
        client.check_room("b")
        with (
            client.prepare("b", 2, 0.0),
            pytest.raises(QueueFull, match="16 sequences wait, this request has 1, at most 16"),
        ):
            client.check_room("c")


async def test_a_killed_engine_fails_requests_and_returns() -> None:
    async with supervised() as (client, supervisor):
        assert supervisor._process is not None
        pid = supervisor._process.pid
        stalled = asyncio.create_task(tokens(client, request("a", STALL)))
        await until_running(client, 1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineUnavailable, match="the engine died"):  # long before the watchdog's 300 seconds
            async with asyncio.timeout(PATIENCE):
                await stalled
        assert not client.is_available
        with pytest.raises(EngineUnavailable, match="not running"):
            await tokens(client, request("b"))
        async with asyncio.timeout(PATIENCE):
            await client.until_available()
        assert await tokens(client, request("c")) == list(b"abcabc")


async def test_a_restart_that_fails_is_tried_again(tmp_path: Path) -> None:
    async with supervised("build_but_fail_second", str(tmp_path)) as (client, supervisor):
        supervisor.kill()
        async with asyncio.timeout(PATIENCE):
            while client.is_available:
                await asyncio.sleep(0.01)
            await client.until_available()
        assert len(list(tmp_path.iterdir())) == 3
        assert await tokens(client, request("a")) == list(b"abcabc")


async def test_a_restart_without_a_directory_for_sockets_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    make, failures = tempfile.mkdtemp, []

    def fails_once(**options: str) -> str:
        if not failures:
            failures.append(options)
            raise FileNotFoundError(2, "No such file or directory", "/gone")
        return make(**options)

    async with supervised() as (client, supervisor):
        monkeypatch.setattr(tempfile, "mkdtemp", fails_once)
        supervisor.kill()
        async with asyncio.timeout(PATIENCE):
            while client.is_available:
                await asyncio.sleep(0.01)
            await client.until_available()
        assert failures and await tokens(client, request("a")) == list(b"abcabc")


async def test_the_engine_leaves_signals_to_its_parent() -> None:
    async with supervised() as (client, supervisor):
        assert supervisor._process is not None
        pid = supervisor._process.pid
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, signal_number)
        await asyncio.sleep(0.1)
        assert await tokens(client, request("a")) == list(b"abcabc")
    assert not is_alive(pid)


@pytest.mark.parametrize(
    ("function", "message", "is_configuration"),
    [
        ("build_with_bad_configuration", "config.json: no such architecture", True),
        ("build_with_bug", "RuntimeError: a bug", False),
    ],
)
async def test_a_first_start_that_fails_is_not_tried_again(function: str, message: str, is_configuration: bool) -> None:
    with pytest.raises(EngineFailed) as failure:
        async with supervised(function):
            pass
    assert str(failure.value) == message
    assert failure.value.is_configuration == is_configuration


def test_backoff_doubles_up_to_a_limit() -> None:
    backoff = Backoff(first=0.5, limit=30)
    assert [backoff.delay(failures) for failures in (0, 1, 2, 5, 6, 1000)] == [0.5, 1, 2, 16, 30, 30]
