"""Runs a real Prometheus that scrapes one server twice a second."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

BINARY = shutil.which("prometheus")
PATIENCE = 60


@dataclass(frozen=True)
class Prometheus:
    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The current series of `expression`.

        Raises:
            AssertionError: the expression is not valid.
        """
        answer = httpx.post(f"{self.url}/api/v1/query", data={"query": expression}, timeout=30).json()
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        series: list[dict[str, Any]] = answer["data"]["result"]
        return series

    def until(self, expression: str) -> None:
        """Wait until `expression` has a series."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            with suppress(httpx.TransportError, AssertionError, ValueError):
                if self.query(expression):
                    return
            time.sleep(0.1)
        raise AssertionError(f"never: {expression}")


@contextmanager
def scraping(target: str, directory: Path, config: Path) -> Iterator[Prometheus]:
    """Prometheus with `config`, but with `target` (host:port) as its only target and a shorter scrape interval."""
    assert BINARY is not None
    content = yaml.safe_load(config.read_text())
    content["global"]["scrape_interval"] = "500ms"
    content["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    (directory / "prometheus.yml").write_text(yaml.safe_dump(content))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [
        BINARY,
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (directory / "log").open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink)
    try:
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE)
