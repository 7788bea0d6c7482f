"""--uds: a server on a Unix socket."""

from __future__ import annotations

import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from eagle_server.api.server import listen
from tests.api.conftest import PATIENCE, REPOSITORY
from tests.api.fake_engine import STALL

SERVE = "from tests.api.fake_engine import serve; serve()"


class UnixServer:
    """A server process on a Unix socket, with the fake engine."""

    def __init__(self, directory: Path, tokenizer_dir: Path) -> None:
        self.path, self.log = directory / "eagle.sock", directory / "log"
        flags = ["--model-path", str(tokenizer_dir), "--served-model-name", "fake", "--uds", str(self.path)]
        with self.log.open("w") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SERVE, *flags],
                stdout=sink,
                stderr=sink,
                cwd=REPOSITORY,
                umask=0o022,
            )
        self.http = httpx.Client(transport=httpx.HTTPTransport(uds=str(self.path)), base_url="http://localhost")

    def wait(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while "serving fake" not in self.log.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def stop(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def unix_server(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UnixServer]:
    server = UnixServer(tmp_path_factory.mktemp("uds"), tokenizer_dir)
    try:
        server.wait()
        yield server
    finally:
        server.stop()


def test_openais_client_streams_over_it(unix_server: UnixServer) -> None:
    client = openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=unix_server.http)
    stream = client.completions.create(model="fake", prompt="abc", max_tokens=6, stream=True)
    assert "".join(event.choices[0].text for event in stream) == "abcabc"
    assert unix_server.http.get("/health").status_code == 200


def test_only_the_owner_may_connect(unix_server: UnixServer) -> None:
    mode = unix_server.path.stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert not mode & (stat.S_IWGRP | stat.S_IWOTH)  # connecting needs the right to write


def test_the_log_says_how_to_ask(unix_server: UnixServer) -> None:
    log = unix_server.log.read_text()
    assert f"serving fake on the Unix socket {unix_server.path}" in log
    assert "127.0.0.1" not in log
    [command] = [line[line.index("curl") :] for line in log.splitlines() if "curl" in line]
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert '"text":"def fibonacci(n):' in answer.stdout


def test_a_living_server_keeps_its_socket(unix_server: UnixServer) -> None:
    with pytest.raises(OSError, match=f"--uds {unix_server.path}: another server listens there"):
        listen("unused", 1, str(unix_server.path))
    assert unix_server.http.get("/health").status_code == 200


@pytest.mark.slow
def test_the_file_goes_with_the_server_and_a_killed_ones_is_replaced(tokenizer_dir: Path, tmp_path: Path) -> None:
    for end in (signal.SIGKILL, signal.SIGTERM):
        server = UnixServer(tmp_path, tokenizer_dir)
        try:
            server.wait()
            assert server.http.get("/health").status_code == 200
            server.process.send_signal(end)
            server.process.wait(timeout=PATIENCE)
        finally:
            server.stop()
        assert server.path.exists() == (end == signal.SIGKILL)
    assert server.process.returncode == 0, server.log.read_text()


@pytest.mark.slow
def test_a_client_that_leaves_ends_its_request(unix_server: UnixServer) -> None:
    with pytest.raises(httpx.ReadTimeout):
        unix_server.http.post("/v1/completions", json={"prompt": STALL}, timeout=0.5)
    deadline = time.monotonic() + PATIENCE
    while unix_server.http.get("/v1/server_info").json()["engine"]["running"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.write_text("mine")
    with pytest.raises(OSError, match="cannot listen on --uds .*notes: there is a file that is no socket"):
        listen("unused", 1, str(file))
    assert file.read_text() == "mine"
    for path in (tmp_path / "no" / "such", tmp_path / ("x" * 200)):
        with pytest.raises(OSError, match="cannot listen on --uds"):
            listen("unused", 1, str(path))


def test_a_successors_socket_stays(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listen("unused", 1, str(path)):
        path.unlink()
        successor = socket.socket(socket.AF_UNIX)
        successor.bind(str(path))
    assert path.exists()
    successor.close()
