"""Several servers of the demo behind a router, which tests kill, stop and start again."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from eagle_tools.bench.routers import command_of
from tests.e2e.conftest import Served, free_port, start, until_healthy

PATIENCE = 60  # seconds
LOGGED = re.compile(r" (GET|POST) (\S+) (\d{3}) in ")  # lines of the access log


class Worker:
    """A server of the demo that keeps its port when it is started again."""

    def __init__(self, log: Path, *flags: str) -> None:
        self._log, self._flags, self._port = log, flags, free_port()
        self.served: Served | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self.served is not None
        return self.served.process

    @property
    def is_running(self) -> bool:
        return self.served is not None and self.process.poll() is None

    def start(self) -> None:
        """Start it, without waiting until it serves."""
        self.served = start(self._log, *self._flags, port=self._port)

    def wait(self) -> None:
        assert self.served is not None
        until_healthy(self.served)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def requests(self) -> list[tuple[str, str, int]]:
        """Method, path and status of all requests that it has answered since its last start."""
        return [(method, path, int(status)) for method, path, status in LOGGED.findall(self._log.read_text())]

    def completions(self) -> int:
        return sum(path == "/v1/completions" for _, path, _ in self.requests())

    def complete(self, **body: Any) -> dict[str, Any]:
        """Its own answer, past the router."""
        answer: dict[str, Any] = httpx.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE).json()
        return answer


class Fleet:
    """Workers and a router in front of the first `routed` of them."""

    def __init__(self, router: str, url: str, workers: list[Worker], routed: int) -> None:
        self.router, self.url, self.workers, self._routed = router, url, workers, routed

    def heal(self) -> None:
        """Start the workers that do not run, and wait until the router sends requests to all that it knows."""
        stopped = [worker for worker in self.workers if not worker.is_running]
        for worker in stopped:
            worker.start()
        for worker in stopped:
            worker.wait()
        self.until(lambda: self.healthy() == self._routed)

    def healthy(self) -> int:
        with suppress(httpx.TransportError):
            return int(httpx.get(f"{self.url}/readiness", timeout=PATIENCE).json().get("healthy_workers", 0))
        return 0

    def add(self, worker: Worker) -> None:
        """Tell the router about a worker."""
        if self.router == "sglang-router":
            answer = httpx.post(f"{self.url}/workers", json={"url": worker.url}, timeout=PATIENCE)
        else:
            answer = httpx.post(f"{self.url}/add_worker", params={"url": worker.url}, timeout=PATIENCE)
        assert answer.is_success, answer.text
        self._routed += 1
        self.until(lambda: self.healthy() == self._routed)

    def until(self, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not is_done():
            assert time.monotonic() < deadline, "nothing changed in time"
            time.sleep(0.05)


@contextmanager
def fleet_of(router: str, directory: Path, *flags: str, workers: int = 2, routed: int | None = None) -> Iterator[Fleet]:
    """Start workers and a router; stop them at the end."""
    up = [Worker(directory / f"{number}.log", *flags) for number in range(workers)]
    known = workers if routed is None else routed
    port, process = free_port(), None
    fleet = Fleet(router, f"http://127.0.0.1:{port}", up, known)
    try:
        for worker in up:
            worker.start()
        for worker in up:
            worker.wait()
        command = command_of(router, port, free_port(), [worker.url for worker in up[:known]])
        with (directory / "router.log").open("wb") as sink:
            process = subprocess.Popen(command, stdout=sink, stderr=sink)
        fleet.until(lambda: fleet.healthy() == known)
        yield fleet
    finally:
        for each in [process, *(worker.process for worker in up if worker.served is not None)]:
            if each is not None and each.poll() is None:
                each.kill()
                each.wait()
