"""python -m eagle_tools.bench.soak: many clients, some of which leave early; memory and KV must not grow.

With --attacks the attacks of `eagle_tools.bench.hostile` run meanwhile, so many at a time for ATTACK_SECONDS each. They
come from another address, and no answer of the clients may be wrong or refused for them.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any, Self

from eagle_tools import DEMO
from eagle_tools.bench.attacks import LOADS
from eagle_tools.bench.figures import save, subplots
from eagle_tools.bench.load import Leaving, Workload, ask
from eagle_tools.bench.rich_output import Console, Progress, Table
from eagle_tools.bench.servers import BenchError, Server, running

PROMPTS = DEMO / "prompts.json"
TEMPERATURES = (0.0, 0.7, 1.0)
IDLE_SECONDS = 60.0  # after the last answer, within which the engine must become idle
API_SECONDS = "eagle_server_api_seconds"
ENGINE_SECONDS = ("vllm:request_queue_time_seconds", "vllm:request_inference_time_seconds")
PAUSE = 0.01  # seconds, so that the server has finished the request for its metrics
ATTACK_SECONDS = 20.0
SOURCE = "127.0.0.2"  # the clients' address; attacks come from 127.0.0.1
WARM = 0.25  # share of the time; memory growth in it is caches and pools that fill
PARTS = 5  # of the rest; in 30 minutes each has all attacks


@dataclass
class Sample:
    """The server at one moment, `seconds` after the start."""

    seconds: float
    api_memory: int  # bytes resident
    engine_memory: int
    kv_used: int  # slots that are not free for other requests
    running: int
    waiting: int


@dataclass
class Record:
    """Results of the clients, and samples of the server. `first_tokens` is in seconds."""

    first_tokens: list[float] = field(default_factory=list)
    tokens: int = 0
    finished: int = 0
    left: int = 0
    errors: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    @property
    def memory(self) -> dict[str, list[int]]:
        """Resident bytes of each process, per sample."""
        return {"API": [s.api_memory for s in self.samples], "engine": [s.engine_memory for s in self.samples]}


class Soak:
    """`streams` clients of `server`. Each sends its next request when its last one has ended."""

    def __init__(
        self, server: Server, streams: int, requests: int | None, seconds: float | None, leaving: float
    ) -> None:
        self.server, self.streams, self.requests, self.seconds, self.leaving = (
            server,
            streams,
            requests,
            seconds,
            leaving,
        )
        self.record, self.started, self.start = Record(), 0, time.monotonic()
        self._lock = threading.Lock()
        self._prompts: list[str] = json.loads(PROMPTS.read_text())

    def run(self, progress: Progress) -> None:
        """Until the last client has its last answer. `record` has the results."""
        task = progress.add_task("soak", total=self.requests or self.seconds)
        clients = [threading.Thread(target=self._client, args=(number,)) for number in range(self.streams)]
        for client in clients:
            client.start()
        while any(client.is_alive() for client in clients):
            self.record.samples.append(self._sample())
            done = self.record.finished + self.record.left if self.requests else time.monotonic() - self.start
            progress.update(task, completed=done)
            time.sleep(0.5)

    def _client(self, number: int) -> None:
        chance = random.Random(number)
        while self._next():
            words = self._prompts[chance.randrange(len(self._prompts))]
            prompt = words[: chance.randrange(1, len(words) + 1)]
            workload = Workload(
                (prompt,), chance.randrange(1, 65), chance.choice(TEMPERATURES), chance.randrange(1 << 30)
            )
            leave_after = chance.randrange(1, 6) if chance.random() < self.leaving else None
            try:
                answer = ask(self.server, prompt, workload, leave_after)
            except Leaving:
                with self._lock:
                    self.record.left += 1
            except (OSError, ValueError, BenchError) as error:
                with self._lock:
                    self.record.errors.append(f"{type(error).__name__}: {error}")
            else:
                with self._lock:
                    self.record.finished += 1
                    self.record.tokens += answer.tokens
                    self.record.first_tokens.append(answer.first_token)

    def _next(self) -> bool:
        with self._lock:
            if self.requests is not None and self.started >= self.requests:
                return False
            if self.seconds is not None and time.monotonic() - self.start >= self.seconds:
                return False
            self.started += 1
            return True

    def _sample(self) -> Sample:
        stats = self.server.stats()
        used = stats["kv_slots_total"] - stats["kv_slots_free"]
        api, *engine = map(resident, family(self.server.process.pid) or [0])
        return Sample(time.monotonic() - self.start, api, sum(engine), used, stats["running"], stats["waiting"])

    def await_idle(self) -> None:
        """Until nothing runs or waits and all KV is free, or IDLE_SECONDS are over."""
        deadline = time.monotonic() + IDLE_SECONDS
        while time.monotonic() < deadline:
            self.record.samples.append(self._sample())
            last = self.record.samples[-1]
            if not (last.running or last.waiting or last.kv_used):
                return
            time.sleep(0.2)


class Attacks:
    """Processes that attack a server, `count` at a time, until the end of the `with` block."""

    def __init__(self, server: Server, count: int) -> None:
        self._server, self._count = server, count
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        names = cycle([name for name, load in LOADS.items() if load.baseline and load.server == "default"])
        running = deque[subprocess.Popen[str]]()
        while self._count and not self._ends.is_set():
            if len(running) == self._count:
                end(running.popleft())
            running.append(self._attack(next(names)))
            self._ends.wait(ATTACK_SECONDS / self._count)
        for process in running:
            end(process)

    def _attack(self, name: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "eagle_tools.bench.attacks", name, str(self._server.port)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def family(pid: int) -> list[int]:
    """A process and all its descendants, from Linux' /proc."""
    try:
        children = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    except OSError:  # the process has ended
        return []
    return [pid, *(process for child in children.split() for process in family(int(child)))]


def resident(pid: int) -> int:
    """Resident bytes of a process; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0)


def growth(seconds: Sequence[float], memory: Sequence[int]) -> float:
    """Growth in bytes per minute of what is never given back, without the first quarter of the time.

    By least squares over the smallest size in each of some parts: large bodies take memory for a while.
    """
    begin, end = WARM * seconds[-1], seconds[-1]
    least: dict[int, int] = {}
    for at, size in zip(seconds, memory, strict=True):
        if at >= begin and end > begin:
            part = min(PARTS - 1, int(PARTS * (at - begin) / (end - begin)))
            least[part] = min(size, least.get(part, size))
    if len(least) < 2:  # noqa: PLR2004  a line needs two points
        return 0.0
    slope, _ = statistics.linear_regression(list(least), list(least.values()))
    return slope / ((end - begin) / 60 / PARTS)


@dataclass(frozen=True)
class Added:
    """Seconds of one request outside the engine: in the API alone, and with the client and the messages."""

    api: float
    all: float


def overhead(server: Server, count: int) -> list[Added]:
    """The overhead of `count` requests, one at a time.

    Each streams one token over a persistent connection, as client libraries do.
    """
    body = json.dumps({"prompt": "def area(radius):\n", "max_tokens": 1, "temperature": 0, "stream": True})
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    added, before = [], _seconds(server)
    for _ in range(count):
        start = time.perf_counter()
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        connection.getresponse().read()
        elapsed = time.perf_counter() - start
        api, engine = _seconds(server)
        added.append(Added(api - before[0], elapsed - (engine - before[1])))
        before = api, engine
        time.sleep(PAUSE)
    connection.close()
    return added


def _seconds(server: Server) -> tuple[float, float]:
    """The seconds that API and engine have spent on all requests so far."""
    sums = dict(line.partition("{")[::2] for line in server.text("/metrics").splitlines() if "_seconds_sum{" in line)
    api, *engine = (float(sums[f"{name}_sum"].rpartition(" ")[2]) for name in (API_SECONDS, *ENGINE_SECONDS))
    return api, sum(engine)


def report(record: Record, seconds: float, added: Sequence[Added], console: Console) -> bool:
    """Print the table; returns whether everything succeeded."""
    last, times = record.samples[-1], [s.seconds for s in record.samples]
    firsts = sorted(record.first_tokens) or [float("nan")]
    middle, late = firsts[len(firsts) // 2], firsts[len(firsts) * 99 // 100]
    rows: dict[str, Any] = {
        "requests answered": record.finished,
        "left early by their clients": record.left,
        "errors": len(record.errors),
        "seconds": f"{seconds:.0f}",
        "tokens per second": f"{record.tokens / seconds:.0f}",
        "first token, median and 99th percentile": f"{middle:.2f} s, {late:.2f} s",
        "most running, waiting": f"{max(s.running for s in record.samples)}, {max(s.waiting for s in record.samples)}",
        **{
            f"memory of the {name}, growth of its lowest after the first quarter": (
                f"{sizes[-1] / 2**20:.0f} MiB, {growth(times, sizes) / 2**20:+.2f} MiB per minute"
            )
            for name, sizes in record.memory.items()
        },
        "KV slots in use at the end": last.kv_used,
        "added to an answer, median": (
            f"{statistics.median(sample.api for sample in added) * 1e3:.2f} ms by the API, "
            f"{statistics.median(sample.all for sample in added) * 1e3:.2f} with client and messages"
        ),
    }
    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(name, str(value))
    console.print(table)
    for error in record.errors[:5]:
        console.print(f"error: {error}")
    return not record.errors and not (last.running or last.waiting or last.kv_used)


def plot(record: Record, path: Path) -> None:
    """Memory, KV and load over time."""
    seconds = [s.seconds for s in record.samples]
    curves = {
        **{f"{name}, MiB": [size / 2**20 for size in sizes] for name, sizes in record.memory.items()},
        "KV slots in use": [s.kv_used for s in record.samples],
        "requests running": [s.running for s in record.samples],
        "requests waiting": [s.waiting for s in record.samples],
    }
    figure, axes = subplots(len(curves), 1, figsize=(8, 8), dpi=90, sharex=True)
    for axis, (name, values) in zip(axes, curves.items(), strict=True):
        axis.plot(seconds, values, linewidth=1)
        axis.set_ylabel(name)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("seconds")
    save(figure, path)


def main(argv: Sequence[str]) -> int:
    """Run it; returns 0, 1 if a request failed or KV or requests remain, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m eagle_tools.bench.soak", description=__doc__)
    parser.add_argument("--streams", type=int, default=256, help="clients at a time (256)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--requests", type=int, help="number of requests in total (2000)")
    length.add_argument("--minutes", type=float, help="duration, instead of a number of requests")
    parser.add_argument(
        "--leaving", type=float, default=0.2, help="share of requests whose client leaves within five events (0.2)"
    )
    parser.add_argument("--attacks", type=int, default=0, help="attacks at a time (0)")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="folder for JSON and PNG")
    parser.add_argument("server_flags", nargs="*", help="after --: flags of the server")
    arguments = parser.parse_args(argv)
    console = Console(width=96)
    requests = arguments.requests or (None if arguments.minutes else 2000)
    seconds = None if arguments.minutes is None else 60 * arguments.minutes
    try:
        with running("soak", arguments.server_flags) as server:
            added = overhead(server, 200)
            start = time.monotonic()
            clients = replace(server, source=SOURCE)
            soak = Soak(clients, arguments.streams, requests, seconds, arguments.leaving)
            with Progress(console=console) as progress, Attacks(server, arguments.attacks):
                soak.run(progress)
            elapsed, record = time.monotonic() - start, soak.record
            soak.await_idle()
    except (BenchError, OSError) as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2
    good = report(record, elapsed, added, console)
    arguments.out.mkdir(parents=True, exist_ok=True)
    values = {**vars(record), "samples": [vars(s) for s in record.samples], "added": [vars(sample) for sample in added]}
    (arguments.out / "soak.json").write_text(json.dumps(values))
    plot(record, arguments.out / "soak.png")
    console.print(f"written: {arguments.out / 'soak.json'}, {arguments.out / 'soak.png'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
