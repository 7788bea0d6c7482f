"""Queries to a server process, and waiting until it is idle."""

from __future__ import annotations

import time
from typing import Any

import httpx

from tests.api.conftest import PATIENCE, Server, is_alive


def stats(server: Server) -> dict[str, Any]:
    engine: dict[str, Any] = httpx.get(f"{server.url}/v1/server_info").json()["engine"]
    assert engine["available"]
    return engine


def wait_until_idle(server: Server) -> None:
    deadline = time.monotonic() + PATIENCE
    while stats(server)["running"]:
        assert time.monotonic() < deadline, "requests are still running"
        time.sleep(0.02)
    assert httpx.get(f"{server.url}/v1/server_info").json()["active_requests"] == 0


def wait_for_running(server: Server, count: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while stats(server)["running"] != count:
        assert time.monotonic() < deadline, "the requests did not start"
        time.sleep(0.02)


def wait_until_draining(server: Server) -> None:
    deadline = time.monotonic() + PATIENCE
    while httpx.get(f"{server.url}/health", timeout=PATIENCE).status_code != 503:
        assert time.monotonic() < deadline, "the signal had no effect"
        time.sleep(0.02)


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while is_alive(pid):
        assert time.monotonic() < deadline, "the engine outlived its server"
        time.sleep(0.02)
