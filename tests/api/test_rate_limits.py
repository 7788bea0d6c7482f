"""Limits per API key: requests at once, and tokens per minute, by a clock that the tests set."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from eagle_server.api import app
from eagle_server.api.guard.rate_limits import WINDOW, ClientLimits, TokenWindow
from eagle_server.client.client import EngineClient
from eagle_server.config import Config, parse_args
from tests.api.conftest import PATIENCE, http_client
from tests.api.fake_engine import SLOW, STALL, FakeEngine

LIMIT = 100


@dataclass
class SetClock:
    now: float = 1000.5

    def __call__(self) -> float:
        return self.now


class WindowAgainstModel(RuleBasedStateMachine):
    """The model keeps every use. Requests start when the window lets them, and go on whatever it says."""

    @initialize(limit=st.integers(1, 50))
    def start(self, limit: int) -> None:
        self.clock = SetClock()
        self.window = TokenWindow(limit, self.clock)
        self.uses: list[tuple[float, int, bool]] = []  # time, tokens, whether admission allowed them

    @rule(seconds=st.floats(0, 70))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(share=st.floats(0, 1))
    def a_request_starts_if_it_fits(self, share: float) -> None:
        prompt = max(1, round(share * self.window.limit))
        if self.window.wait(prompt) == 0:
            self.use(prompt, admitted=True)

    @rule(tokens=st.integers(1, 30))
    def a_running_request_generates(self, tokens: int) -> None:
        self.use(tokens, admitted=False)

    def use(self, tokens: int, *, admitted: bool) -> None:
        self.window.add(tokens)
        self.uses.append((self.clock.now, tokens, admitted))

    @rule(share=st.floats(0, 1))
    def it_fits_after_the_wait_and_not_much_earlier(self, share: float) -> None:
        needed = max(1, round(share * self.window.limit))
        wait = self.window.wait(needed)
        assert 0 <= wait <= WINDOW + 1
        if wait > 0.01:
            self.clock.now += wait - 0.01
            assert self.window.wait(needed) > 0
            self.clock.now += 0.01001
        assert self.window.wait(needed) == 0

    @invariant()
    def no_minute_has_more_than_the_limit_and_what_ran(self) -> None:
        if not hasattr(self, "clock"):
            return
        now = self.clock.now
        recent = [each for each in self.uses if now - each[0] < WINDOW]
        assert sum(tokens for _, tokens, admitted in recent if admitted) <= self.window.limit
        older = [each for each in self.uses if now - each[0] < WINDOW + 1]
        assert sum(tokens for _, tokens, _ in recent) <= self.window.used <= sum(tokens for _, tokens, _ in older)

    def teardown(self) -> None:
        self.clock.now += WINDOW + 1
        assert self.window.used == 0


TestWindowAgainstModel = WindowAgainstModel.TestCase
TestWindowAgainstModel.settings = settings(max_examples=200, stateful_step_count=40)


# --- Served ---


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
async def limited(
    tokenizer_dir: Path,
    tmp_path: Path,
    engine_client: EngineClient,
    running: None,
    clock: SetClock,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[httpx.AsyncClient]:
    def limits(config: Config) -> ClientLimits:
        server = config.server
        return ClientLimits(server.max_concurrent_requests_per_key, server.tokens_per_minute_per_key, clock)

    monkeypatch.setattr(app, "_limits", limits)
    (tmp_path / "keys").write_text("a\nb\n")
    flags = [
        "--model-path",
        str(tokenizer_dir),
        "--served-model-name",
        "fake",
        "--api-key-file",
        str(tmp_path / "keys"),
    ]
    flags += ["--max-concurrent-requests-per-key", "2", "--tokens-per-minute-per-key", str(LIMIT)]
    async with http_client(parse_args(flags, environ={}), engine_client, tokenizer_dir) as client:
        yield client


async def post(http: httpx.AsyncClient, key: str = "a", **body: Any) -> httpx.Response:
    body = {"prompt": "x" * 10, "max_tokens": 15, **body}
    return await http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})


def refused(response: httpx.Response, status: int = 429) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["code"] == "rate_limit_exceeded"
    if status == 429:
        assert error["type"] == "rate_limit_error"
        assert int(response.headers["retry-after"]) >= 1
    return str(error["message"])


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_key_that_has_used_its_tokens_waits_as_long_as_it_is_told(
    limited: httpx.AsyncClient, clock: SetClock
) -> None:
    for number in range(1, 5):  # of 25 tokens each
        answer = await post(limited, stream=number % 2 == 0)
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-tokens"] == str(LIMIT)
        clock.now += 10
    answer = await post(limited)
    assert "100 of 100 tokens a minute are used, this request needs 1; try again in 21 s" in refused(answer)
    assert (answer.headers["retry-after"], answer.headers["x-ratelimit-remaining-tokens"]) == ("21", "0")
    assert answer.headers["x-ratelimit-reset-tokens"] == "51s"
    assert (await post(limited, key="b")).status_code == 200, "the other key has its own"
    clock.now += 20
    refused(await post(limited))
    clock.now += 1
    assert (await post(limited)).status_code == 200, "25 tokens are more than a minute old"
    refused(await post(limited))
    assert (await limited.get("/v1/models", headers={"authorization": "Bearer a"})).status_code == 200


async def test_a_prompt_needs_as_many_tokens_as_it_has(limited: httpx.AsyncClient, clock: SetClock) -> None:
    assert (await post(limited, prompt="x" * 80, max_tokens=1)).status_code == 200
    assert "81 of 100 tokens a minute are used, this request needs 30" in refused(await post(limited, prompt="x" * 30))
    stream = await post(limited, prompt="x" * 30, stream=True)
    assert "needs 30" in refused(stream)
    assert (await post(limited, prompt="x" * 9, n=2, max_tokens=3)).headers["x-ratelimit-remaining-tokens"] == "4"
    assert "101 prompt tokens; this server allows 100 a minute" in refused(await post(limited, prompt="x" * 101), 400)
    clock.now += 100
    assert (await post(limited, prompt="x" * 100, max_tokens=1)).status_code == 200


async def test_a_running_request_is_not_cut(limited: httpx.AsyncClient) -> None:
    answer = await post(limited, max_tokens=300)
    assert answer.json()["usage"]["completion_tokens"] == 300
    assert "310 of 100 tokens a minute" in refused(await post(limited))


async def test_tokens_that_nobody_reads_count_too(limited: httpx.AsyncClient, engine: FakeEngine) -> None:
    task = asyncio.create_task(post(limited, prompt=f"{SLOW}a", max_tokens=1000))
    await until(lambda: any(each.emitted >= 3 for each in engine.sequences.values()))
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    answer = await post(limited, prompt="x", max_tokens=1)
    assert int(answer.headers["x-ratelimit-remaining-tokens"]) <= LIMIT - 2 - 3 - 2


async def test_a_key_has_so_many_requests_at_once(limited: httpx.AsyncClient, engine: FakeEngine) -> None:
    tasks = [asyncio.create_task(post(limited, prompt=STALL)) for _ in range(2)]
    await until(lambda: len(engine.sequences) == 2)
    answer = await post(limited)
    assert "2 requests are in progress, at most 2 may be, per API key" in refused(answer)
    assert answer.headers["retry-after"] == "1"
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    refused(await limited.post("/v1/chat/completions", json=chat, headers={"authorization": "Bearer a"}))
    assert (await post(limited, key="b")).status_code == 200
    tasks.pop().cancel()
    await until(lambda: len(engine.sequences) == 1)
    assert (await post(limited)).status_code == 200
    tasks.pop().cancel()


async def test_an_unknown_key_uses_nobodys_tokens(limited: httpx.AsyncClient) -> None:
    answer = await post(limited, key="c")
    assert answer.status_code == 401
    assert "x-ratelimit-limit-tokens" not in answer.headers
    assert (await post(limited)).headers["x-ratelimit-remaining-tokens"] == str(LIMIT - 25)


async def test_the_openai_client_sees_a_rate_limit(limited: httpx.AsyncClient) -> None:
    async with openai.AsyncOpenAI(
        base_url="http://localhost/v1", api_key="a", http_client=limited, max_retries=0
    ) as client:
        await client.completions.create(model="fake", prompt="x" * 90, max_tokens=15)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(model="fake", prompt="x", max_tokens=1)
        assert caught.value.code == "rate_limit_exceeded"


async def test_without_limits_there_are_no_such_headers(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3})
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


async def test_without_keys_all_clients_share_the_limit(
    tokenizer_dir: Path, engine_client: EngineClient, running: None
) -> None:
    flags = ["--model-path", str(tokenizer_dir), "--served-model-name", "fake", "--tokens-per-minute-per-key", "20"]
    async with http_client(parse_args(flags, environ={}), engine_client, tokenizer_dir) as client:
        assert (await post(client, key="")).status_code == 200
        refused(await post(client, key="anything"))
