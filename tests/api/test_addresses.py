"""Who a client is: its connection's address, or the one that a trusted proxy names; never what it says of itself."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from eagle_server.api.guard import admission
from eagle_server.api.guard.addresses import TrustedProxies, address_of
from eagle_server.api.server import HttpServer
from eagle_server.client.client import EngineClient
from eagle_server.config import parse_args
from tests.api.conftest import PATIENCE, http_client
from tests.api.fake_engine import STALL, FakeEngine


async def seen_by(app: Any, client: tuple[str, int] | None, *forwarded: str) -> str:
    """The address of a request from `client`, which says on whose behalf it comes."""
    scope: Scope = {"type": "http", "client": client}
    scope["headers"] = [(b"x-forwarded-for", each.encode()) for each in forwarded]
    await app(scope, None, None)
    return address_of(scope)


async def accept(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that does nothing."""


@pytest.mark.parametrize(
    ("client", "forwarded", "address"),
    [
        ("127.0.0.1", [], "127.0.0.1"),
        ("127.0.0.1", ["203.0.113.9"], "203.0.113.9"),
        ("127.0.0.1", ["1.2.3.4, 203.0.113.9"], "203.0.113.9"),
        ("127.0.0.1", ["1.2.3.4", "203.0.113.9"], "203.0.113.9"),
        ("127.0.0.1", ["1.2.3.4, 203.0.113.9, 10.1.2.3"], "203.0.113.9"),
        ("127.0.0.1", ["203.0.113.9:4711"], "203.0.113.9"),
        ("203.0.113.9", ["1.2.3.4"], "203.0.113.9"),
        (None, ["1.2.3.4, 203.0.113.9"], "203.0.113.9"),
        (None, [], "unix"),
    ],
)
async def test_the_last_address_that_is_no_proxys_is_the_clients(
    client: str | None, forwarded: list[str], address: str
) -> None:
    app = TrustedProxies(accept, ["127.0.0.1", "10.0.0.0/8", "unix"])  # type: ignore[arg-type]
    assert await seen_by(app, None if client is None else (client, 1), *forwarded) == address


async def test_without_trust_headers_say_nothing() -> None:
    server = HttpServer(accept)
    for client in ("127.0.0.1", "::1", "203.0.113.9"):
        host = await seen_by(server.config.loaded_app, (client, 1), "1.2.3.4")
        assert host == await seen_by(accept, (client, 1))
    assert await seen_by(server.config.loaded_app, None, "1.2.3.4") == "unix"


async def test_an_ipv6_network_is_one_client() -> None:
    first, second, other = [
        await seen_by(accept, (host, 1)) for host in ("2001:db8::1", "2001:db8:0:0:ffff::2", "2001:db8:0:1::1")
    ]
    assert first == second != other
    assert await seen_by(accept, ("::ffff:192.0.2.1", 1)) == "192.0.2.1"


@pytest.mark.parametrize(("flags", "client"), [([], "127.0.0.1"), (["127.0.0.1"], "203.0.113.9")])
async def test_the_engine_gets_the_client_that_takes_turns(
    tokenizer_dir: Path,
    engine: FakeEngine,
    engine_client: EngineClient,
    running: None,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    client: str,
) -> None:
    clients = []
    add = engine.add
    monkeypatch.setattr(engine, "add", lambda request: (clients.append(request.client), add(request)))
    options = ["--model-path", str(tokenizer_dir), "--served-model-name", "fake"]
    config = parse_args([*options, *(["--forwarded-allow-ips", *flags] if flags else [])], environ={})
    async with http_client(config, engine_client, tokenizer_dir) as http:
        answer = await http.post(
            "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"x-forwarded-for": "203.0.113.9"}
        )
    assert answer.status_code == 200, answer.text
    assert clients == [client]


@pytest.mark.parametrize("wrong", ["*", "10.0.0.5/8", "proxy"])
def test_only_addresses_and_networks_are_trusted(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--forwarded-allow-ips", wrong], environ={})
    assert f"--forwarded-allow-ips '{wrong}': should be an address" in capsys.readouterr().err


async def test_requests_that_are_answered_leave_connections_to_others(
    tokenizer_dir: Path, engine: FakeEngine, engine_client: EngineClient, running: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "most_connections", lambda: 9)
    flags = ["--model-path", str(tokenizer_dir), "--served-model-name", "fake", "--forwarded-allow-ips", "127.0.0.1"]
    tasks = []
    async with (
        http_client(parse_args(flags, environ={}), engine_client, tokenizer_dir) as http,
        asyncio.timeout(PATIENCE),
    ):

        def post(client: str, prompt: str) -> asyncio.Task[httpx.Response]:
            headers = {"x-forwarded-for": client}
            return asyncio.create_task(http.post("/v1/completions", json={"prompt": prompt}, headers=headers))

        async def held(client: str, count: int) -> None:
            before = len(engine.sequences)
            tasks.extend(post(client, STALL) for _ in range(count))
            while len(engine.sequences) < before + count:
                await asyncio.sleep(0.001)

        await held("10.0.0.1", 6)
        refused = await post("10.0.0.1", "a")
        assert refused.status_code == 429 and "6 of them yours" in refused.json()["error"]["message"]
        await held("10.0.0.2", 1)
        assert [(await post(f"10.0.0.{n}", "a")).status_code for n in (2, 3)] == [429, 429]
        assert (await http.get("/health")).status_code == 200
        tasks.pop().cancel()
        await asyncio.sleep(0)
        assert (await post("10.0.0.3", "a")).status_code == 200
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
