"""--record-rows-dir: finished answers as token rows, and what is never one."""

from __future__ import annotations

import asyncio
import logging
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from eagle_server.api.telemetry import answer_rows
from eagle_server.api.telemetry.answer_rows import AnswerRow, RowRecorder
from eagle_server.client.client import EngineClient
from eagle_server.config import Config, parse_args
from eagle_server.llm import LLM
from eagle_tools.training.rows.row_set import read_row_set
from eagle_tools.training.rows.token_rows import TokenRow, is_row_file, read_token_rows
from tests.api.calls import complete, stream
from tests.api.conftest import REPOSITORY, http_client, kept_running, start_server
from tests.api.fake_engine import BREAK, DEAD_END, EOS, ID, REFUSE, SLOW

HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 9},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 9},
    "/v1/responses": {"input": "hi", "max_output_tokens": 9},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
}
Recording = Callable[..., httpx.AsyncClient]


def closed(http: httpx.AsyncClient) -> None:
    """All rows are written now."""
    http._transport.app.state.recorder.close()


def rows_of(directory: Path) -> list[TokenRow]:
    return [row for file in sorted(directory.glob("rows-*.jsonl")) for row in read_token_rows(file)]


@pytest.fixture
def recording(tokenizer_dir: Path, tmp_path: Path, engine_client: EngineClient, running: None) -> Recording:
    """Makes a client of a server that records into `rows`, with these other flags."""

    def make(*flags: str) -> httpx.AsyncClient:
        served = ["--model-path", str(tokenizer_dir), "--served-model-name", "fake"]
        config = parse_args([*served, "--record-rows-dir", str(tmp_path / "rows"), *flags], environ={})
        return http_client(config, engine_client, tokenizer_dir)

    return make


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Callable[[int], RowRecorder]]:
    """Makes a recorder into `rows` with this bound in bytes."""
    made: list[RowRecorder] = []

    def make(max_bytes: int) -> RowRecorder:
        made.append(RowRecorder(tmp_path / "rows", max_bytes, CollectorRegistry()))
        return made[-1]

    yield make


async def test_rows_are_the_ids_that_were_sent(recording: Recording, tmp_path: Path) -> None:
    http = recording()
    events = await stream(http, prompt="ab cd", n=2, max_tokens=21, seed=3, return_token_ids=True)
    stopped = await complete(http, prompt="one two", stop="wo", max_tokens=50, return_token_ids=True)
    ended = await complete(http, prompt=f"x{EOS}", max_tokens=50, return_token_ids=True)
    closed(http)
    rows = rows_of(tmp_path / "rows")
    choices = [choice for event in events for choice in event["choices"]]
    for gen in (0, 1):
        sent = [token for choice in choices if choice["index"] == gen for token in choice["token_ids"]]
        assert len(sent) == 21
        assert (rows[gen].gen, rows[gen].finish_reason) == (gen, "length")
        assert rows[gen].input_ids == (*b"ab cd", *sent)
        assert rows[gen].loss_mask == (0,) * 5 + (1,) * 21
    assert rows[0].id == rows[1].id
    for row, answer in zip(rows[2:], (stopped, ended), strict=True):
        [choice] = answer["choices"]
        assert row.input_ids == (*choice["prompt_token_ids"], *choice["token_ids"])
        assert (row.supervised, row.finish_reason) == (len(choice["token_ids"]), "stop")
    assert len({row.id for row in rows}) == 3


async def test_a_training_reads_the_files_and_nobody_else(recording: Recording, tmp_path: Path) -> None:
    http = recording()
    for _ in range(4):
        await complete(http, prompt="abcdef", max_tokens=12)
    closed(http)
    files = sorted((tmp_path / "rows").glob("rows-*.jsonl"))
    assert all(map(is_row_file, files))
    counts = read_row_set(files, 256 + len(ID), (), 64).counts  # some are held out, by their random ids
    assert counts.total in (12, 24, 36)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "rows").iterdir()}
    assert modes == {0o600}
    assert stat.S_IMODE((tmp_path / "rows").stat().st_mode) == 0o700


@pytest.mark.parametrize("path", BODIES)
async def test_every_endpoint_is_recorded_unless_the_request_says_no(
    recording: Recording, tmp_path: Path, path: str
) -> None:
    http = recording()
    for extra in ({}, {"store": False}, {"stream": True}, {"stream": True, "store": False}):
        response = await http.post(path, json={**BODIES[path], **extra})
        assert response.status_code == 200, response.text
    refused = await http.post(path, json={**BODIES[path], "store": True})
    assert (refused.status_code, "store" in refused.json()["error"]["message"]) == (400, True)
    closed(http)
    assert [row.supervised for row in rows_of(tmp_path / "rows")] == [9, 9]


async def test_what_is_no_finished_answer_is_no_row(recording: Recording, tmp_path: Path) -> None:
    http = recording()
    kinds: list[tuple[int, dict[str, Any]]] = [
        (500, {"prompt": f"abc{BREAK}", "max_tokens": 30}),
        (400, {"prompt": f"abc{REFUSE}"}),
        (400, {"prompt": f"abc{DEAD_END}", "max_tokens": 30}),
        (408, {"prompt": f"abc{SLOW}", "max_tokens": 2000, "timeout": 0.2}),
        (200, {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 3}),
        (200, {"prompt": "abc", "max_tokens": 0, "echo": True}),
        (200, {"prompt": "abc", "prompt_logprobs": 1, "max_tokens": 3}),
    ]
    for status, body in kinds:
        assert (await http.post("/v1/completions", json=body)).status_code == status, body
    leaving = asyncio.create_task(http.post("/v1/completions", json={"prompt": f"abc{SLOW}", "max_tokens": 2000}))
    await asyncio.sleep(0.1)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await complete(http, prompt="z", max_tokens=2)
    closed(http)
    assert [row.input_ids for row in rows_of(tmp_path / "rows")] == [(ord("z"),) * 3]


async def test_nothing_is_written_unless_asked_for(
    config: Config,
    engine_client: EngineClient,
    tokenizer_dir: Path,
    running: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(answer_rows, "AnswerRow", None)
    http = http_client(config, engine_client, tokenizer_dir)
    await complete(http, prompt="abc", max_tokens=5)
    assert http._transport.app.state.recorder is None
    assert "recorded_rows" not in (await http.get("/metrics")).text
    assert not [*tmp_path.iterdir()]


async def test_only_the_named_keys_are_recorded(recording: Recording, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("willing:0123456789abcdef\nother:fedcba9876543210\n")
    http = recording("--api-key-file", str(keys), "--record-rows-keys", "willing")
    for key, prompt in (("0123456789abcdef", "a"), ("fedcba9876543210", "b")):
        response = await http.post(
            "/v1/completions", json={"prompt": prompt, "max_tokens": 2}, headers={"x-api-key": key}
        )
        assert response.status_code == 200
    closed(http)
    assert [row.input_ids for row in rows_of(tmp_path / "rows")] == [(97, 97, 97)]


def test_names_of_keys_that_do_not_exist_are_refused(recording: Recording) -> None:
    with pytest.raises(ValueError, match="--record-rows-keys nobody: no API key has this name; there is: api-key"):
        recording("--api-key", "k", "--record-rows-keys", "nobody")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--record-rows-keys", "a", "--api-key", "k"], "--record-rows-keys needs --record-rows-dir"),
        (["--record-rows-gb", "3"], "--record-rows-gb needs --record-rows-dir"),
        (["--record-rows-dir", "x", "--record-rows-keys", "a"], "needs --api-key or --api-key-file"),
        (["--record-rows-dir", "x", "--record-rows-gb", "0"], "greater than or equal to 0.01"),
    ],
)
def test_options_without_effect_are_refused(flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(flags, environ={})
    assert reason in capsys.readouterr().err


def test_an_engine_without_a_server_refuses_to_record(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="record_rows_dir: a server records"):
        LLM(record_rows_dir=str(tmp_path / "rows"))
    assert not [*tmp_path.iterdir()]


def some_row(number: int, tokens: int = 40) -> AnswerRow:
    return AnswerRow(f"id-{number}", 0, [1] * 5, [2] * tokens, "stop")


def test_the_oldest_files_make_room_for_new_ones(
    recorder: Callable[[int], RowRecorder], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    most = 8 * 3 * len(some_row(0).line()) + 100
    with caplog.at_level(logging.INFO):
        one = recorder(most)
        for number in range(100):
            one.record([some_row(number)])
        one.close()
    kept = [int(row.id.removeprefix("id-")) for row in rows_of(tmp_path / "rows")]
    assert sum(file.stat().st_size for file in (tmp_path / "rows").glob("rows-*")) <= most
    assert len(kept) > 15 and sorted(kept) == [*range(100 - len(kept), 100)], "the newest ones"
    assert "was removed to make room" in caplog.text
    again = recorder(most // 2)  # what an earlier server wrote counts
    again.record([some_row(100)])
    again.close()
    assert sum(file.stat().st_size for file in (tmp_path / "rows").glob("rows-*")) <= most // 2
    assert "id-100" in [row.id for row in rows_of(tmp_path / "rows")]


def test_a_row_larger_than_a_file_is_lost_alone(recorder: Callable[[int], RowRecorder], tmp_path: Path) -> None:
    one = recorder(8 * 400)
    one.record([some_row(0), some_row(1, tokens=1000), some_row(2)])
    one.close()
    assert [row.id for row in rows_of(tmp_path / "rows")] == ["id-0", "id-2"]


async def test_a_directory_that_refuses_costs_rows_and_no_request(
    recording: Recording, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    http = recording()
    rows, away = tmp_path / "rows", tmp_path / "away"
    rows.rename(away)
    rows.write_text("a file in its place")

    async def lost() -> float:
        lines = (await http.get("/metrics")).text.splitlines()
        return next(
            float(line.split()[1])
            for line in lines
            if line.startswith('eagle_server_recorded_rows_total{result="lost"}')
        )

    for number in range(1, 4):
        await complete(http, prompt="abc", max_tokens=5)
        async with asyncio.timeout(60):
            while await lost() != number:
                await asyncio.sleep(0.001)
    assert caplog.text.count("rows of answers are lost: Not a directory") == 1
    rows.unlink()
    away.rename(rows)
    await complete(http, prompt="xyz", max_tokens=5)
    closed(http)
    assert [row.input_ids[:3] for row in rows_of(rows)] == [(*b"xyz",)]
    assert 'eagle_server_recorded_rows_total{result="written"} 1.0' in (await http.get("/metrics")).text


async def test_a_disk_that_is_too_slow_costs_rows_and_no_request(
    recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_rows, "MOST_WAITING", 7)
    http = recording()
    await complete(http, prompt="abc", max_tokens=5)
    await complete(http, prompt="abc", max_tokens=4)
    closed(http)
    assert [row.supervised for row in rows_of(tmp_path / "rows")] == [4]
    assert 'eagle_server_recorded_rows_total{result="lost"} 1.0' in (await http.get("/metrics")).text


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    """A limit on the size of files ends a write in the middle of a line, as a full disk does."""
    code = f"""if True:
        import resource
        from pathlib import Path
        from prometheus_client import CollectorRegistry
        from eagle_server.api.telemetry.answer_rows import AnswerRow, RowRecorder
        registry = CollectorRegistry()
        recorder = RowRecorder(Path({str(tmp_path / "rows")!r}), 10**6, registry)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        rows = [AnswerRow(f"id-{{number}}", 0, [1], [2] * 60, "stop") for number in range(9)]
        recorder.record(rows)
        recorder.close()
        print(*(int(registry.get_sample_value("eagle_server_recorded_rows_total", {{"result": result}}))
                for result in ("written", "lost")))
    """
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=True
    )
    written, lost = map(int, done.stdout.split())
    assert written > 0 and lost > 0 and written + lost == 9
    assert len(rows_of(tmp_path / "rows")) == written
    assert done.stderr.count("rows of answers are lost") == 1


def test_a_line_that_a_killed_server_left_is_cut_off(recorder: Callable[[int], RowRecorder], tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "rows-1.jsonl").write_bytes(some_row(1).line() + some_row(2).line()[:30])
    (rows / "rows-2.jsonl").write_bytes(b'{"id"')
    one = recorder(10**6)
    one.record([some_row(3)])
    one.close()
    assert sorted(row.id for row in rows_of(rows)) == ["id-1", "id-3"]
    assert not (rows / "rows-2.jsonl").exists()


def test_a_directory_has_one_server(recorder: Callable[[int], RowRecorder], tmp_path: Path) -> None:
    one = recorder(10**6)
    with pytest.raises(ValueError, match="another server records there"):
        recorder(10**6)
    one.close()
    recorder(10**6).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="--record-rows-dir .*file: File exists"):
        RowRecorder(tmp_path / "file", 10**6, CollectorRegistry())


def test_a_server_says_that_it_records_and_writes_all_before_it_ends(tokenizer_dir: Path, tmp_path: Path) -> None:
    flags = ("--model-path", str(tokenizer_dir), "--served-model-name", "fake")
    with kept_running(start_server(tmp_path / "log", *flags, "--record-rows-dir", str(tmp_path / "rows"))) as server:
        for _ in range(3):
            httpx.post(f"{server.url}/v1/completions", json={"prompt": "abc", "max_tokens": 500}).raise_for_status()
        assert server.stop() == 0
    assert [row.supervised for row in rows_of(tmp_path / "rows")] == [500] * 3
    [warning] = [line for line in server.log.read_text().splitlines() if "prompts and answers" in line]
    assert " WARNING: " in warning and "of all clients are written to" in warning
