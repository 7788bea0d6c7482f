"""Routers in front of several servers: existing programs from PyPI, unmodified."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from eagle_tools.bench.servers import BenchError, Server, free_port, started

MODULES = {"sglang-router": "sglang_router", "vllm-router": "vllm_router"}
# A worker gets no requests after three failures in a row or two failed probes, and is tried again after some seconds.
# By default these routers probe once a minute, and leave a worker alone for a minute after ten failures.
FAILOVER = (
    "--health-check-interval-secs 2 --health-check-timeout-secs 2 --health-failure-threshold 2 "
    "--health-success-threshold 1 --cb-failure-threshold 3 --cb-success-threshold 1 --cb-timeout-duration-secs 3"
)


def is_installed(router: str) -> bool:
    return importlib.util.find_spec(MODULES[router]) is not None


def require(router: str) -> None:
    """
    Raises:
        BenchError: the router is not installed.
    """
    if not is_installed(router):
        raise BenchError(f"{router} is not installed: pip install -e '.[routers]'")


def command_of(router: str, port: int, metrics_port: int, workers: Sequence[str]) -> list[str]:
    """The command that runs a router on 127.0.0.1 in front of workers' URLs."""
    ports = ["--port", str(port), "--prometheus-port", str(metrics_port)]
    hosts = ["--host", "127.0.0.1", "--prometheus-host", "127.0.0.1"]
    launch = [sys.executable, "-m", f"{MODULES[router]}.launch_router"]
    return [*launch, "--worker-urls", *workers, *hosts, *ports, *FAILOVER.split()]


@contextmanager
def routing(router: str, workers: Sequence[Server], flags: Sequence[str]) -> Iterator[Server]:
    """Run a router in front of the workers, which must serve, until the end of the block.

    Raises:
        BenchError: it does not start.
    """
    port = free_port()
    urls = [f"http://127.0.0.1:{worker.port}" for worker in workers]
    command = [*command_of(router, port, free_port(), urls), *flags]
    with started(router, command, port, lambda up: up.get("/readiness")["healthy_workers"] == len(workers)) as up:
        yield up
