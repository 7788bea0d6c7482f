"""The cores and the memory that this process may use: those of the machine, or of its container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """By this process's affinity, and the quotas of its control groups: `docker run --cpus`, Kubernetes' limits."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    for group in _groups(root, "cpu"):
        limit = _words(group / "cpu.max") or _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
        if len(limit) == 2 and limit[0] not in ("max", "-1"):  # noqa: PLR2004  quota and period
            cores = min(cores, float(limit[0]) / float(limit[1]))
    return max(1, int(cores))


def usable_memory(root: Path = Path("/")) -> int:
    """Bytes, by the machine's memory and the limits of this process's control groups."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for group in _groups(root, "memory"):
        for limit in _words(group / "memory.max") + _words(group / "memory.limit_in_bytes"):
            if limit.isdecimal():  # not "max"
                memory = min(memory, int(limit))
    return memory


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The control group of this process and all above it, of version 2 and of version 1's `controller`."""
    for line in _words(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" or controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controllers
            own = mount / path.strip("/")
            # A container may see the host's path, which is not mounted there: its own group is the mount then.
            yield from (own, *(each for each in own.parents if each.is_relative_to(mount)))


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return []
