"""The cores and the memory that this process may use, on the machine or in its container."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)


def usable_cores(root: Path = Path("/")) -> int:
    """Cores, by this process's affinity and its control groups' quotas: `docker run --cpus`, Kubernetes' limits."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    for group in _groups(root, "cpu"):
        limit = _words(group / "cpu.max") or _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
        if len(limit) == 2 and limit[0] not in ("max", "-1"):  # noqa: PLR2004  quota and period
            cores = min(cores, float(limit[0]) / float(limit[1]))
    return max(1, int(cores))


def usable_memory(root: Path = Path("/")) -> int:
    """Bytes of memory, by the machine's size and the limits of this process's control groups."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for group in _groups(root, "memory"):
        for limit in _words(group / "memory.max") + _words(group / "memory.limit_in_bytes"):
            if limit.isdecimal():  # not "max"
                memory = min(memory, int(limit))
    return memory


def stay_on_one_node(threads: int | None, root: Path = Path("/")) -> None:
    """Run the calling thread, and the threads that it starts, on one NUMA node, so that they read its own memory.

    This is the node with the most cores that this process may use; among equals, the one with the most free memory.
    Nothing changes if all these cores belong to one node, or if the node has fewer cores than `threads`.
    """
    if not hasattr(os, "sched_getaffinity"):
        return
    allowed, nodes = os.sched_getaffinity(0), list((root / "sys/devices/system/node").glob("node[0-9]*"))
    cores = {node: allowed & _core_numbers(node / "cpulist") for node in nodes}
    usable = [node for node in nodes if cores[node]]
    if len(usable) < 2:  # noqa: PLR2004  one node is the whole machine
        return
    best = max(usable, key=lambda node: (len(cores[node]), _free_memory(node)))
    if threads is not None and threads > len(cores[best]):
        logger.info("%d threads need more than one NUMA node: they read each other's memory, which is slow", threads)
        return
    logger.info("computing on NUMA node %s, with %d cores", best.name.removeprefix("node"), len(cores[best]))
    os.sched_setaffinity(0, cores[best])


def _core_numbers(path: Path) -> set[int]:
    """The cores in a list like 0-3,8,10-11."""
    ranges = [part.partition("-") for part in ",".join(_words(path)).split(",") if part]
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}


def _free_memory(node: Path) -> int:
    """The free memory of a NUMA node, in KiB."""
    words = _words(node / "meminfo")
    return int(words[words.index("MemFree:") + 1]) if "MemFree:" in words else 0


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The control group of this process and all above it, of version 2 and of version 1's `controller`."""
    for line in _words(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" or controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controllers
            group = mount / path.strip("/")
            # A container may see the host's path, which is not mounted there. Then the mount is its own group.
            yield from (group, *(parent for parent in group.parents if parent.is_relative_to(mount)))


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return []
