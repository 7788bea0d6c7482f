"""Two demo servers behind routers that others wrote: sglang-router and vllm-router, unmodified from PyPI."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import httpx
import openai
import pytest

from eagle_tools.bench.routers import FAILOVER, MODULES, is_installed
from tests.e2e.conftest import FIXED_TREES, PROMPTS, README_FLAGS, REPOSITORY
from tests.e2e.fleet import PATIENCE, Fleet, Worker, fleet_of
from tests.e2e.test_tool_calls import PAINT, TEMPLATE, TOOLS, asking, calls_of

pytestmark = [pytest.mark.third_party, pytest.mark.slow]
FLAGS = (*README_FLAGS, *FIXED_TREES)
ROUTERS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(not is_installed(name), reason=f"needs {name}: pip install -e '.[routers]'"),
    )
    for name in MODULES
]
RETRIED = (408, 409, 429, 500, 502, 503, 504)  # what OpenAI's client asks again after
LONG = {"prompt": "def fibonacci(n):\n", "max_tokens": 900, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module", params=ROUTERS)
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp(request.param)
    (directory / "template.jinja").write_text(TEMPLATE)
    template = ("--chat-template", str(directory / "template.jinja"))
    with fleet_of(request.param, directory, *FLAGS, *template, workers=3, routed=2) as up:
        yield up


@pytest.fixture
def fleet(running: Fleet) -> Fleet:
    """A router and two workers that serve, whatever earlier tests did to them. It does not know the third."""
    running.heal()
    return running


@pytest.fixture
def client(fleet: Fleet) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as made:
        yield made


def test_a_client_sees_one_server(fleet: Fleet, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0.8, "seed": 7}
    expected = fleet.workers[0].complete(**asked)["choices"][0]["text"]
    assert client.completions.create(model="demo", **asked).choices[0].text == expected
    chunks = list(client.completions.create(model="demo", **asked, stream=True))
    assert len(chunks) > 2
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    tools = TOOLS[:1]  # the routers refuse a function without `parameters`, which OpenAI allows
    body = asking(tools=tools, tool_choice="none", max_tokens=24, temperature=0)
    whole = client.chat.completions.create(**body).choices[0].message.content
    parts = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**body, stream=True)]
    assert "".join(parts) == whole != ""
    body = asking(tools=tools, tool_choice=PAINT, parallel_tool_calls=False, temperature=0)
    calls = calls_of(client.chat.completions.create(**body))
    assert set(json.loads(calls[0][1])) == {"name", "rgb", "comment"}
    with client.chat.completions.stream(**body) as events:
        assert calls_of(events.get_final_completion()) == calls


def test_what_a_router_asks_is_answered(fleet: Fleet, client: openai.OpenAI) -> None:
    client.completions.create(model="demo", prompt="def f(x):", max_tokens=2)
    client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "x"}], max_tokens=2)
    assert "demo" in [model.id for model in client.models.list().data]
    paths = ["/health", "/health_generate", "/get_model_info", "/get_server_info", "/get_loads", "/workers"]
    answers = {path: httpx.get(f"{fleet.url}{path}", timeout=PATIENCE) for path in paths}
    assert {path: answer.status_code for path, answer in answers.items()} == dict.fromkeys(paths, 200)
    assert httpx.post(f"{fleet.url}/flush_cache", timeout=PATIENCE).status_code == 200
    if fleet.router == "sglang-router":
        metrics = httpx.get(f"{fleet.url}/engine_metrics", timeout=PATIENCE).text
        assert all(f'worker_addr="{worker.url}"' in metrics for worker in fleet.workers[:2])
        assert {worker["load"] for worker in answers["/get_loads"].json()["workers"]} == {0}
        found = answers["/workers"].json()["workers"][0]
        assert (found["model_id"], found["connection_mode"]) == ("demo", "HTTP")
    refused = {each for worker in fleet.workers[:2] for each in worker.requests() if each[2] != 200}
    assert not refused, "a worker did not know what it was asked"
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model="demo", prompt="a" * 100_000)


def test_a_conversation_stays_where_its_prefix_is_cached(fleet: Fleet, client: openai.OpenAI) -> None:
    """New prefixes go to the worker with the fewest requests in progress, so the first turns come together."""
    before = [worker.completions() for worker in fleet.workers]

    def first_turn(prompt: str) -> Any:
        return client.completions.create(
            model="demo", prompt=prompt, max_tokens=96, temperature=0, extra_body={"ignore_eos": True}
        )

    prompts = [f"{number}{PROMPTS[number]}" for number in range(8)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        first = list(pool.map(first_turn, prompts))
    served = [worker.completions() - count for worker, count in zip(fleet.workers, before, strict=True)]
    assert min(served[:2]) >= 2
    assert served[2] == 0, "the router does not know it"
    for prompt, answer in zip(prompts, first, strict=True):
        text = f"{prompt}{answer.choices[0].text}\n"
        second = client.completions.create(model="demo", prompt=text, max_tokens=4, temperature=0).usage
        assert second.prompt_tokens_details.cached_tokens >= answer.usage.prompt_tokens


def test_sigterm_ends_a_worker_after_its_streams_and_nobody_notices(fleet: Fleet, client: openai.OpenAI) -> None:
    worker, other = fleet.workers[:2]
    count, begun = 12, threading.Barrier(13)

    def stream(number: int) -> list[str]:
        body = {**LONG, "model": "demo", "prompt": f"# {number}\n{LONG['prompt']}", "temperature": 0}
        with httpx.stream("POST", f"{fleet.url}/v1/completions", json=body, timeout=PATIENCE) as response:
            lines = response.iter_lines()
            first = next(lines)
            begun.wait(PATIENCE)
            return [first, *lines]

    with ThreadPoolExecutor(count) as pool:
        streams = [pool.submit(stream, number) for number in range(count)]
        begun.wait(PATIENCE)
        assert running_on(worker) > 0
        worker.process.send_signal(signal.SIGTERM)
        fleet.until(lambda: httpx.get(f"{worker.url}/health", timeout=PATIENCE).status_code == 503)
        for number in range(4):
            client.completions.create(model="demo", prompt=f"{number}: {PROMPTS[number]}", max_tokens=2)
        assert worker.process.poll() is None, "it still streams"
        assert running_on(worker) > 0
        for each in streams:
            assert each.result()[-2:] == ["data: [DONE]", ""]
    assert worker.process.wait(PATIENCE) == 0
    assert other.is_running
    for number in range(8):
        client.completions.create(model="demo", prompt=f"{number}: {PROMPTS[number]}", max_tokens=2)


def running_on(worker: Worker) -> int:
    return int(httpx.get(f"{worker.url}/v1/server_info", timeout=PATIENCE).json()["engine"]["running"])


def test_a_killed_worker_costs_its_streams_and_nothing_else(fleet: Fleet) -> None:
    """Whole answers are asked for again by the router or by the client; a stream that has begun breaks off."""
    begun, answered = threading.Barrier(7), list[str]()

    def ask_whole(number: int) -> None:
        with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", timeout=PATIENCE) as client:
            for turn in range(8):
                prompt = f"{number} {PROMPTS[turn]}"
                answered.append(client.completions.create(model="demo", prompt=prompt, max_tokens=16).id)

    def ask_stream(number: int) -> str:
        body = {**LONG, "model": "demo", "prompt": f"# {number}\n"}
        with httpx.stream("POST", f"{fleet.url}/v1/completions", json=body, timeout=PATIENCE) as response:
            lines = response.iter_lines()
            next(lines)
            begun.wait(PATIENCE)
            try:
                assert list(lines)[-2:] == ["data: [DONE]", ""], "a cut stream looks complete"
            except httpx.RemoteProtocolError:
                return "cut"
        return "whole"

    with ThreadPoolExecutor(12) as pool:
        streams = [pool.submit(ask_stream, number) for number in range(6)]
        begun.wait(PATIENCE)
        worker = max(fleet.workers[:2], key=running_on)
        whole = [pool.submit(ask_whole, number) for number in range(6)]
        fleet.until(lambda: len(answered) > 0)
        worker.kill()
        for each in whole:
            each.result()
        assert "cut" in {each.result() for each in streams}
    assert len(set(answered)) == 48
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", timeout=PATIENCE, max_retries=0) as client:
        for prompt in PROMPTS[:8]:
            client.completions.create(model="demo", prompt=prompt, max_tokens=4)
    fleet.heal()
    before = worker.completions()
    spread(fleet)
    assert worker.completions() > before, "it gets requests again"


def test_a_worker_that_is_added_gets_requests(fleet: Fleet) -> None:
    added = fleet.workers[2]
    assert added.completions() == 0
    fleet.add(added)
    spread(fleet)
    assert added.completions() > 0


@pytest.mark.long
def test_500_requests_survive_the_death_of_every_worker_in_turn(fleet: Fleet) -> None:
    """Each ends with the text of a single server or with an error after which clients ask again."""
    if fleet.healthy() < len(fleet.workers):
        fleet.add(fleet.workers[2])
    alone = fleet.workers[0].complete
    texts = [alone(prompt=each, max_tokens=16, temperature=0)["choices"][0]["text"] for each in PROMPTS]
    waiting, outcomes = SimpleQueue[int | None](), list[str]()

    def client() -> None:
        while (number := waiting.get()) is not None:
            which = number % len(PROMPTS)
            outcomes.append(outcome(fleet, PROMPTS[which], texts[which], is_stream=number % 2 == 1))

    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(client) for _ in range(8)]
        try:
            for turn, worker in enumerate(fleet.workers):
                done = len(outcomes)
                for number in range(500 * turn // 3, 500 * (turn + 1) // 3):
                    waiting.put(number)
                fleet.until(lambda done=done: len(outcomes) >= done + 40)  # type: ignore[misc]
                fleet.until(lambda worker=worker: running_on(worker) > 0)  # type: ignore[misc]
                worker.kill()
                fleet.heal()
        finally:
            for _ in clients:
                waiting.put(None)
        for each in clients:
            each.result()
    counted = Counter(outcomes)
    assert counted.total() == 500
    assert counted.keys() <= {"answered", "cut", *(f"status {status}" for status in RETRIED)}, counted
    assert counted["answered"] >= 470, counted
    before = [worker.completions() for worker in fleet.workers]
    spread(fleet)
    assert all(worker.completions() > count for worker, count in zip(fleet.workers, before, strict=True))


def outcome(fleet: Fleet, prompt: str, expected: str, *, is_stream: bool) -> str:
    """How a completion through the router ended."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 16, "temperature": 0, "stream": is_stream}
    try:
        response = httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=PATIENCE)
    except (httpx.RemoteProtocolError, httpx.ReadError):
        return "cut" if is_stream else "a whole answer was cut"
    if response.status_code != 200:
        return f"status {response.status_code}"
    if not is_stream:
        return "answered" if response.json()["choices"][0]["text"] == expected else "another text"
    *events, end, _ = response.text.split("\n\n")
    pieces = [json.loads(event.removeprefix("data: ")) for event in events]
    if end != "data: [DONE]" or any("error" in piece for piece in pieces):
        return "a stream without its end"
    return "answered" if "".join(piece["choices"][0]["text"] for piece in pieces) == expected else "another text"


def spread(fleet: Fleet) -> None:
    """Completions with different prefixes, several at a time."""

    def ask(number: int) -> int:
        body = {"model": "demo", "prompt": f"{number} {time.monotonic()} {PROMPTS[number]}", "max_tokens": 8}
        return httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=PATIENCE).status_code

    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(ask, range(24))) == {200}


def test_the_documented_flags_are_those_that_are_tested() -> None:
    text = " ".join((REPOSITORY / "docs" / "deployment.md").read_text().replace("\\\n", " ").split())
    assert FAILOVER in text
