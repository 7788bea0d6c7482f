"""The endpoints that do not generate, and what all responses have in common."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from eagle_server.api import docs_page, inspection, playground
from eagle_server.api.app import GENERATING
from eagle_server.api.endpoints import render, tokens
from eagle_server.client.client import EngineClient
from eagle_server.config import parse_args
from tests.api.calls import complete
from tests.api.conftest import PATIENCE, http_client
from tests.api.fake_engine import EOS, ID, STALL, FakeEngine

GENERATING_PATHS = {endpoint.path for endpoint in GENERATING}


async def post(http: httpx.AsyncClient, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
    response = await http.post(path, json=body)
    assert response.status_code == status, response.text
    parsed: dict[str, Any] = response.json()
    return parsed


# --- Tokens ---


async def test_tokenize_and_detokenize(http: httpx.AsyncClient) -> None:
    answer = await post(http, "/tokenize", prompt=f"é{EOS}")
    assert answer == {"count": 3, "max_model_len": 2000, "tokens": [0xC3, 0xA9, ID[EOS]], "token_strs": None}
    assert await post(http, "/detokenize", tokens=answer["tokens"]) == {"prompt": f"é{EOS}"}
    answer = await post(http, "/tokenize", prompt="é a", return_token_strs=True, model="fake")
    assert answer["token_strs"] == ["Ã", "©", "Ġ", "a"]
    assert (await post(http, "/tokenize", prompt=""))["tokens"] == []


async def test_tokenize_shows_what_a_chat_would_send(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    messages = [{"role": "user", "content": "hé"}]
    expected = (await post(http, "/tokenize", messages=messages))["tokens"]
    await post(http, "/v1/chat/completions", messages=messages, max_tokens=1)
    assert engine.requests[-1].prompt_token_ids == expected
    begun = [*messages, {"role": "assistant", "content": "So"}]
    text = bytes((await post(http, "/tokenize", messages=begun, continue_final_message=True))["tokens"]).decode()
    assert text == "User: hé\nAssistant: So"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "prompt"),
        ("/tokenize", {"prompt": [1]}, "prompt"),
        ("/detokenize", {"tokens": [99999]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_wrong_bodies_are_named(http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str) -> None:
    assert (await post(http, path, 400, **body))["error"]["param"] == param


async def test_the_tokenizer_tells_about_itself(http: httpx.AsyncClient) -> None:
    info = (await http.get("/tokenizer_info")).json()
    assert (info["vocab_size"], info["eos_tokens"], info["eos_token_ids"]) == (256 + len(ID), [EOS], [ID[EOS]])
    assert (info["bos_token"], info["eos_token"]) == (None, EOS)  # no file names them, so this is the model's end token
    assert "Assistant:" in info["chat_template"]
    assert (await post(http, "/tokenize", 404, prompt="a", model="x"))["error"]["code"] == "model_not_found"


async def test_rendering_shows_what_a_request_would_send(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"prompt": ["ab", "c"], "n": 2, "max_tokens": 1}
    response = await http.post("/v1/completions/render", json=body, headers={"x-request-id": "me"})
    expected = [{"request_id": "cmpl-me", "model": "fake", "token_ids": tokens} for tokens in ([97, 98], [99])]
    assert response.json() == expected
    chat = {"messages": [{"role": "user", "content": "hé"}], "max_tokens": 1}
    shown = await post(http, "/v1/chat/completions/render", **chat)
    assert not engine.requests, "nothing is generated"
    await post(http, "/v1/chat/completions", **chat)
    assert engine.requests[-1].prompt_token_ids == shown["token_ids"]
    assert (await post(http, "/v1/completions/render", 400, prompt="a", top_p=2))["error"]["param"] == "top_p"
    assert (await post(http, "/v1/completions/render", 404, prompt="a", model="x"))["error"][
        "code"
    ] == "model_not_found"


# --- The server ---


async def test_health_generate_asks_the_engine_for_a_token(
    http: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await http.get("/health_generate")).json() == {"status": "ok"}
    assert engine.requests[-1].sampling.max_tokens == 1
    monkeypatch.setattr(inspection, "PROBE_SECONDS", 0.05)
    monkeypatch.setattr(engine, "_advance", lambda sequence: 1 / 0)
    monkeypatch.setattr(engine, "step", lambda _: [])
    response = await http.get("/health_generate")
    assert response.status_code == 503
    assert "no token" in response.json()["error"]["message"]


async def test_probes_share_one_request(http: httpx.AsyncClient, engine: FakeEngine, monkeypatch: Any) -> None:
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda _: [])
    probes = [asyncio.create_task(http.get("/health_generate")) for _ in range(20)]
    async with asyncio.timeout(PATIENCE):
        while not engine.requests:
            await asyncio.sleep(0.001)
    probes[0].cancel()
    monkeypatch.setattr(engine, "step", step)
    assert [(await probe).status_code for probe in probes[1:]] == [200] * 19, "the first one's leaving ends no other's"
    assert len(engine.requests) == 1
    await http.get("/health_generate")
    assert len(engine.requests) == 2


async def test_version(http: httpx.AsyncClient) -> None:
    assert set((await http.get("/version")).json()) == {"version"}


async def test_flushing_the_cache(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    await complete(http, prompt="abc", max_tokens=5)
    assert (await http.post("/flush_cache")).json() == {"freed_tokens": 5}
    assert (await http.post("/flush_cache")).json() == {"freed_tokens": 0}
    stalled = asyncio.create_task(http.post("/v1/completions", json={"prompt": STALL}))
    async with asyncio.timeout(PATIENCE):
        while not engine.sequences:
            await asyncio.sleep(0.001)
    refused = await http.post("/flush_cache")
    assert refused.status_code == 400
    assert "1 requests are running" in refused.json()["error"]["message"]
    stalled.cancel()


async def test_routers_read_the_model_and_the_load(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    for path in ("/model_info", "/server_info"):
        assert (await http.get(path)).json() == (await http.get(f"/get_{path[1:]}")).json()
    idle = {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}
    assert (await http.get("/get_load")).json() == [idle]
    stalled = asyncio.create_task(http.post("/v1/completions", json={"prompt": STALL}))
    async with asyncio.timeout(PATIENCE):
        while (await http.get("/get_load")).json()[0]["num_reqs"] != 1:
            await asyncio.sleep(0.001)
    stalled.cancel()


async def test_without_an_engine_there_is_nothing_to_flush_or_probe(config: Any, tokenizer_dir: Path) -> None:
    async with http_client(config, EngineClient(), tokenizer_dir) as http:
        answers = [
            await http.post("/flush_cache"),
            await http.get("/health_generate"),
            await http.get("/tokenizer_info"),
            await http.post("/v1/completions/render", json={"prompt": "a"}),
        ]
        load = await http.get("/get_load")
    assert [answer.status_code for answer in answers] == [503, 503, 503, 503]
    assert load.json()[0]["num_reqs"] == 0


async def test_the_document_names_every_path(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    routes = [route for module in (render, tokens, inspection) for route in module.router.routes]
    served = {getattr(route, "path", "").replace(":path}", "}") for route in routes} - {"/"} | GENERATING_PATHS
    assert served == set(document["paths"])
    assert set((await http.get("/")).json()["endpoints"]) < served | {"/metrics", "/openapi.json", "/docs"}


async def test_the_documentation_page_loads_nothing_from_other_servers(http: httpx.AsyncClient) -> None:
    page = await http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "openapi.json" in page.text
    files = {f"/{link}" for link in re.findall(r"(?:src|href)=\"([^\"]+)\"", page.text)}
    assert {file for file in files if "swagger" in file} == docs_page.PATHS - {"/docs", "/openapi.json"}
    for file in files:
        assert (await http.get(file)).status_code == 200


class StrippingProxy(httpx.AsyncBaseTransport):
    """A proxy that passes on what is below /llm, without this prefix."""

    def __init__(self, server: httpx.AsyncClient) -> None:
        self.server = server

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        prefix, path = request.url.path[:5], request.url.path[4:]
        if prefix != "/llm/":
            return httpx.Response(404)
        accept = request.headers.get("accept", "*/*")
        return await self.server.request(request.method, path, headers={"accept": accept})


@pytest.mark.parametrize("page", ["", "docs"])
async def test_pages_and_the_document_work_below_a_prefix(http: httpx.AsyncClient, page: str) -> None:
    async with httpx.AsyncClient(transport=StrippingProxy(http), base_url="http://proxy/llm/") as outside:
        shown = await outside.get(page, headers={"accept": "text/html"})
        assert shown.status_code == 200
        links = re.findall(r"(?:src|href)=\"([^\"]+)\"", shown.text) + re.findall(r"url: '([^']+)'", shown.text)
        scripts = [(await outside.get(shown.url.join(link))).text for link in links if link.endswith("main.js")]
        asked = [path for script in scripts for path in re.findall(r"get\(\"([^\"]+)\"", script)]
        assert links and (page == "docs" or asked)
        for link in [*links, *asked]:
            assert (await outside.get(shown.url.join(link))).status_code == 200, link
        document = await outside.get("openapi.json")
        [server] = document.json()["servers"]
        assert (await outside.get(document.url.join(server["url"]).join("health"))).status_code == 200


async def test_sagemaker_asks_ping(http: httpx.AsyncClient) -> None:
    asked, expected = await http.get("/ping"), await http.get("/health")
    assert (asked.status_code, asked.json()) == (expected.status_code, expected.json()) == (200, {"status": "ok"})


# --- What all responses have in common ---


@pytest.mark.parametrize("name", ["a-b.c:1/2", "x" * 128])
async def test_the_clients_request_id_comes_back(
    http: httpx.AsyncClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    with caplog.at_level(logging.INFO, "eagle_server.api.telemetry.access"):
        response = await http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": name})
    assert response.headers["x-request-id"] == name
    assert response.json()["id"] == f"cmpl-{name}"
    assert "POST /v1/completions 200" in caplog.text
    # A second request with the same id is accepted.
    await http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": name})
    assert len({request.request_id for request in engine.requests}) == 2


@pytest.mark.parametrize("name", ["", "x" * 129, "a b", 'a"b', "é"])
async def test_other_request_ids_are_replaced(http: httpx.AsyncClient, name: str) -> None:
    response = await http.get("/health", headers={"x-request-id": name.encode()})
    assert len(response.headers["x-request-id"]) == 32
    assert (await http.get("/nothing")).headers["x-request-id"]


async def test_an_unexpected_error_is_logged_with_its_request(
    http: httpx.AsyncClient, engine_client: EngineClient, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(engine_client, "submit", lambda *_, **__: 1 / 0)
    response = await http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "me"})
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "me"
    assert "request me failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    assert "Zero" not in response.text


async def test_cors_is_off_unless_asked_for(
    http: httpx.AsyncClient, engine_client: EngineClient, tokenizer_dir: Path
) -> None:
    asked = {"origin": "https://a.org", "access-control-request-method": "POST"}
    assert (await http.options("/v1/completions", headers=asked)).status_code == 405
    assert "access-control-allow-origin" not in (await http.get("/health", headers=asked)).headers
    flags = [
        "--model-path",
        str(tokenizer_dir),
        "--cors-allow-origins",
        "https://a.org, https://b.org",
        "--api-key",
        "k",
    ]
    async with http_client(parse_args(flags, environ={}), engine_client, tokenizer_dir) as open_to:
        before = await open_to.options("/v1/completions", headers=asked)
        assert before.status_code == 200
        assert before.headers["access-control-allow-origin"] == "https://a.org"
        after = await open_to.post("/v1/completions", headers=asked)
        assert after.headers["access-control-allow-origin"]
        readable = set(after.headers["access-control-expose-headers"].split(", "))
        assert readable == {"x-request-id", "request-id", "retry-after"} | {
            f"x-ratelimit-{name}-tokens" for name in ("limit", "remaining", "reset")
        }
        other = await open_to.get("/health", headers={"origin": "https://c.org"})
        assert "access-control-allow-origin" not in other.headers


# --- The playground ---


async def test_browsers_get_a_page_and_programs_json(http: httpx.AsyncClient) -> None:
    page = await http.get("/", headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert page.headers["content-type"].startswith("text/html")
    assert (await http.get("/")).json()["name"] == "eagle_server"
    for name, kind in playground.FILES.items():
        file = await http.get(f"/playground/{name}")
        assert file.status_code == 200, name
        assert file.headers["content-type"].startswith(kind)
        assert file.headers["content-security-policy"] == page.headers["content-security-policy"]
    assert (await http.get("/playground/nothing.js")).status_code == 404


async def test_the_page_needs_nothing_from_elsewhere_and_has_no_inline_code(http: httpx.AsyncClient) -> None:
    page = await http.get("/", headers={"accept": "text/html"})
    assert "'unsafe" not in page.headers["content-security-policy"]
    assert not re.search(r"<style|<script>|\son\w+=|\sstyle=|javascript:", page.text)
    linked = set(re.findall(r'(?:src|href)="([^"]+)"', page.text))
    assert {f"/{link}" for link in linked} <= playground.PATHS
    for name in playground.FILES:
        text = (await http.get(f"/playground/{name}")).text
        assert set(re.findall(r"https?://[^\"'\s]+", text)) <= {"http://www.w3.org/2000/svg"}
        imported = set(re.findall(r'from "\./([^"]+)"', text))
        assert imported <= playground.FILES.keys()
        elements = set(re.findall(r'\$\("([^"]+)"\)', text))
        assert elements <= set(re.findall(r' id="([^"]+)"', page.text)), name


async def test_the_page_is_there_without_the_key(
    engine_client: EngineClient, tokenizer_dir: Path, running: None
) -> None:
    flags = ["--model-path", str(tokenizer_dir), "--served-model-name", "fake", "--api-key", "secret"]
    async with http_client(parse_args(flags, environ={}), engine_client, tokenizer_dir) as http:
        assert (await http.get("/", headers={"accept": "text/html"})).status_code == 200
        assert (await http.get("/playground/main.js")).status_code == 200
        assert (await http.get("/v1/server_info")).status_code == 401


@pytest.mark.parametrize(
    "path",
    [path for path in inspection.PATHS if path not in GENERATING_PATHS]
    + ["/", "/version", "/tokenizer_info", "/v1/models/fake", "/health_generate", "/playground/main.js"]
    + sorted(docs_page.PATHS - {"/docs", "/openapi.json"}),
)
async def test_head_is_answered_wherever_get_is(http: httpx.AsyncClient, path: str) -> None:
    get, head = await http.get(path), await http.head(path)
    assert get.status_code == head.status_code == 200
    assert head.headers["content-type"] == get.headers["content-type"]


async def test_head_is_refused_where_get_is(http: httpx.AsyncClient) -> None:
    for path in GENERATING_PATHS:
        assert (await http.get(path)).status_code == (await http.head(path)).status_code == 405
    assert set((await http.post("/v1/models")).headers["allow"].split(", ")) == {"GET", "HEAD"}
