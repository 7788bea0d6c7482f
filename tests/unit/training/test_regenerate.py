"""Regeneration: every turn is answered by the server, a killed run goes on, and what fails is counted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import pytest

from eagle_tools.training.__main__ import main
from eagle_tools.training.rows.chat_records import RecordReader
from eagle_tools.training.rows.regenerate import FAILED, Regenerated, RowFiles
from eagle_tools.training.rows.token_rows import read_token_rows
from tests.api.fake_engine import EOS, ID, byte_tokenizer
from tests.support.scripted import serving

Reply = Callable[[dict[str, Any], int], tuple[int, Any]]  # (body, number of the request) -> status and answer


def answer(body: dict[str, Any], _: int = 0) -> tuple[int, Any]:
    """An answer that depends on the messages alone."""
    said = json.dumps(body["messages"]).encode()
    text = f"{len(said)} {sum(said)}"
    message = {"role": "assistant", "content": text, "reasoning_content": "hm"}
    choice = {"message": message, "token_ids": [*text.encode()], "finish_reason": "stop"}
    return 200, {"choices": [choice], "prompt_token_ids": list(said)}


@contextmanager
def server(reply: Reply) -> Iterator[str]:
    """The URL of a server of chat completions."""
    numbers, lock = iter(range(10**6)), Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "served"}]})

        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers["content-length"]))
            if self.path != "/v1/chat/completions":
                return self._send(404, {})
            body = json.loads(sent)
            assert body["model"] == "served" and body["return_token_ids"] is True
            with lock:
                number = next(numbers)
            self._send(*reply(body, number))

        def _send(self, status: int, values: Any) -> None:
            data = json.dumps(values).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.send_header("retry-after", "0")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

        def handle(self) -> None:
            with suppress(OSError):  # the client was killed
                super().handle()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_address[1]}/v1"
        finally:
            listening.shutdown()
            thread.join()


def chats(path: Path, count: int = 12) -> Path:
    """Conversations of all forms, with one to three questions."""
    rows: list[dict[str, Any]] = []
    for number in range(count):
        users = [{"role": "user", "content": f"{number} {turn}"} for turn in range(1 + number % 3)]
        messages = [part for user in users for part in (user, {"role": "assistant", "content": "old"})]
        forms = (
            {"messages": messages},
            {
                "conversations": [
                    {"from": "gpt" if m["role"] != "user" else "human", "value": m["content"]} for m in messages
                ]
            },
            {"prompt": f"prompt {number}"},
        )
        rows.append({"id": f"c{number}", **forms[number // 3 % 3]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(data: Path, url: str, out: Path, *more: str) -> list[str]:
    return ["regenerate", "--data", str(data), "--url", url, "--out", str(out), "--concurrency", "3", *more]


def test_every_question_is_answered_over_the_models_own_history(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bodies: list[dict[str, Any]] = []

    def reply(body: dict[str, Any], number: int) -> tuple[int, Any]:
        bodies.append(body)
        return answer(body, number)

    data, out = chats(tmp_path / "data.jsonl"), tmp_path / "rows.jsonl"
    with server(reply) as url:
        assert main(command(data, url, out, "--temperature", "0", "0.7", "--max-tokens", "9")) == 0
    rows = list(read_token_rows(out))
    assert [(row.id, row.gen) for row in rows[:6]] == [("c0", 0), ("c1", 0), ("c1", 1), ("c2", 0), ("c2", 1), ("c2", 2)]
    for row in rows:
        prompt = bytes(t for t, m in zip(row.input_ids, row.loss_mask, strict=True) if not m)
        written = bytes(t for t, m in zip(row.input_ids, row.loss_mask, strict=True) if m).decode()
        messages = json.loads(prompt)
        assert written == answer({"messages": messages})[1]["choices"][0]["message"]["content"]
        assert len(messages) == 2 * row.gen + 1 and "old" not in prompt.decode() and "hm" not in prompt.decode()
        if row.gen:
            earlier = answer({"messages": messages[:-2]})[1]["choices"][0]["message"]["content"]
            assert messages[-2] == {"role": "assistant", "content": earlier}
    assert f"12 conversations: 12 answered, 0 failed, 0 settled before; {len(rows)} rows" in capsys.readouterr().out
    temperatures = {body["messages"][0]["content"]: body["temperature"] for body in bodies}
    assert (temperatures["0 0"], temperatures["1 0"]) == (0, 0.7)
    assert {body["max_tokens"] for body in bodies} == {9}


def test_a_killed_run_goes_on_and_ends_with_the_same_file(tmp_path: Path) -> None:
    data, whole, killed = chats(tmp_path / "data.jsonl", 30), tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    with server(answer) as url:
        assert main(command(data, url, whole)) == 0
    process: list[subprocess.Popen[bytes]] = []

    def kills(body: dict[str, Any], number: int) -> tuple[int, Any]:
        if number == 25:
            os.kill(process[0].pid, signal.SIGKILL)
        return answer(body, number)

    with server(kills) as url:
        arguments = [sys.executable, "-m", "eagle_tools.training", *command(data, url, killed)]
        process.append(subprocess.Popen(arguments, stderr=subprocess.DEVNULL))
        assert process[0].wait() == -signal.SIGKILL
    written = killed.read_bytes()
    assert whole.read_bytes().startswith(written) and 0 < len(written) < len(whole.read_bytes())
    killed.write_bytes(written[:-7])  # a torn line
    with server(answer) as url:
        assert main(command(data, url, killed)) == 0
        assert killed.read_bytes() == whole.read_bytes()
        assert main(command(data, url, killed)) == 0
    assert killed.read_bytes() == whole.read_bytes()


def test_a_failure_is_the_whole_conversation(tmp_path: Path) -> None:
    values = {"id": "x", "messages": [{"role": "user", "content": "?"}], "tools": [TOOL]}
    values["chat_template_kwargs"] = {"enable_thinking": False}
    record, files = RecordReader(tmp_path / "data").record(1, values), RowFiles(tmp_path / "rows.jsonl")
    files.write(Regenerated(record, error="no"))
    assert json.loads(files.failures.read_text()) == {**values, "error": "no"}
    assert files.resume() == {"x"}


def test_what_fails_is_in_a_file_of_its_own_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def reply(body: dict[str, Any], number: int) -> tuple[int, Any]:
        if body["messages"][-1]["content"] == "2 1":
            return 400, {"error": {"message": "too\nlong"}}
        if body["messages"][-1]["content"] == "1 0" and not busy:
            busy.append(number)
            return 503, {"error": {"message": "busy"}}
        return answer(body, number)

    busy: list[int] = []
    data, out = chats(tmp_path / "data.jsonl", 4), tmp_path / "rows.jsonl"
    with server(reply) as url:
        assert main(command(data, url, out)) == 0
        assert busy
        assert "4 conversations: 3 answered, 1 failed (see " in capsys.readouterr().out
        assert {row.id for row in read_token_rows(out)} == {"c0", "c1", "c3"}
        failures = out.with_name(out.name + FAILED)
        [failure] = map(json.loads, failures.read_text().splitlines())
        assert (failure["id"], failure["error"]) == ("c2", "400: too long")
        assert main(command(data, url, out)) == 0
        assert "4 conversations: 1 answered, 0 failed, 3 settled before" in capsys.readouterr().out
        again = tmp_path / "again.jsonl"  # the file of failures is data, too
        assert main(command(failures, url, again, "--ignore", "error")) == 0


@pytest.mark.parametrize("case", ["nobody", "no token ids", "twice", "unknown"])
def test_a_run_that_cannot_go_on_ends_with_one_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def without(body: dict[str, Any], number: int) -> tuple[int, Any]:
        return 200, {"choices": [{"message": {"content": "x"}}]}

    data = chats(tmp_path / "data.jsonl")
    with server(without) as url:
        if case == "twice":
            data.write_text(data.read_text() * 2)
        if case == "unknown":
            data.write_text(data.read_text() + '{"question": 1}\n')
        run = command(data, url, tmp_path / "rows.jsonl")
        assert case == "nobody" or main(run) == 2
    assert case != "nobody" or main(run) == 2  # the server has ended
    line = [line for line in capsys.readouterr().err.splitlines() if "Error:" in line][-1]
    expected = {
        "nobody": "cannot be reached",
        "no token ids": "ignores return_token_ids",
        "twice": "row 13: the id 'c0' occurs twice",
        "unknown": "row 13: unknown key 'question'",
    }
    assert expected[case] in line


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_recorded_results_answer_the_new_calls_of_our_server(tmp_path: Path) -> None:
    """With our server: the ids of rows are what it read and wrote, their ends included."""
    recorded = {"id": "r1", "type": "function", "function": {"name": "add", "arguments": '{"a": 9}'}}
    messages = [
        {"role": "user", "content": "Add"},
        {"role": "assistant", "content": None, "tool_calls": [recorded]},
        {"role": "tool", "tool_call_id": "r1", "content": "ten"},
        {"role": "assistant", "content": "old"},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "old"},
    ]
    data, out = tmp_path / "data.jsonl", tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"id": "t", "messages": messages, "tools": [TOOL]}) + "\n")
    with serving(tmp_path, [CALL, "It is ten.", "Welcome", "never"]) as served:
        assert main(command(data, f"{served.url}/v1", out)) == 0
    rows = list(read_token_rows(out))
    tokenizer = byte_tokenizer()
    texts = [tokenizer.decode(list(row.input_ids), skip_special_tokens=False) for row in rows]
    assert [row.finish_reason for row in rows] == ["tool_calls", "stop", "stop"]
    assert all(row.input_ids[-1] == ID[EOS] for row in rows)
    assert texts[1].count("ten") == 2 and "<tool_response>\nten" in texts[1] and "old" not in texts[2]
    assert texts[2].endswith(f"Welcome{EOS}")
