"""deploy/ray under a Ray of its own, on this machine: `serve run`, replicas that die, more of them under load."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from eagle_server.config import parse_args
from eagle_tools.bench.servers import running

pytest.importorskip("ray.serve", reason="pip install -e '.[ray]'")

from deploy.ray.application import OWN, app, deployment_options

pytestmark = [pytest.mark.third_party, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
REPLICA = "ray::ServeReplica:default:eagle-server"
FLAGS = ("--cpu-threads=1", "--max-running-requests=6")
TWO = ("min-replicas=2", "max-replicas=2", "routing=session", *(flag.removeprefix("--") for flag in FLAGS))
OPTIONS = [flag.removeprefix("--") for flag in FLAGS]
START = 300.0  # seconds: Ray starts a dozen processes, which takes minutes where others keep the cores busy
OBJECT_STORE = f"--object-store-memory={100 << 20}"
BODY = {"prompt": "def fibonacci(n):\n", "max_tokens": 24, "temperature": 0}


def free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def post(port: int, body: dict, timeout: float = 60, **headers: str) -> dict:
    data, url = json.dumps(body).encode(), f"http://127.0.0.1:{port}/v1/completions"
    request = urllib.request.Request(url, data, {"content-type": "application/json"} | headers)
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return json.load(response)


@dataclass(frozen=True)
class Cluster:
    """A Ray of this test. `session` is a word in the command lines of its raylet."""

    port: int
    session: str
    deploy: Callable[..., subprocess.Popen[bytes]]  # the application with these arguments; ends when it is up

    def replicas(self) -> set[int]:
        """The processes of the replicas: children of the raylet of this session."""
        found = {pid: parent for pid, parent in _parents().items() if _command(pid).startswith(REPLICA)}
        return {pid for pid, parent in found.items() if self.session in _command(parent)}

    def await_replicas(self, wanted: int, other_than: frozenset[int] = frozenset(), seconds: float = START) -> set[int]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if len(found := self.replicas() - other_than) >= wanted:
                return found
            time.sleep(0.5)
        raise AssertionError(f"{self.replicas()}: not {wanted} replicas besides {set(other_than)} in {seconds:g} s")

    def await_end(self, replicas: set[int], seconds: float = START) -> None:
        deadline = time.monotonic() + seconds
        while left := self.replicas() & replicas:
            assert time.monotonic() < deadline, f"{left} are still there"
            time.sleep(0.5)


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def _parents() -> dict[int, int]:
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def _of(folder: Path) -> set[int]:
    """All processes of this Ray: those with its folder in their command lines, and what they started."""
    parents = _parents()
    own = {pid for pid in parents if str(folder) in _command(pid)}
    while more := {pid for pid, parent in parents.items() if parent in own} - own:
        own |= more
    return own


@contextmanager
def cluster(*arguments: str) -> Iterator[Cluster]:
    """Ray with the application, on ports of its own. All of its processes are killed at the end."""
    ports = free_ports(9)
    names = ("port", "ray-client-server-port", "node-manager-port", "object-manager-port", "runtime-env-agent-port")
    names += ("dashboard-agent-listen-port", "dashboard-agent-grpc-port", "metrics-export-port")
    bin_folder = Path(sys.executable).parent
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # short: paths of sockets have at most 107 bytes
    environ = os.environ | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    head = [bin_folder / "ray", "start", "--head", "--block", f"--temp-dir={folder}", "--num-cpus=4"]
    head += ["--min-worker-port=0", "--max-worker-port=0", "--include-dashboard=false", OBJECT_STORE]
    head += [f"--{name}={port}" for name, port in zip(names, ports, strict=False)]
    address, log = f"127.0.0.1:{ports[0]}", folder.with_suffix(".log")
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str | Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            process = subprocess.Popen([*map(str, words)], cwd=ROOT, env=environ, stdout=output, stderr=output)
        started.append(process)
        return process

    try:
        start(*head)
        _await(lambda: socket.create_connection(("127.0.0.1", ports[0]), 1).close(), log)
        options = ["--address", address, "--http-port", str(ports[-1])]
        assert start(bin_folder / "serve", "start", *options).wait(START) == 0, log.read_text()
        deploy = partial(start, bin_folder / "serve", "run", "--non-blocking", "--address", address, "deploy.ray:app")
        assert deploy(*arguments).wait(START) == 0, log.read_text()[-4000:]  # all replicas serve
        found = Cluster(ports[-1], str(folder), deploy)
        _await(lambda: post(found.port, BODY, timeout=20), log)
        yield found
    finally:
        for pid in _of(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in started:
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)
        log.unlink(missing_ok=True)


def _await(attempt: Callable[[], object], log: Path | None = None, seconds: float = START) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            attempt()
        except (OSError, urllib.error.URLError):
            assert time.monotonic() < deadline, log.read_text()[-4000:] if log else ""
            time.sleep(0.5)
        else:
            return


@pytest.fixture(scope="module")
def two_replicas() -> Iterator[Cluster]:
    with cluster(*TWO) as ray:
        yield ray


def texts(port: int, count: int = 12) -> list[str]:
    """Greedy and seeded answers to different prompts, asked all at once."""

    def ask(number: int) -> str:
        body = BODY | {"prompt": f"def f{number}(x):\n", "temperature": float(number % 2), "seed": number}
        return post(port, body)["choices"][0]["text"]

    with ThreadPoolExecutor(count) as clients:
        return list(clients.map(ask, range(count)))


@pytest.fixture(scope="module")
def alone() -> list[str]:
    """The texts of a single server."""
    with running("alone", FLAGS) as server:
        return texts(server.port)


@contextmanager
def load(port: int, clients: int, **parameters: object) -> Iterator[list[bool]]:
    """Clients that ask again and again: whether each answer came. Every error must be one that may be retried."""
    results, ending = list[bool](), threading.Event()

    def client() -> None:
        while not ending.is_set():
            try:
                post(port, BODY | parameters)
                results.append(True)
            except urllib.error.HTTPError as error:
                assert error.code >= 500
                results.append(False)
            except OSError:  # the connection broke, or nothing came for a minute
                results.append(False)

    with ThreadPoolExecutor(clients) as pool:
        running_clients = [pool.submit(client) for _ in range(clients)]
        try:
            yield results
        finally:
            ending.set()
        for each in running_clients:
            each.result()


@pytest.mark.long
def test_load_adds_a_replica_with_the_same_texts(alone):
    with cluster("max-replicas=2", *OPTIONS) as ray:
        assert len(ray.await_replicas(1)) == 1
        with load(ray.port, 12, max_tokens=400, ignore_eos=True):
            ray.await_replicas(2)
        assert texts(ray.port) == alone


def test_two_replicas_answer_as_one_server_does(alone, two_replicas):
    two_replicas.await_replicas(2)
    assert texts(two_replicas.port) == alone


def test_a_stream_comes_through_the_proxy_event_by_event(two_replicas):
    connection = http.client.HTTPConnection("127.0.0.1", two_replicas.port, timeout=60)
    body = json.dumps(BODY | {"stream": True, "max_tokens": 64})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    pieces, times = list[str](), list[float]()
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            pieces.append(json.loads(line[6:])["choices"][0]["text"])
            times.append(time.perf_counter())
    connection.close()
    assert "".join(pieces) == post(two_replicas.port, BODY | {"max_tokens": 64})["choices"][0]["text"]
    assert len({round(each, 3) for each in times}) > 3, "not all at the end"


def test_a_session_stays_with_its_replica_and_sessions_spread(two_replicas):
    two_replicas.await_replicas(2)

    def ask(number: int, session: str) -> int:
        body = {"prompt": f"# session {number}\n" + BODY["prompt"] * 8, "max_tokens": 1}
        usage = post(two_replicas.port, body, **{"x-session-id": session})["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    first = [ask(number, f"s{number}") for number in range(12)]
    again = [ask(number, f"s{number}") for number in range(12)]
    others = [ask(number, f"t{number}") for number in range(12)]
    assert min(again) > 2 * max(first), "its prompt is where the session is"
    assert min(others) < min(again) <= max(others), "other sessions go to either replica"


@pytest.mark.long
def test_a_redeployment_loses_no_request(alone, two_replicas):
    first = two_replicas.await_replicas(2)
    with load(two_replicas.port, 3, max_tokens=300, ignore_eos=True) as results:
        assert two_replicas.deploy(*TWO, "chunked-prefill-size=256").wait(START) == 0
        two_replicas.await_end(first)
    assert len(results) > 3
    assert all(results)
    assert texts(two_replicas.port) == alone


def test_a_killed_replica_is_replaced_while_the_other_one_answers(alone, two_replicas):
    first = two_replicas.await_replicas(2)
    with load(two_replicas.port, 3, max_tokens=64) as results:
        os.kill(min(first), signal.SIGKILL)
        two_replicas.await_replicas(2, frozenset({min(first)}))
    assert results.count(True) > results.count(False)
    assert texts(two_replicas.port) == alone


@pytest.mark.long
def test_a_replica_ends_with_its_engine_and_is_replaced(alone, two_replicas):
    assert two_replicas.deploy(*TWO).wait(START) == 0  # both serve
    first = two_replicas.await_replicas(2)
    (engine,) = (pid for pid, parent in _parents().items() if parent == min(first) and "spawn_main" in _command(pid))
    with load(two_replicas.port, 3, max_tokens=64) as results:
        os.kill(engine, signal.SIGKILL)
        two_replicas.await_replicas(2, frozenset({min(first)}))
    assert True in results[-3:], "the other replica answers"
    _await(lambda: texts(two_replicas.port))
    assert texts(two_replicas.port) == alone


@pytest.mark.long
def test_a_hung_replica_is_replaced(alone, two_replicas):
    first = two_replicas.await_replicas(2)
    os.kill(min(first), signal.SIGSTOP)
    try:
        two_replicas.await_replicas(2, frozenset({min(first)}))
    finally:
        with suppress(ProcessLookupError):
            os.kill(min(first), signal.SIGCONT)
    _await(lambda: post(two_replicas.port, BODY, timeout=20))
    assert texts(two_replicas.port) == alone


def test_a_replica_gets_its_gpus_on_one_node_and_as_many_requests_as_it_runs():
    config = parse_args(["--tp-size=4", "--max-running-requests=30"], environ={})
    options = deployment_options(config, OWN | {"gpus": "4", "cpus": "8", "max-replicas": "3"})
    assert options["placement_group_bundles"] == [{"CPU": 8, "GPU": 4}]
    assert options["ray_actor_options"] == {"num_cpus": 8, "num_gpus": 4}
    scaling = options["autoscaling_config"]
    assert (scaling.max_replicas, scaling.target_ongoing_requests) == (3, 20)
    assert options["max_ongoing_requests"] == 60


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"port": "8000"}, "Serve's proxy listens"),
        ({"routing": "magic"}, "should be balanced or session"),
        ({"max-runing-requests": "3"}, "--max-runing-requests"),
    ],
)
def test_a_wrong_argument_is_named(wrong, reason):
    with pytest.raises(ValueError, match=reason) as error:
        app(wrong)
    assert "\n" not in str(error.value)
