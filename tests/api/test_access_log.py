"""The log: its formats, the line per request, and the line about the engine."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Iterator

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from eagle_server.api.telemetry.access import AccessLog
from eagle_server.api.telemetry.request_record import log_context
from eagle_server.api.telemetry.summary import Summary
from eagle_server.engine.logs import HumanLines, JsonLines, _Pipe
from eagle_server.request import CycleStats, EngineStats
from tests.api.fake_engine import SLOW, STALL

ACCESS = "eagle_server.api.telemetry.access"


class Lines(logging.Handler):
    """Formats each record in the task that logs it, as the real handler does."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def json_lines() -> Iterator[list[str]]:
    handler, logger = Lines(JsonLines(log_context)), logging.getLogger("eagle_server")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    yield handler.lines
    logger.removeHandler(handler)
    logger.setLevel(level)


async def test_one_line_per_request_with_its_id_and_numbers(http: httpx.AsyncClient, json_lines: list[str]) -> None:
    body = {"prompt": ["abc", "defg"], "n": 2, "max_tokens": 9}
    response = await http.post("/v1/completions", json=body, headers={"x-request-id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    [line] = [json.loads(line) for line in json_lines]
    assert (line["logger"], line["level"], line["request_id"]) == (ACCESS, "info", "mine-1")
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
    usage = response.json()["usage"]
    assert (line["prompt_tokens"], line["output_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert line["accept_length"] > 1
    assert line["ms"] > 0


async def test_the_line_has_the_acceptance_of_the_answer(http: httpx.AsyncClient, json_lines: list[str]) -> None:
    answer = (
        await http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 40, "stop": "abca", "seed": 1})
    ).json()
    line = json.loads(json_lines[0])
    assert line["output_tokens"] == answer["usage"]["completion_tokens"]
    spec = answer["metrics"]["speculative_decoding"]
    assert line["accept_length"] == pytest.approx(spec["mean_acceptance_length"], abs=1e-3)


async def test_refused_and_cancelled_requests_have_their_line(http: httpx.AsyncClient, json_lines: list[str]) -> None:
    await http.post("/v1/completions", json={"prompt": 3})
    await http.get("/nowhere")
    call = asyncio.create_task(http.post("/v1/completions", json={"prompt": STALL, "max_tokens": 3}))
    await asyncio.sleep(0.1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    lines = [json.loads(line) for line in json_lines]
    assert [line["status"] for line in lines] == [400, 404, 499]
    assert lines[2]["output_tokens"] == 0
    assert len({line["request_id"] for line in lines}) == 3


async def test_a_stream_that_ends_with_an_error_has_its_status(http: httpx.AsyncClient, json_lines: list[str]) -> None:
    body = {"prompt": f"{SLOW}abc", "timeout": 0.3, "stream": True, "max_tokens": 1000}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200 and '"code":"timeout"' in answer.text
    assert [json.loads(line)["status"] for line in json_lines] == [408]
    assert (
        'http_responses_total{method="POST",path="/v1/completions",status="408"} 1.0'
        in (await http.get("/metrics")).text
    )


@pytest.mark.parametrize(("more", "status"), [(False, 200), (True, 499)], ids=["whole", "its client has left"])
async def test_a_stream_that_did_not_end_is_no_success(more: bool, status: int) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": more})

    async def send(_: Message) -> None:
        pass

    answered = list[int]()
    scope: Scope = {"type": "http", "state": {"request_id": "a"}, "method": "GET", "path": "/", "headers": []}
    await AccessLog(app, [], lambda record: answered.append(record.status))(scope, None, send)  # type: ignore[arg-type]
    assert answered == [status]


async def test_a_path_cannot_write_lines_of_its_own(http: httpx.AsyncClient, json_lines: list[str]) -> None:
    await http.get("/x%0aERROR%1b[31m")
    [line] = [json.loads(line) for line in json_lines]
    assert line["path"] == "/x%0AERROR%1B%5B31m"
    assert line["message"].startswith("GET /x%0AERROR%1B%5B31m 404")


async def test_a_long_path_or_method_does_not_fill_the_log(http: httpx.AsyncClient, json_lines: list[str]) -> None:
    await http.request("X" * 10_000, f"/start{'%01' * 10_000}end")
    [line] = [json.loads(line) for line in json_lines]
    assert line["path"].startswith("/start%01%01")
    assert line["path"].endswith("%01%01end")
    assert max(len(line["path"]), len(line["method"])) <= 3 * 200


async def test_what_is_polled_is_not_logged(http: httpx.AsyncClient, json_lines: list[str]) -> None:
    await http.get("/health")
    await http.get("/metrics")
    assert json_lines == []


def record(**extra: object) -> logging.LogRecord:
    return logging.getLogger("a").makeRecord("a.b", logging.WARNING, "f", 1, "x %d", (1,), None, extra=extra)


def test_a_json_line_is_one_object_with_everything_known() -> None:
    line = json.loads(JsonLines(lambda: {"request_id": "r"}).format(record(fields={"ms": 2.5})))
    assert line.pop("time").endswith("+00:00")
    assert line.pop("process")
    assert line == {"level": "warning", "logger": "a.b", "message": "x 1", "request_id": "r", "ms": 2.5}


def test_a_json_line_holds_a_traceback() -> None:
    failed = record()
    try:
        raise RuntimeError("one\ntwo")
    except RuntimeError as error:
        failed.exc_info = (type(error), error, error.__traceback__)
    text = JsonLines(dict).format(failed)
    assert "\n" not in text
    assert "RuntimeError: one\ntwo" in json.loads(text)["exception"]


def test_a_human_line_ends_with_the_id() -> None:
    context = {"request_id": "r"}
    assert HumanLines(lambda: context).format(record()).endswith(" WARNING: x 1 [request_id=r]")
    assert HumanLines(lambda: context, whole=True).format(record()).endswith(" a.b: x 1 [request_id=r]")
    assert HumanLines(dict).format(record()).endswith(" WARNING: x 1")


def stats(running: int) -> EngineStats:
    return EngineStats(
        running=running,
        waiting=1,
        waiting_clients=1,
        longest_wait=0.5,
        kv_slots_total=100,
        kv_slots_free=75,
        kv_slots_cached=0,
        cycles=0,
        generated_tokens=0,
        drafted_tokens=0,
        accepted_tokens=0,
        preemptions=0,
        measured_cycles=0,
        stage_seconds={},
    )


def test_the_engines_line_tells_of_its_window_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    summary = Summary(interval=10)
    first = CycleStats(seconds=1, prompt_tokens=30, cache_queries=30, cache_hits=15, verified=[(12, 3), (0, 0)])
    summary.cycle(first, 5, stats(running=2), now=101)
    summary.cycle(CycleStats(seconds=1, verified=[(12, 0)]), 15, stats(running=2), now=109)
    assert not caplog.messages
    summary.cycle(CycleStats(seconds=1), 0, stats(running=2), now=110)
    summary.cycle(CycleStats(seconds=1), 40, stats(running=2), now=120)
    assert caplog.messages == [
        "running 2, waiting 1, KV cache 25.0 %, prompts 3.0 tokens/s, output 2.0 tokens/s, accept length 2.50, "
        "prefix cache hits 50.0 %",
        "running 2, waiting 1, KV cache 25.0 %, prompts 0.0 tokens/s, output 4.0 tokens/s",
    ]


def test_idle_time_is_in_no_window(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    idle = stats(running=0)
    idle.waiting = 0
    summary = Summary(interval=10)
    summary.cycle(CycleStats(seconds=1), 5, idle, now=101)
    summary.cycle(CycleStats(seconds=1), 5, stats(running=1), now=1000)
    assert not caplog.messages
    Summary(interval=0).cycle(CycleStats(seconds=1), 5, stats(running=1), now=1e9)
    assert not caplog.messages


def test_a_log_that_nobody_reads_delays_nobody() -> None:
    read, write = os.pipe()
    log = _Pipe(f"/proc/self/fd/{write}")
    lines = 0
    while not log._dropped:
        log.write(f"line {lines}\n")
        lines += 1
    log.write("another one\n")
    assert os.get_blocking(write), "other processes still write as before"
    text = os.read(read, 2**20).decode()
    log.write("now somebody reads\n")
    text += os.read(read, 2**20).decode()
    kept = [f"line {number}" for number in range(lines - 1)]
    dropped = "2 lines of the log were dropped: nobody read them"
    assert [line for line in text.splitlines() if line] == [*kept, dropped, "now somebody reads"]
    for file in (read, write, log._file):
        os.close(file)
