"""A page of another origin can neither make a server on this machine work, nor read it by a name of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import pytest

from eagle_server.api.guard.origins import is_loopback
from eagle_server.client.client import EngineClient
from eagle_server.config import parse_args
from tests.api.conftest import http_client

OWN = "http://localhost:30000"
BODY = {"prompt": "abc", "max_tokens": 3}


@pytest.fixture
async def http(
    request: pytest.FixtureRequest, engine_client: EngineClient, tokenizer_dir: Path, running: None
) -> AsyncIterator[httpx.AsyncClient]:
    """A server with the flags that a test is parametrized with, under its own name."""
    flags: Sequence[str] = getattr(request, "param", ())
    config = parse_args(["--model-path", str(tokenizer_dir), "--served-model-name", "fake", *flags], environ={})
    async with http_client(config, engine_client, tokenizer_dir) as client:
        client.base_url = httpx.URL(OWN)
        yield client


def flags(*given: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("http", [given], indirect=True, ids=" ".join)


async def statuses(http: httpx.AsyncClient, **headers: str) -> tuple[int, int]:
    """Of a request that generates, and of one that drops the cache: each as a form of any page may send it."""
    named = {name.replace("_", "-"): value for name, value in headers.items()} | {"content-type": "text/plain"}
    generated = await http.post("/v1/completions", json=BODY, headers=named)
    flushed = await http.post("/flush_cache", headers=named)
    for answer in (generated, flushed):
        assert answer.status_code == 200 or answer.json()["error"]["code"] in ("origin_not_allowed", "host_not_allowed")
    return generated.status_code, flushed.status_code


@pytest.mark.parametrize("origin", ["https://evil.example", "http://localhost:30001", "null", "https://localhost", "x"])
async def test_a_page_of_another_origin_makes_nothing_happen(http: httpx.AsyncClient, origin: str) -> None:
    assert await statuses(http, origin=origin) == (403, 403)
    assert await statuses(http, origin=origin, sec_fetch_site="cross-site") == (403, 403)
    refused = await http.post("/v1/completions", json=BODY, headers={"origin": origin})
    assert "--cors-allow-origins names those that may" in refused.json()["error"]["message"]
    assert (await http.get("/health", headers={"origin": origin})).status_code == 200


async def test_clients_and_the_servers_own_page_are_served(http: httpx.AsyncClient) -> None:
    assert await statuses(http) == (200, 200)
    assert await statuses(http, origin=OWN) == (200, 200)
    assert await statuses(http, origin=OWN, sec_fetch_site="same-origin") == (200, 200)
    assert await statuses(http, origin="https://behind.proxy", sec_fetch_site="same-origin") == (200, 200)


@flags("--cors-allow-origins", "https://ok.example,null")
async def test_pages_that_are_named_may_use_the_server(http: httpx.AsyncClient) -> None:
    assert await statuses(http, origin="https://ok.example") == (200, 200)
    assert await statuses(http, origin="null", sec_fetch_site="cross-site") == (200, 200)
    assert await statuses(http, origin="https://evil.example") == (403, 403)


@flags("--cors-allow-origins", "*")
async def test_all_pages_may_use_the_server_if_all_are_named(http: httpx.AsyncClient) -> None:
    assert await statuses(http, origin="https://evil.example", sec_fetch_site="cross-site") == (200, 200)


OTHERS = [
    "attacker.example:30000",
    "localhost.attacker.example",
    "10.0.0.1",
    "[2001:db8::1]:30000",
    "127.0.0.1.nip.io",
    "[::1",
    "[zz]",
    "",
]
OWN_NAMES = [
    "localhost",
    "LOCALHOST:30000",
    "localhost.",
    "a.localhost:1",
    "127.0.0.1:30000",
    "127.1.2.3",
    "[::1]:30000",
]


@pytest.mark.parametrize("name", OTHERS)
async def test_a_name_that_is_bound_to_this_machine_reads_nothing(http: httpx.AsyncClient, name: str) -> None:
    for answer in (
        await http.get("/v1/server_info", headers={"host": name}),
        await http.get("/", headers={"host": name}),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")
        assert "--allowed-hosts" in answer.json()["error"]["message"]
    assert await statuses(http, host=name, origin=f"http://{name}") == (403, 403)


@pytest.mark.parametrize("name", OWN_NAMES)
async def test_this_machines_own_names_are_answered(http: httpx.AsyncClient, name: str) -> None:
    assert (await http.get("/v1/server_info", headers={"host": name})).status_code == 200


@flags("--allowed-hosts", "LLM.Example.,*.inside.example")
@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("llm.example:30000", 200),
        ("a.b.inside.example", 200),
        ("inside.example", 403),
        ("x.llm.example", 403),
        ("localhost", 200),
    ],
)
async def test_hosts_that_are_named_are_answered_too(http: httpx.AsyncClient, name: str, status: int) -> None:
    assert (await http.get("/health", headers={"host": name})).status_code == status


@flags("--host", "0.0.0.0")
async def test_a_server_for_other_machines_has_any_name(http: httpx.AsyncClient) -> None:
    assert await statuses(http, host="llm.example") == (200, 200)
    assert await statuses(http, host="llm.example", origin="https://evil.example") == (403, 403)


@flags("--host", "0.0.0.0")
async def test_a_page_behind_a_proxy_that_passes_the_host_without_its_port_is_the_servers_own(
    http: httpx.AsyncClient,
) -> None:
    assert await statuses(http, host="box", origin="http://box:8080") == (200, 200)
    assert await statuses(http, host="box:1", origin="http://box:8080") == (403, 403)
    assert await statuses(http, host="box", origin="http://[") == (403, 403)


@flags("--uds", "/run/eagle.sock")
async def test_a_proxy_names_a_unix_socket_as_it_likes(http: httpx.AsyncClient) -> None:
    assert (await http.get("/health", headers={"host": "eagle"})).status_code == 200


@flags("--host", "0.0.0.0", "--allowed-hosts", "llm.example")
async def test_or_those_that_are_named(http: httpx.AsyncClient) -> None:
    assert (await http.get("/health", headers={"host": "llm.example"})).status_code == 200
    assert (await http.get("/health", headers={"host": "localhost"})).status_code == 403


def test_loopback_names() -> None:
    own = ("localhost", "a.localhost", "127.0.0.1", "127.9.9.9", "::1")
    assert all(map(is_loopback, own))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "localhost.example", "")))
