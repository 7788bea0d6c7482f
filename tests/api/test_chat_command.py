"""`eagle-server chat` over servers with the fake engine, which repeats the prompt: in a pipe and in a terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.api.conftest import PATIENCE, REPOSITORY, Server, kept_running, start_server
from tests.api.fake_engine import BREAK, SLOW
from tests.api.servers import wait_until_gone
from tests.support.terminal import CTRL_C, CTRL_D, Terminal, plain

CHAT = (sys.executable, "-m", "eagle_server", "chat")
FAKE = (sys.executable, "-c", "from tests.api.fake_engine import serve; serve()")
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}({{ m.content }}){% endfor %}"


@pytest.fixture(scope="module")
def templated(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose model has a chat template; it asks for a key."""
    directory = tmp_path_factory.mktemp("templated")
    (directory / "template.jinja").write_text(TEMPLATE)
    flags = ["--model-path", str(tokenizer_dir), "--chat-template", str(directory / "template.jinja")]
    flags += ["--served-model-name", "fake", "--api-key", "sesame"]
    with kept_running(start_server(directory / "log", *flags)) as server:
        yield server


def piped(text: str, *arguments: str, key: str = "sesame") -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "EAGLE_SERVER_API_KEY": key}
    return subprocess.run(
        [*CHAT, *arguments], input=text, capture_output=True, text=True, cwd=REPOSITORY, env=environ, timeout=PATIENCE
    )


def talking(server: Server, *arguments: str) -> Terminal:
    environ = {**os.environ, "EAGLE_SERVER_API_KEY": "sesame", "PYTHONPATH": str(REPOSITORY)}
    return Terminal([*CHAT, "--url", server.url, *arguments], environ)


def test_a_pipe_is_one_message_and_gets_the_answer_alone(templated: Server) -> None:
    done = piped("two\nlines\n", "--url", templated.url, "--max-tokens", "40", "--system", "be kind", "--colors")
    text = "s(be kind)u(two\nlines)"
    assert done.stdout == (text * 3)[:40] + "\n"
    assert (done.returncode, done.stderr) == (0, "")


def test_without_a_template_texts_are_continued_and_this_is_said(server: Server) -> None:
    done = piped("abc\n", "--url", server.url, "--max-tokens", "8")
    assert done.stdout == "abc\nabc\n"
    assert "no chat template" in done.stderr and "--chat-template" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "key", "status", "message"),
    [
        (["--url", "{url}"], "wrong", 1, "this server has another API key"),
        (["--url", "http://127.0.0.1:9"], "sesame", 1, "the server at http://127.0.0.1:9 cannot be reached"),
        (["http://127.0.0.1:9"], "sesame", 1, "the server at http://127.0.0.1:9 cannot be reached"),
        (["--url", "http://host:port"], "sesame", 1, "--url http://host:port: Invalid port"),
        (["--url", "{url}"], "k\u00e9y", 1, "this server has another API key"),
        (["--url", "unix:/no/such"], "sesame", 1, "the server at unix:/no/such cannot be reached"),
        (["owner/model", "--url", "{url}"], "sesame", 2, "--model-path: --url names a server"),
        (["--port", "80"], "sesame", 2, "--port: the chat's own server listens on a socket of its own; drop it"),
        (["--colours"], "sesame", 2, "unknown flag --colours; did you mean --colors"),
    ],
    ids=str,
)
def test_what_is_wrong_is_one_line(
    templated: Server, arguments: list[str], key: str, status: int, message: str
) -> None:
    done = piped("hi", *(each.format(url=templated.url) for each in arguments), key=key)
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("eagle_server: error: ") and message in line
    assert done.returncode == status


def test_a_failed_request_of_a_pipe_is_status_1(templated: Server) -> None:
    done = piped(BREAK, "--url", templated.url)
    assert done.returncode == 1
    assert "not finite" in done.stderr


@pytest.mark.slow
def test_ctrl_c_ends_a_pipe(server: Server) -> None:
    command = [*CHAT, "--url", server.url, "--max-tokens", "1000"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"abc{SLOW}".encode())
        process.stdin.close()
        assert process.stdout.read(3) == b"abc"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE) == 130


@pytest.mark.slow
def test_a_conversation_in_a_terminal(templated: Server) -> None:
    with talking(templated, "--max-tokens", "60", "--seed", "0") as terminal:
        assert "fake, drafts: EAGLE3" in plain(terminal.until(">>> "))
        terminal.type("/max_tokens 4\n")
        assert "max_tokens is 4" in terminal.until(">>> ")
        terminal.type("hi\n")
        shown = plain(terminal.until(">>> "))
        assert "\nu(hi\n[4 tokens, " in shown
        assert "tokens per cycle, cut at the limit of tokens]" in shown
        terminal.type("/max_tokens 20\n")
        terminal.until(">>> ")
        terminal.type("again\n")
        assert "\nu(hi)a(u(hi)u(again)\n" in plain(terminal.until(">>> "))  # what was said before
        terminal.type("/clear\n")
        terminal.until(">>> ")
        terminal.type("/system be kind\n")
        terminal.until(">>> ")
        terminal.type('"""one\n')
        terminal.until("... ")
        terminal.type('two"""\n')
        assert "\ns(be kind)u(one\ntwo)\n" in plain(terminal.until(">>> "))
        terminal.type("/temperature hot\n")
        assert "temperature should be a number" in terminal.until(">>> ")
        terminal.type("/nothing\n")
        assert "no command /nothing; /help" in terminal.until(">>> ")
        terminal.type("/temperature 1000\n")
        terminal.until(">>> ")
        terminal.type("refused\n")
        assert "temperature" in terminal.until("(status 400)")
        terminal.until(">>> ")
        terminal.type(CTRL_D)
        assert terminal.status() == 0


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_not_the_chat(templated: Server) -> None:
    with talking(templated) as terminal:
        terminal.until(">>> ")
        terminal.type(f"abc{SLOW}\n")
        terminal.until("u(ab")
        terminal.type(CTRL_C)
        terminal.until("[stopped]")
        terminal.until(">>> ")
        wait_until_idle_with_key(templated)
        terminal.type(CTRL_C)
        assert "Ctrl-D or /exit ends the chat" in terminal.until(">>> ")
        terminal.type("/exit\n")
        assert terminal.status() == 0


def wait_until_idle_with_key(server: Server) -> None:
    deadline = time.monotonic() + PATIENCE
    headers = {"authorization": "Bearer sesame"}
    while httpx.get(f"{server.url}/v1/server_info", headers=headers).json()["engine"]["running"]:
        assert time.monotonic() < deadline, "the stopped request goes on"
        time.sleep(0.02)


@pytest.mark.slow
def test_colours_tell_drafts_from_the_targets_own_tokens(templated: Server) -> None:
    green, yellow = "\x1b[32m", "\x1b[33m"
    with talking(templated, "--seed", "3", "--max-tokens", "20") as terminal:
        terminal.until(">>> ")
        terminal.type("hi\n")
        assert green not in terminal.until(">>> ")
        terminal.type("/colors\n")
        terminal.until(">>> ")
        terminal.type("hi\n")
        shown = terminal.until(">>> ")
        assert f"{green}i\x1b[0m" in shown and f"{yellow}h\x1b[0m" in shown
        assert f"{green}  drafted\x1b[0m{yellow}  the target's own" in shown
        terminal.type(CTRL_D)
        assert terminal.status() == 0


# --- The chat's own server ---


def start_own(tokenizer_dir: Path, tmp_path: Path) -> tuple[subprocess.Popen[str], int]:
    """A process that starts its own server, and the server's process id."""
    code = (
        "import os, time; from eagle_tools.chat.connection import Connection;"
        "from eagle_tools.chat.own_server import OwnServer; from eagle_tools.chat.screen import Screen;"
        f"own = OwnServer(['--model-path', {str(tokenizer_dir)!r}], os.environ, {FAKE!r}).__enter__();"
        "own.wait(Connection(own.url, None), Screen(colors=False), 'fake');"
        "print(own._process.pid, own.url, flush=True); time.sleep(600)"
    )
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, env=environ
    )
    assert process.stdout is not None
    pid, url = process.stdout.readline().split()
    assert url.startswith(f"unix:{tmp_path}")
    return process, int(pid)


@pytest.mark.slow
def test_the_own_server_ends_with_a_chat_that_is_killed(tokenizer_dir: Path, tmp_path: Path) -> None:
    process, server = start_own(tokenizer_dir, tmp_path)
    with process:
        process.send_signal(signal.SIGKILL)
    wait_until_gone(server)


@pytest.mark.slow
def test_a_chat_without_a_url_serves_its_model_and_leaves_nothing(tmp_path: Path) -> None:
    environ = {**os.environ, "TMPDIR": str(tmp_path), "EAGLE_SERVER_API_KEY": "of another server"}
    done = subprocess.run(
        [*CHAT, "--temperature", "0", "--max-tokens", "8", "--cpu-threads", "1"],
        input="def fibonacci(n):\n",
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=environ,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith('"""')
    assert list(tmp_path.iterdir()) == []


def test_an_own_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    done = piped("hi", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("it has no tokenizer.json")


@pytest.mark.slow
def test_ctrl_c_while_the_own_server_loads_ends_both(tmp_path: Path) -> None:
    environ = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    with Terminal([*CHAT, "--cpu-threads", "1"], environ) as terminal:
        terminal.until("loading demo")
        terminal.type(CTRL_C)
        assert terminal.status() == 130
    assert list(tmp_path.iterdir()) == []
