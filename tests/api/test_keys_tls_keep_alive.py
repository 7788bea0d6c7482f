"""Several API keys, HTTPS, and comments that keep quiet streams alive."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from eagle_server.api import health
from eagle_server.api.connection import COMMENT
from eagle_server.api.guard.keys import ApiKeys
from eagle_server.api.guard.rate_limits import ClientLimits
from eagle_server.api.server import HttpServer
from eagle_server.client.client import EngineClient
from eagle_server.config import parse_args
from tests.api.conftest import PATIENCE, Certificate, Server, http_client, start_server
from tests.api.fake_engine import DEAD_END, SLOW, STALL
from tests.api.servers import wait_until_idle


def started(tokenizer_dir: Path, log: Path, *flags: str) -> Server:
    return start_server(log, "--model-path", str(tokenizer_dir), "--served-model-name", "fake", *flags)


def ended(server: Server) -> None:
    if server.process.poll() is None:
        server.process.kill()
    server.process.wait(timeout=PATIENCE)


def test_every_key_of_option_and_file_opens_the_server(tokenizer_dir: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# the team\nkey-a1\n\n  key-b2  \n")
    server = started(tokenizer_dir, tmp_path / "log", "--api-key", "key-c3", "--api-key-file", str(keys))
    try:
        server.wait_ready()
        for key, status in {
            "key-a1": 200,
            "key-b2": 200,
            "key-c3": 200,
            "# the team": 401,
            "": 401,
            "key-a": 401,
        }.items():
            answer = httpx.get(f"{server.url}/v1/models", headers={"authorization": f"Bearer {key}".strip()})
            assert answer.status_code == status, key
            answer = httpx.get(f"{server.url}/v1/models", headers={"x-api-key": key})
            assert answer.status_code == status, key
        refused = httpx.post(f"{server.url}/v1/messages", headers={"x-api-key": "key-a"}).json()
        assert (refused["type"], refused["error"]["type"]) == ("error", "authentication_error")
        info = httpx.get(f"{server.url}/v1/server_info", headers={"authorization": "Bearer key-a1"}).text
        assert not any(secret in info for secret in ("key-b2", "key-c3"))
        assert "key-c3" not in server.log.read_text()
    finally:
        ended(server)


def test_a_file_without_keys_is_refused(tokenizer_dir: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# nothing yet\n")
    server = started(tokenizer_dir, tmp_path / "log", "--api-key-file", str(keys))
    assert server.process.wait(timeout=PATIENCE) == 2
    assert "there is no key in it" in server.log.read_text().splitlines()[-1]


@pytest.mark.parametrize("flag", ["--ssl-keyfile", "--ssl-keyfile-password"])
def test_a_key_without_a_certificate_is_refused(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "key").write_text("x")
    with pytest.raises(SystemExit):
        parse_args([flag, str(tmp_path / "key")], environ={})
    assert f"{flag} needs --ssl-certfile" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("certificate",), "--ssl-certfile certificate: there is no private key in it; name its file with --ssl-keyf"),
        (("key",), "--ssl-certfile key: there is no certificate (PEM) in it"),
        (("key", "certificate"), "--ssl-certfile key: there is no certificate (PEM) in it"),
        (("certificate", "certificate"), "--ssl-keyfile certificate: there is no private key (PEM) in it"),
    ],
    ids=["no key", "no certificate", "exchanged", "the certificate twice"],
)
def test_a_missing_part_of_the_certificate_is_named(
    files: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("certificate").write_text("-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n")
    Path("key").write_text("-----BEGIN PRIVATE KEY-----\nMAA=\n-----END PRIVATE KEY-----\n")
    with pytest.raises(ValueError, match=re.escape(message)):
        HttpServer(FastAPI(), **dict(zip(("ssl_certfile", "ssl_keyfile"), files, strict=False)))


def test_https(tokenizer_dir: Path, tmp_path: Path, certificate: Certificate) -> None:
    flags = ["--ssl-certfile", str(certificate.file), "--ssl-keyfile", str(certificate.key)]
    wrong = started(tokenizer_dir, tmp_path / "wrong", *flags, "--ssl-keyfile-password", "other")
    assert wrong.process.wait(timeout=PATIENCE) == 2
    assert "--ssl-certfile, --ssl-keyfile" in wrong.log.read_text().splitlines()[-1]
    file = tmp_path / "url"
    flags += ["--url-file", str(file)]
    server = started(tokenizer_dir, tmp_path / "log", *flags, "--ssl-keyfile-password", certificate.password)
    url = server.url.replace("http://", "https://")
    try:
        with httpx.Client(verify=certificate.trusted, timeout=PATIENCE) as client:
            while server.process.poll() is None:
                try:
                    if client.get(f"{url}/health").status_code == 200:
                        break
                except httpx.TransportError:
                    continue
            body = {"prompt": "abc", "max_tokens": 5, "stream": True}
            text = client.post(f"{url}/v1/completions", json=body).text
            assert text.endswith("data: [DONE]\n\n")
        assert file.read_text() == f"{url}\n"
        assert health.main(str(file)) == 0, "the check does not ask for a certificate of a loopback address"
        assert f"serving fake on {url}" in server.log.read_text()
        assert f'"{certificate.password}"' not in server.log.read_text()
        assert server.stop() == 0
        assert health.main(str(file)) == 1
    finally:
        ended(server)


def test_the_health_check_of_an_image_follows_a_flag_for_the_port(tokenizer_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "url"
    command = [sys.executable, "-m", "eagle_server.api.health", str(file)]
    before = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (before.returncode, before.stderr.count("\n")) == (1, 1), before.stderr
    server = started(tokenizer_dir, tmp_path / "log", "--url-file", str(file), "--host", "0.0.0.0")
    try:
        server.wait_ready()
        assert file.read_text() == f"{server.url}\n"
        healthy = subprocess.run(command, capture_output=True, text=True, check=False)
        assert healthy.returncode == 0, healthy.stderr
    finally:
        ended(server)


@pytest.fixture(scope="module")
def impatient(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """A server whose streams send a comment after 20 ms."""
    server = started(tokenizer_dir, tmp_path_factory.mktemp("impatient") / "log", "--sse-keep-alive", "0.02")
    server.wait_ready()
    return server


@pytest.fixture(scope="module", autouse=True)
def _stop_it(impatient: Server) -> object:
    yield
    ended(impatient)


def test_a_quiet_stream_has_comments_between_its_events(impatient: Server) -> None:
    body = {"prompt": f"ab{SLOW}", "max_tokens": 6, "stream": True}
    text = httpx.post(f"{impatient.url}/v1/completions", json=body, timeout=PATIENCE).content
    parts = text.split(b"\n\n")
    assert parts[-2:] == [b"data: [DONE]", b""]
    assert parts.count(COMMENT.strip()) >= 3
    events = [json.loads(part[6:]) for part in parts if part.startswith(b"data: {")]
    assert len("".join(event["choices"][0]["text"] for event in events)) == 6


def test_a_response_begins_before_its_first_token(impatient: Server) -> None:
    body = {"prompt": f"ab{STALL}", "max_tokens": 6, "stream": True}
    with httpx.stream("POST", f"{impatient.url}/v1/completions", json=body, timeout=PATIENCE) as response:
        assert response.status_code == 200
        received = b""
        for chunk in response.iter_raw():
            received += chunk
            if received.count(COMMENT) >= 3:
                break
        assert received == COMMENT * received.count(COMMENT)
    wait_until_idle(impatient)  # the client's leaving ends the request


def test_an_error_after_the_beginning_is_an_event(impatient: Server) -> None:
    body = {"prompt": f"ab{STALL}", "max_tokens": 6, "stream": True, "timeout": 0.2}
    text = httpx.post(f"{impatient.url}/v1/completions", json=body, timeout=PATIENCE).text
    last = [part for part in text.split("\n\n") if part.startswith("data: ")]
    assert last[-1] == "data: [DONE]"
    assert json.loads(last[0][6:])["error"]["code"] == "timeout" or "error" in json.loads(last[0][6:])


def test_an_error_at_once_still_is_a_status(impatient: Server) -> None:
    refused = {"prompt": "", "stream": True}
    assert httpx.post(f"{impatient.url}/v1/completions", json=refused).status_code == 400
    dead = {"prompt": f"ab{DEAD_END}", "max_tokens": 6, "stream": True}
    assert httpx.post(f"{impatient.url}/v1/completions", json=dead, timeout=PATIENCE).status_code in (200, 400)


def test_a_name_without_a_key_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice:key-a\n")
    keys = ApiKeys(None, str(file), ClientLimits)
    file.write_text("bob:key-b\nalice: \n")
    with pytest.raises(ValueError, match="line 2 has the name alice, and no key after the colon"):
        keys.load()
    assert keys.find({"authorization": "Bearer alice:"}) is keys.find({"authorization": "Bearer key-b"}) is None
    assert keys.find({"authorization": "Bearer key-a"}) is not None, "of a file that is wrong nothing is taken"


async def test_a_request_that_needs_no_key_belongs_to_nobody(
    tokenizer_dir: Path, engine_client: EngineClient, running: None, caplog: pytest.LogCaptureFixture
) -> None:
    config = parse_args(["--model-path", str(tokenizer_dir), "--api-key", "secret"], environ={})
    with caplog.at_level("DEBUG"):
        async with http_client(config, engine_client, tokenizer_dir) as http:
            for path in ("/", "/health_generate"):
                assert (await http.get(path)).status_code == 200
            pages = [await http.get("/metrics")]
            await http.post("/v1/completions", json={"prompt": "a"}, headers={"x-api-key": "secret"})
            pages.append(await http.get("/metrics"))
    lines = [message for message in caplog.messages if " in " in message]
    assert ["key api-key" in line for line in lines if "GET" in line] == [False] * 4
    assert ["key_tokens" in page.text for page in pages] == [False, True]


def test_keys_have_names_and_are_read_again(tokenizer_dir: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice:key-a\nalice:key-b\nplain\nkey-c\n")
    flags = ("--api-key-file", str(keys), "--max-concurrent-requests-per-key", "1")
    server = started(tokenizer_dir, tmp_path / "log", *flags)
    path = f"{server.url}/v1/completions"

    def status(key: str, scheme: str = "Bearer") -> int:
        headers = {"authorization": f"{scheme} {key}"}
        return httpx.post(path, json={"prompt": "abc", "max_tokens": 3}, headers=headers).status_code

    def until(line: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while line not in server.log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    try:
        server.wait_ready()
        assert [status(key) for key in ("key-a", "key-b", "key-c", "plain")] == [200] * 4
        assert [status(key) for key in ("alice:key-a", "alice", "key-")] == [401] * 3
        assert status("key-a", "bearer") == 200
        until("output tokens, key alice")
        body, headers = {"prompt": SLOW + "abc" * 20, "max_tokens": 60, "stream": True}, {"x-api-key": "key-a"}
        with httpx.stream("POST", path, json=body, headers=headers, timeout=PATIENCE) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert (status("key-b"), status("key-c")) == (429, 200), "the keys of one name share its limits"
            keys.write_text("bob:key-d\n")
            for pid in server.engine_pids():  # a terminal, or an init, signals the whole group
                os.kill(pid, signal.SIGHUP)
            server.process.send_signal(signal.SIGHUP)
            until("1 API keys of bob")
            assert [status(key) for key in ("key-a", "key-d")] == [401, 200]
            assert [line for line in lines if line][-1] == "data: [DONE]", "what runs is left alone"
        keys.write_text("x:key-d\ny:key-d\n")
        server.process.send_signal(signal.SIGHUP)
        until("the API keys stay as they are")
        assert "line 2 has a key that an earlier line has" in server.log.read_text()
        assert "the engine died" not in server.log.read_text()
        assert "line 1 is read as name:key, and the key of alice is short" in server.log.read_text()
        assert status("key-d") == 200
        assert httpx.get(f"{server.url}/nothing/here", headers={"x-api-key": "key-d"}).status_code == 404
        answers, tokens = Counter[tuple[str, ...]](), Counter[str]()
        for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text):
            for sample in family.samples:
                if sample.name == "eagle_server_http_responses_total":
                    answers[sample.labels["path"], sample.labels["method"], sample.labels["status"]] += sample.value
                elif sample.name == "eagle_server_api_key_tokens_total":
                    tokens[sample.labels["key"]] += sample.value
        counts = {status: answers["/v1/completions", "POST", status] for status in ("200", "401", "429")}
        assert counts == {"200": 9, "401": 4, "429": 1}
        assert answers["other", "GET", "404"] == 1
        assert set(tokens) == {"alice", "key-3", "key-4", "bob", "x"} - {"x"} and min(tokens.values()) > 0
        assert not any(key in server.log.read_text() for key in ("key-a", "key-b", "key-d"))
    finally:
        ended(server)
