"""What a process may use: cores by affinity and by quotas of control groups, and memory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from eagle_server.machine import stay_on_one_node, usable_cores, usable_memory


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/", {}, 16),
        ("0::/a/b", {"sys/fs/cgroup/a/b/cpu.max": "max 100000"}, 16),
        ("0::/a/b", {"sys/fs/cgroup/a/b/cpu.max": "250000 100000"}, 2),
        ("0::/a/b", {"sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/a/cpu.max": "400000 100000"}, 4),
        ("0::/the/hosts/path", {"sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        ("0::/", {"sys/fs/cgroup/cpu.max": "6400000 100000"}, 16),
        (
            "3:cpu,cpuacct:/docker/x\n2:memory:/docker/x",
            {
                "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": "200000",
                "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            2,
        ),
        ("nonsense", {"sys/fs/cgroup/cpu.max": "nonsense"}, 16),
    ],
)
def test_quotas_bound_the_cores(tmp_path: Path, groups: str, files: dict[str, str], cores: int) -> None:
    assert usable_cores(machine(tmp_path, groups, files)) == cores


def test_nothing_but_the_affinity_counts_where_there_are_no_groups(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == 16


@pytest.mark.parametrize(
    ("groups", "file", "text", "limited"),
    [
        ("0::/a", "sys/fs/cgroup/a/memory.max", "1000000", True),
        ("0::/a", "sys/fs/cgroup/a/memory.max", "max", False),
        ("0::/a", "sys/fs/cgroup/b/memory.max", "1000000", False),
        ("7:memory:/docker/x", "sys/fs/cgroup/memory/memory.limit_in_bytes", "1000000", True),
        ("7:memory:/docker/x", "sys/fs/cgroup/memory/memory.limit_in_bytes", str(2**63 - 4096), False),
    ],
)
def test_limits_bound_the_memory(tmp_path: Path, groups: str, file: str, text: str, limited: bool) -> None:
    assert (usable_memory(machine(tmp_path, groups, {file: text})) == 1_000_000) is limited


@pytest.mark.parametrize(
    ("nodes", "threads", "taken"),
    [
        ({0: ("0-15", 9)}, None, None),
        ({0: ("0-7", 9), 1: ("8-15", 10)}, None, range(8, 16)),
        ({0: ("0-7", 10), 1: ("8-15", 9)}, None, range(8)),
        ({0: ("0-3,8-11,12", 1), 1: ("4-7,13-15", 9)}, None, (0, 1, 2, 3, 8, 9, 10, 11, 12)),
        ({0: ("0-7", 9), 1: ("8-15", 10)}, 8, range(8, 16)),
        ({0: ("0-7", 9), 1: ("8-15", 10)}, 9, None),
        ({0: ("0-15", 9), 1: ("16-31", 10)}, None, None),  # the affinity is of one node
        ({0: ("0-15", 9), 1: ("", 10)}, None, None),  # memory without cores
    ],
)
def test_an_engine_stays_on_one_node(
    nodes: dict[int, tuple[str, int]],
    threads: int | None,
    taken: Iterable[int] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: chosen.append(cores), raising=False)
    files = {}
    for node, (cores, free) in nodes.items():
        files[f"sys/devices/system/node/node{node}/cpulist"] = cores
        files[f"sys/devices/system/node/node{node}/meminfo"] = (
            f"Node {node} MemTotal: 99 kB\nNode {node} MemFree: {free} kB"
        )
    stay_on_one_node(threads, machine(tmp_path, "0::/", files))
    assert chosen == ([] if taken is None else [set(taken)])
