"""Whatever a request asks for: no internal error, no lost KV, and the text of a request beside it stays the same."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from eagle_server.client.client import EngineClient
from eagle_server.config import DEMO_TARGET, parse_args
from eagle_server.engine.engine import Engine
from tests.api.conftest import LocalEngine, http_client
from tests.e2e.conftest import PROMPTS, demo_engine
from tests.support.bodies import BODIES, LIMITS, bodies, encoded, parameters

NEIGHBOUR = {"prompt": PROMPTS[0][:80], "max_tokens": 16, "temperature": 0.8, "seed": 11, "ignore_eos": True}
STALL = 120.0  # seconds
POOL = ("--max-total-tokens", "2048")  # so small that requests are preempted and prefixes evicted
AGENT_APIS = ("/v1/responses", "/v1/messages")
ENDS = {"completed", "incomplete", "end_turn", "max_tokens", "tool_use", "stop_sequence"}
Asked = list[tuple[str, dict[str, Any]]]  # path and body
ASKED = st.lists(
    st.sampled_from(sorted(BODIES)).flatmap(lambda path: st.tuples(st.just(path), bodies(path))), min_size=1, max_size=3
)


class CheckedEngine:
    """The demo's engine; its KV pages are checked after every cycle."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, meanwhile: Callable[[], None]) -> Any:
        deltas = self._engine.step(meanwhile)
        self._engine.check()
        return deltas


@dataclass
class App:
    """The app over the demo's engine, in an event loop that runs while an example runs."""

    engine: Engine
    runner: asyncio.Runner = field(default_factory=asyncio.Runner)
    statuses: list[int] = field(default_factory=list, repr=False)

    async def start(self) -> None:
        client = EngineClient(max_waiting=1024)
        self.driver = asyncio.create_task(LocalEngine(CheckedEngine(self.engine), client).run())
        await client.until_available()
        self.http = http_client(parse_args([*POOL], environ={}), client, DEMO_TARGET)
        self.text = (await self.ask("/v1/completions", NEIGHBOUR)).json()["choices"][0]["text"]

    async def ask(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return await self.http.post(path, content=encoded(body), headers={"content-type": "application/json"})

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run to the end. An example that takes minutes is a stall."""
        self.runner.run(asyncio.wait_for(work, STALL))

    async def serve(self, asked: Asked) -> None:
        """All requests at once and the neighbour's beside them. Then the engine must be empty."""
        await self.until_idle()  # a failed example may have left its requests
        neighbour, *answers = await asyncio.gather(
            self.ask("/v1/completions", NEIGHBOUR), *(self.ask(path, body) for path, body in asked)
        )
        assert neighbour.json()["choices"][0]["text"] == self.text
        for (path, body), answer in zip(asked, answers, strict=True):
            self.statuses.append(answer.status_code)
            check_answer(path, body, answer)
            if answer.status_code == 200 and repeats(body):
                alone = await self.ask(
                    path, {**body, "timeout": None, "speculative": not body.get("speculative", True)}
                )
                assert texts(alone) == texts(answer), "another text without its neighbours and with other speculation"
        await self.until_idle()  # the ends of requests whose time was over
        self.engine.flush_cache()
        stats = self.engine.stats()
        assert stats.kv_slots_free == stats.kv_slots_total

    async def until_idle(self) -> None:
        while self.engine.has_work():
            assert not self.driver.done(), self.driver.exception()
            await asyncio.sleep(0.001)

    async def stop(self) -> None:
        self.driver.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.driver
        await self.http.aclose()


def repeats(body: dict[str, Any]) -> bool:
    """Whether the same body gives the same text again, in one piece."""
    return body.get("seed") is not None and most_tokens(body) is not None and not body.get("stream")


def most_tokens(body: dict[str, Any]) -> int | None:
    return next((body[name] for name in LIMITS if body.get(name) is not None), None)


def texts(answer: httpx.Response) -> list[Any]:
    """Without the ids of items."""
    document = answer.json()
    if "choices" in document:
        return [choice.get("text", choice.get("message")) for choice in document["choices"]]
    items = document.get("output", document.get("content"))
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def check_answer(path: str, body: dict[str, Any], answer: httpx.Response) -> None:
    """An answer is served or refused by one of the API's errors, and says no more than what happened."""
    assert answer.status_code in {200, 400, 404, 408}, answer.text
    if answer.status_code != 200:
        assert set(answer.json()["error"]) in ({"message", "type", "param", "code"}, {"message", "type"})
    elif answer.headers["content-type"].startswith("text/event-stream"):
        check_events(path, [frame.partition("data: ")[2] for frame in answer.text.split("\n\n") if frame])
    elif path in AGENT_APIS:
        document = answer.json()
        assert document.get("status", document.get("stop_reason")) in ENDS
        if (limit := most_tokens(body)) is not None:
            assert document["usage"]["output_tokens"] <= limit
    else:
        document = answer.json()
        prompts = body.get("prompt")
        count = len(prompts) if isinstance(prompts, list) and not isinstance(prompts[0], int) else 1
        assert len(document["choices"]) == count * (body.get("n") or 1)
        assert {choice["finish_reason"] for choice in document["choices"]} <= {"stop", "length", "tool_calls"}
        if (limit := most_tokens(body)) is not None:
            assert document["usage"]["completion_tokens"] <= limit * len(document["choices"])


def check_events(path: str, events: list[str]) -> None:
    """The stream has its end. An error is the request's own: those of the server have other types."""
    if path not in AGENT_APIS:
        assert events.pop() == "[DONE]"
        assert all(json.loads(event).get("error", {}).get("type") != "server_error" for event in events), events[-1]
        return
    last = json.loads(events[-1])
    assert last["type"] in {"response.completed", "response.incomplete", "response.failed", "message_stop", "error"}
    error = last.get("error") or (last.get("response") or {}).get("error") or {}
    assert error.get("type", error.get("code")) not in ("api_error", "server_error"), error


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    app = App(demo_engine(*POOL))
    app.run(app.start())
    yield app
    app.run(app.stop())
    app.runner.close()


COMMON = settings(
    database=None, phases=[Phase.explicit, Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck)
)


def no_token(**body: Any) -> Asked:
    """A request that leaves no token to draw. This was status 500."""
    return [("/v1/completions", {"prompt": "x", "max_tokens": 8, **body})]


@given(asked=ASKED)
@example(no_token(structured_outputs={"grammar": "root ::= root"}))
@example(no_token(structured_outputs={"grammar": 'root ::= root "a"'}))
@example(no_token(structured_outputs={"json": {"$ref": "#"}}))
@example(no_token(structured_outputs={"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}))
@example(no_token(structured_outputs={"choice": ["a"]}, min_tokens=6))
@example(no_token(structured_outputs={"choice": ["a"]}, bad_words=["a"]))
@example(no_token(structured_outputs={"regex": "[a-z]+"}, allowed_token_ids=[5]))
@example(no_token(structured_outputs={"regex": "[a-z]+"}, allowed_token_ids=[5], stream=True))
@example(no_token(allowed_token_ids=[65], bad_words=["a"]))
@example(no_token(allowed_token_ids=[0], min_tokens=4))  # the model's end of sequence
@example(no_token(allowed_token_ids=[5], stop_token_ids=[5], min_tokens=2))
@example(no_token(repetition_penalty=5e-324))  # infinite logits
@settings(COMMON, max_examples=5)
def test_no_request_breaks_the_server_or_its_neighbour(app: App, asked: Asked) -> None:
    app.run(app.serve(asked))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_request_of_many_breaks_the_server_or_its_neighbour(app: App) -> None:
    app.statuses.clear()

    @given(asked=ASKED)
    @settings(COMMON, max_examples=100)
    def serve(asked: Asked) -> None:
        app.run(app.serve(asked))

    serve()
    assert app.statuses.count(200) > len(app.statuses) / 4, "many bodies should be served"


@pytest.mark.parametrize("path", BODIES)
def test_every_parameter_of_the_schema_is_drawn(path: str) -> None:
    drawn: set[str] = set()

    @given(body=bodies(path))
    @settings(COMMON, max_examples=200, phases=[Phase.generate])
    def draw(body: dict[str, Any]) -> None:
        drawn.update(body)

    draw()
    assert parameters(BODIES[path]).keys() <= drawn
    assert BODIES[path].model_fields.keys() <= drawn
