"""The API with a fake engine: in this process for most tests, as a server process for tests about processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from eagle_server.api.app import create_app
from eagle_server.client.client import EngineClient
from eagle_server.config import Config, parse_args
from eagle_server.request import Abort, Deltas, FlushCache, Inbound, Request
from eagle_server.text.chat_template_files import load_chat_template
from eagle_server.text.tokenizer import load_tokenizer
from eagle_server.worker.worker import do_nothing
from tests.api.fake_engine import FakeEngine, byte_tokenizer

REPOSITORY = Path(__file__).parents[2]
PATIENCE = 60  # seconds; even on a busy machine only a hang takes this long


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


@dataclass(frozen=True)
class Certificate:
    """Of 127.0.0.1, and its encrypted key."""

    file: Path
    key: Path
    password: str

    @property
    def trusted(self) -> ssl.SSLContext:
        """For clients."""
        return ssl.create_default_context(cafile=self.file)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl on the PATH")
    folder = tmp_path_factory.mktemp("certificate")
    made = Certificate(folder / "certificate.pem", folder / "key.pem", "word")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    files = ["-keyout", str(made.key), "-out", str(made.file), "-passout", f"pass:{made.password}"]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", *subject, *files], check=True, capture_output=True
    )
    return made


@pytest.fixture(scope="session")
def config(tokenizer_dir: Path) -> Config:
    return parse_args(["--model-path", str(tokenizer_dir), "--served-model-name", "fake"], environ={})


@dataclass
class LocalEngine:
    """Drives a fake engine from a task of this event loop."""

    engine: FakeEngine
    client: EngineClient
    inbox: list[Inbound] = field(default_factory=list)

    async def run(self) -> None:
        self.client.attach(self.inbox.append, self.engine.ready())
        self.client.dispatch(Deltas([], self.engine.stats()))
        while True:
            await asyncio.sleep(0 if self.engine.has_work() else 0.001)
            for message in self.inbox:
                match message:
                    case Request():
                        self.engine.add(message)
                    case Abort():
                        self.engine.abort(message.request_id)
                    case FlushCache():
                        self.client.flushed(self.engine.flush_cache())
            self.inbox.clear()
            deltas = self.engine.step(do_nothing) if self.engine.has_work() else []
            self.client.dispatch(Deltas(deltas, self.engine.stats(), self.engine.take_cycle()))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def engine_client() -> EngineClient:
    return EngineClient()


@pytest.fixture
async def running(engine: FakeEngine, engine_client: EngineClient) -> AsyncIterator[None]:
    task = asyncio.create_task(LocalEngine(engine, engine_client).run())
    await engine_client.until_available()
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def http_client(config: Config, engine_client: EngineClient, tokenizer_dir: Path) -> httpx.AsyncClient:
    tokenizer = load_tokenizer(str(tokenizer_dir))
    template = load_chat_template(str(tokenizer_dir), tokenizer, config.model.chat_template)
    app = create_app(config, engine_client, tokenizer, template)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


Templated = Callable[..., httpx.AsyncClient]


@pytest.fixture
def templated(tokenizer_dir: Path, tmp_path: Path, engine_client: EngineClient, running: None) -> Templated:
    """Makes a client of a server with this chat template and these other flags."""

    def make(template: str, *flags: str) -> httpx.AsyncClient:
        file = tmp_path / "template.jinja"
        file.write_text(template)
        served = ["--model-path", str(tokenizer_dir), "--served-model-name", "fake", "--chat-template", str(file)]
        return http_client(parse_args([*served, *flags], environ={}), engine_client, tokenizer_dir)

    return make


@pytest.fixture
async def http(
    config: Config, engine_client: EngineClient, tokenizer_dir: Path, running: None
) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(config, engine_client, tokenizer_dir) as client:
        yield client


@dataclass
class Server:
    """A server process."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def wait_ready(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=10).status_code == 200:
                    return
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"the server did not start:\n{self.log.read_text()}")

    def engine_pids(self) -> list[int]:
        """Children of the server that run the engine (multiprocessing keeps a helper process as well)."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
        return [pid for pid, command in commands.items() if b"spawn_main" in command]

    def stop(self, signal_number: int = signal.SIGTERM) -> int:
        self.process.send_signal(signal_number)
        return self.process.wait(timeout=PATIENCE)


def is_alive(pid: int) -> bool:
    """Whether a process runs. An ended process may stay as a zombie until its parent reads its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def start_server(
    log: Path,
    *flags: str,
    function: str = "build",
    module: str = "tests.api.fake_engine",
    environ: Mapping[str, str] | None = None,
) -> Server:
    """`function` of `module` builds the engine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = f"from tests.api.fake_engine import serve; serve({function!r}, {module!r})"
    with log.open("w") as sink:
        process = subprocess.Popen(
            [sys.executable, "-c", code, "--port", str(port), *flags],
            stderr=sink,
            stdout=sink,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environ or {})},
        )
    return Server(process, f"http://127.0.0.1:{port}", log)


@contextlib.contextmanager
def serving(tokenizer_dir: Path, log: Path, environ: Mapping[str, str] | None = None) -> Iterator[Server]:
    flags = ("--model-path", str(tokenizer_dir), "--served-model-name", "fake")
    with kept_running(start_server(log, *flags, environ=environ)) as server:
        yield server


@contextlib.contextmanager
def kept_running(server: Server) -> Iterator[Server]:
    """A server that was started: once it is ready, until the end of the block."""
    try:
        server.wait_ready()
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait(timeout=PATIENCE)


@pytest.fixture(scope="session")
def server(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that tests share. No test may kill its engine."""
    with serving(tokenizer_dir, tmp_path_factory.mktemp("server") / "log") as running_server:
        yield running_server
