"""The embedded demo, as an engine in this process and as a server that a user starts."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer

from eagle_server.config import DEMO_TARGET, parse_args
from eagle_server.engine.assembly.from_config import build_engine
from eagle_server.engine.engine import Engine
from tests.support.engines import FIXED_TREES

REPOSITORY = Path(__file__).parents[2]
PROMPTS: list[str] = json.loads((DEMO_TARGET.parent / "prompts.json").read_text())
PROGRAM = (sys.executable, "-m", "eagle_server")
README_FLAGS = ["--speculative-num-steps", "3", "--topk", "4"]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))


def demo_engine(*flags: str) -> Engine:
    """The demo's engine, built as `python -m eagle_server` builds it with these flags."""
    return build_engine(parse_args([*flags], environ={}), progress=False)


@dataclass(frozen=True)
class Served:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The server of the README's command. Its trees do not follow the load: that of other tests would decide."""
    with serving(tmp_path_factory.mktemp("served") / "log", *README_FLAGS, *FIXED_TREES) as up:
        yield up


def start(log: Path, *flags: str, port: int | None = None, program: Sequence[str] = PROGRAM) -> Served:
    """Start the demo's server, on a free port if none is given. It does not serve yet."""
    port = port or free_port()
    command = [*program, "--port", str(port), *flags]
    environment = {**os.environ, "EAGLE_SERVER_CPU_THREADS": "1"}  # other tests run on the other cores
    with log.open("wb") as sink:
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=sink, stderr=sink, env=environment)
    return Served(f"http://127.0.0.1:{port}", process, log)


@contextmanager
def serving(log: Path, *flags: str, program: Sequence[str] = PROGRAM) -> Iterator[Served]:
    """The demo's server on a free port. At the end it must exit cleanly on SIGTERM."""
    up = start(log, *flags, program=program)
    try:
        until_healthy(up)
        yield up
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(timeout=60) == 0, log.read_text()
    finally:
        if up.process.poll() is None:
            up.process.kill()
            up.process.wait()


def until_healthy(up: Served) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert up.process.poll() is None, up.log.read_text()
        try:
            if httpx.get(f"{up.url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"not healthy in time: {up.log.read_text()}")
