"""The server process: a dying engine, signals, and failed starts."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from eagle_server.api.server import TEMPORARY_ERRORS, listen
from tests.api.conftest import PATIENCE, REPOSITORY, Server, kept_running, serving, start_server
from tests.api.fake_engine import CRASH, EXIT, HANG, SLOW, STALL
from tests.api.servers import wait_for_running, wait_until_draining, wait_until_gone

# --- An engine that dies ---


@pytest.fixture(scope="module")
def mortal(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for tests that kill its engine."""
    with serving(tokenizer_dir, tmp_path_factory.mktemp("mortal") / "log") as running:
        yield running


@pytest.mark.parametrize(
    "death", ["exception", *(pytest.param(each, marks=pytest.mark.slow) for each in ("exit", "kill"))]
)
def test_a_dying_engine_fails_its_requests_and_comes_back(mortal: Server, death: str) -> None:
    [engine] = mortal.engine_pids()
    answers: list[httpx.Response] = []
    waiting = threading.Thread(
        target=lambda: answers.append(
            httpx.post(f"{mortal.url}/v1/completions", json={"prompt": STALL}, timeout=PATIENCE)
        )
    )
    waiting.start()
    wait_for_running(mortal, 1)
    prompt = {"exception": f"{CRASH}abc", "exit": f"{SLOW}{EXIT}abc", "kill": f"{SLOW}abc"}[death]
    lines: list[str] = []
    body = {"prompt": prompt, "max_tokens": 1000, "stream": True}
    with httpx.stream("POST", f"{mortal.url}/v1/completions", json=body, timeout=PATIENCE) as response:
        for line in response.iter_lines():
            lines.append(line)
            if death == "kill" and len(lines) == 1:
                os.kill(engine, signal.SIGKILL)
    waiting.join()
    assert answers[0].status_code == 503
    assert "died" in answers[0].json()["error"]["message"]
    if death == "exception":  # it dies before the first token
        assert response.status_code == 503
    else:
        assert response.status_code == 200
        assert any('"error"' in line and "died" in line for line in lines)
    assert httpx.get(f"{mortal.url}/health").status_code == 503
    mortal.wait_ready()
    assert mortal.engine_pids() != [engine]
    answer = httpx.post(f"{mortal.url}/v1/completions", json={"prompt": "abc", "max_tokens": 6})
    assert answer.json()["choices"][0]["text"] == "abcabc"


@pytest.mark.slow
def test_the_engine_dies_with_its_server(tokenizer_dir: Path, tmp_path: Path) -> None:
    sockets = tmp_path / "tmp"
    sockets.mkdir()
    with serving(tokenizer_dir, tmp_path / "log", environ={"TMPDIR": str(sockets)}) as running:
        [engine] = running.engine_pids()
        running.process.kill()
        running.process.wait()
        wait_until_gone(engine)
        assert list(sockets.iterdir()) == []


# --- Signals ---


@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(tokenizer_dir: Path, tmp_path: Path, signal_number: int) -> None:
    with serving(tokenizer_dir, tmp_path / "log") as running:
        body = {"prompt": f"{SLOW}abc", "max_tokens": 40, "stream": True}
        with httpx.stream("POST", f"{running.url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            running.process.send_signal(signal_number)
            wait_until_draining(running)
            refused = httpx.post(f"{running.url}/v1/completions", json={"prompt": "abc"})
            assert refused.status_code == 503
            assert "shutting down" in refused.json()["error"]["message"]
            rest = list(lines)
        assert "data: [DONE]" in rest
        assert running.process.wait(timeout=PATIENCE) == 0
        assert "Traceback" not in running.log.read_text()


@pytest.mark.slow
def test_an_engine_that_hangs_while_its_server_drains_is_an_error(tokenizer_dir: Path, tmp_path: Path) -> None:
    flags = ("--model-path", str(tokenizer_dir), "--served-model-name", "fake", "--watchdog-timeout", "2")
    with kept_running(start_server(tmp_path / "log", *flags)) as running, socket.socket() as waiting:
        body = json.dumps({"prompt": HANG}).encode()
        waiting.connect(("127.0.0.1", int(running.url.rpartition(":")[2])))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        waiting.sendall(head.encode() + body)
        waiting.settimeout(PATIENCE)
        while httpx.get(f"{running.url}/v1/server_info").json()["active_requests"] != 1:
            time.sleep(0.01)
        running.process.send_signal(signal.SIGTERM)
        assert b" 503 " in waiting.recv(1000)
        assert running.process.wait(timeout=PATIENCE) == 1
        log = running.log.read_text()
        assert "said nothing for 2 seconds" in log
        assert "starting it again" not in log and "Traceback" not in log


@pytest.mark.deep
def test_clients_cannot_delay_the_end(tokenizer_dir: Path, tmp_path: Path) -> None:
    """One never ends its body, another never reads its answer."""
    # 3 MB of answer, more than the operating system buffers
    body = json.dumps({"tokens": [1] * 500_000}).encode()
    head = "POST {} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n"
    with serving(tokenizer_dir, tmp_path / "log") as running, socket.socket() as idle, socket.socket() as unread:
        address = ("127.0.0.1", int(running.url.rpartition(":")[2]))
        idle.connect(address)
        idle.sendall(head.format("/v1/completions", 100).encode() + b"{")
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        unread.connect(address)
        unread.sendall(head.format("/detokenize", len(body)).encode() + body)
        unread.settimeout(PATIENCE)
        assert unread.recv(10)
        running.process.send_signal(signal.SIGTERM)
        idle.settimeout(PATIENCE)
        assert b" 503 " in idle.recv(1000)
        assert running.process.wait(timeout=PATIENCE) == 0  # twice as long with the limits of a running server
        assert "Traceback" not in running.log.read_text()


@pytest.mark.slow
def test_a_second_interrupt_stops_at_once(tokenizer_dir: Path, tmp_path: Path) -> None:
    with serving(tokenizer_dir, tmp_path / "log") as running:
        [engine] = running.engine_pids()
        body = {"prompt": STALL, "stream": True}
        call = threading.Thread(target=_post_and_forget, args=(running, body))
        call.start()
        wait_for_running(running, 1)
        running.process.send_signal(signal.SIGINT)
        wait_until_draining(running)
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(timeout=PATIENCE) == 130
        call.join()
        wait_until_gone(engine)
        assert "Traceback" not in running.log.read_text()


def _post_and_forget(server: Server, body: dict[str, Any]) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE)


@pytest.mark.slow
def test_an_idle_server_stops_and_leaves_nothing(tokenizer_dir: Path, tmp_path: Path) -> None:
    sockets = tmp_path / "tmp"
    sockets.mkdir()
    with serving(tokenizer_dir, tmp_path / "log", environ={"TMPDIR": str(sockets)}) as running:
        assert len(list(sockets.iterdir())) == 1
        assert running.stop() == 0
        assert list(sockets.iterdir()) == []


# --- Starting ---


def test_the_log_says_what_is_served_and_how_to_ask(server: Server) -> None:
    log = server.log.read_text()
    assert f"serving fake on {server.url}" in log
    [command] = [line[line.index("curl") :] for line in log.splitlines() if "curl" in line]
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert '"text":"def fibonacci(n):' in answer.stdout
    assert f"playground  {server.url}/" in log


def wrong_start(tmp_path: Path, *flags: str, function: str = "build") -> tuple[int, list[str]]:
    failed = start_server(tmp_path / "log", *flags, function=function)
    status = failed.process.wait(timeout=PATIENCE)
    return status, failed.log.read_text().splitlines()


@pytest.mark.parametrize("port", ["0", *(pytest.param(port, marks=pytest.mark.slow) for port in ("x", "70000"))])
def test_a_wrong_flag_is_one_line(tmp_path: Path, port: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "eagle_server", "--port", port], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert run.returncode == 2
    assert len(run.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_bad_configuration_found_by_the_engine_is_one_line(tokenizer_dir: Path, tmp_path: Path) -> None:
    status, lines = wrong_start(tmp_path, "--model-path", str(tokenizer_dir), function="build_with_bad_configuration")
    assert status == 2
    assert lines[-1] == "eagle_server: error: config.json: no such architecture"
    assert not any("Traceback" in line for line in lines)


@pytest.mark.slow
def test_a_bug_while_building_is_reported_with_its_traceback(tokenizer_dir: Path, tmp_path: Path) -> None:
    status, lines = wrong_start(tmp_path, "--model-path", str(tokenizer_dir), function="build_with_bug")
    assert status == 1
    assert lines[-1] == "eagle_server: error: RuntimeError: a bug"
    assert any("Traceback" in line for line in lines)


def test_a_directory_without_a_model_is_one_line(tmp_path: Path) -> None:
    status, lines = wrong_start(tmp_path, "--model-path", str(tmp_path))
    assert status == 2
    assert lines[-1].endswith("it has no tokenizer.json")
    assert not any("Traceback" in line for line in lines)


@pytest.mark.slow
def test_a_port_in_use_is_one_line(tokenizer_dir: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, lines = wrong_start(tmp_path, "--model-path", str(tokenizer_dir), "--port", port)
    assert status == os.EX_TEMPFAIL, "systemd tries again, which it does not after status 2"
    reason = "Address already in use; choose another --port or --host"
    assert lines[-1] == f"eagle_server: error: cannot listen on 127.0.0.1:{port}: {reason}"
    assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize(
    ("host", "status"),
    [("192.0.2.1", os.EX_TEMPFAIL), ("no.such.host.invalid:", 2)],
    ids=["an address that is not up", "no address"],
)
@pytest.mark.slow
def test_a_wrong_address_is_one_line(tokenizer_dir: Path, tmp_path: Path, host: str, status: int) -> None:
    found, lines = wrong_start(tmp_path, "--model-path", str(tokenizer_dir), "--host", host)
    assert found == status
    assert lines[-1].startswith(f"eagle_server: error: cannot listen on {host}:")
    assert not any("Traceback" in line for line in lines)


def test_a_file_for_the_url_that_cannot_be_written_is_named(tokenizer_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "no" / "such"
    status, lines = wrong_start(tmp_path, "--model-path", str(tokenizer_dir), "--url-file", str(file))
    assert status == 2
    assert lines[-1] == f"eagle_server: error: --url-file {file} cannot be written: No such file or directory"


def test_only_what_may_go_away_by_itself_is_temporary(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listen("unused", 1, str(path)), pytest.raises(OSError, match="another server listens there") as busy:
        listen("unused", 1, str(path))
    assert busy.value.errno in TEMPORARY_ERRORS
    with pytest.raises(OSError, match="cannot listen on --uds") as wrong:
        listen("unused", 1, str(tmp_path / "no" / "such"))
    assert not {wrong.value.errno, errno.EACCES, errno.EPERM} & {*TEMPORARY_ERRORS}


def test_too_few_files_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (24, 24))
    with pytest.raises(OSError, match="only 24 files") as refused:
        listen("127.0.0.1", 0)
    assert refused.value.strerror is not None
    assert "\n" not in refused.value.strerror
    assert refused.value.errno not in TEMPORARY_ERRORS


def test_the_api_process_imports_neither_torch_nor_transformers(tokenizer_dir: Path) -> None:
    code = (
        "import sys; import eagle_server.__main__; from eagle_server.text.tokenizer import load_tokenizer;"
        f"load_tokenizer({str(tokenizer_dir)!r});"
        "heavy = ('torch', 'transformers', 'numpy', 'eagle_server.engine.assembly.from_config');"
        "print([m for m in heavy if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_every_address_means_those_of_ipv4_too(host: str) -> None:
    with listen("::", 0) as listener, socket.create_connection((host, listener.getsockname()[1])):
        listener.accept()[0].close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_token_never_waits_for_the_acknowledgement_of_the_one_before(host: str) -> None:
    with listen(host, 0) as listener, socket.create_connection(listener.getsockname()[:2]):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
